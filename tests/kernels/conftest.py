"""What tests of the operators share: one implementation at a time, one thread unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import kernels
from kernels import Implementation


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test to use the native operators may have to build them: 20 s, more on a busy machine."""
    for item in items:
        if "tests/kernels/" in item.path.as_posix():
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kernels.start()
    kernels.set_num_threads(1)
    yield
    kernels.start()
    kernels.set_num_threads(1)


@pytest.fixture(params=list(Implementation), ids=lambda implementation: implementation.value)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    """Runs the test with the native operators and again with the references."""
    wanted = Implementation(request.param)
    if kernels.start(wanted if wanted is Implementation.REFERENCE else None) is not wanted:
        pytest.skip("no C++ compiler here")
    kernels.set_num_threads(1)
    return wanted


@pytest.fixture
def native() -> None:
    """The test is about the native operators."""
    if kernels.start() is not Implementation.NATIVE:
        pytest.skip("no C++ compiler here")

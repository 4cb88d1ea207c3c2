"""What is compiled ahead, and that nothing is launched. Without a GPU, Triton's own part is left out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")
import triton

import kernels
from kernels.gpu import activation, compiling


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Name and `warmup` of each kernel that Triton was asked to run."""
    found: list[tuple[str, bool]] = []

    def run(self: triton.JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
        del args, grid, options
        found.append((self.fn.__name__, warmup))

    monkeypatch.setattr(triton.JITFunction, "run", run)
    return found


@pytest.fixture(autouse=True)
def _no_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def mode(threads: object) -> Iterator[None]:
        assert threads
        yield

    if "asked" in request.fixturenames:
        monkeypatch.setattr(triton, "AsyncCompileMode", mode)


def test_each_kind_of_launch_is_compiled_once(asked: list[tuple[str, bool]]) -> None:
    x = torch.empty(4, 256)

    def launches() -> None:
        for _ in range(3):
            activation.activate_and_mul(x, kernels.Activation.SILU)
        activation.activate_and_mul(x, kernels.Activation.GELU_TANH)
        activation.activate_and_mul(x.half(), kernels.Activation.SILU)
        activation.activate_and_mul(x[:, 1:], kernels.Activation.SILU)  # not aligned
        activation.soft_cap_(x, 30.0)

    compiling.compile_ahead(launches)
    assert asked == [("activate_and_mul_kernel", True)] * 4 + [("soft_cap_kernel", True)]
    launches()
    assert asked[5:] == [("activate_and_mul_kernel", False)] * 6 + [("soft_cap_kernel", False)]


def test_launches_go_on_after_an_error(asked: list[tuple[str, bool]]) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        compiling.compile_ahead(fail)
    activation.soft_cap_(torch.empty(4), 30.0)
    assert asked == [("soft_cap_kernel", False)]


@pytest.mark.gpu
def test_a_kernel_compiled_ahead_has_not_run_and_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.full((100,), 60.0, device="cuda")
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda *, fn, **_: compiled.append(fn.name.rpartition(".")[2])
    )
    activation.soft_cap_kernel.device_caches.clear()
    kernels.compile_ahead(lambda: activation.soft_cap_(x, 30.0))
    assert compiled == ["soft_cap_kernel"]
    assert bool((x == 60.0).all())
    activation.soft_cap_(x, 30.0)
    assert compiled == ["soft_cap_kernel"]
    torch.testing.assert_close(x, 30 * torch.tanh(torch.full_like(x, 2.0)))

from __future__ import annotations

import mmap

import pytest
import torch

from kernels.cpu import pages


@pytest.fixture(autouse=True)
def _small_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_latest", None)
    monkeypatch.setattr(pages, "_MAPPING_BYTES", 4096)


def test_weights_are_zero_aligned_and_apart() -> None:
    tensors = [pages.zeros((3, rows), torch.bfloat16) for rows in (1, 40, 700, 5000)]
    for number, tensor in enumerate(tensors, 1):
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()
        tensor.fill_(number)
    assert [float(tensor.unique()) for tensor in tensors] == [1, 2, 3, 4]
    assert (tensors[0].shape, tensors[0].dtype, tensors[0].is_contiguous()) == ((3, 1), torch.bfloat16, True)


def test_a_mapping_begins_with_a_huge_page() -> None:
    assert pages.zeros((1,), torch.float32).data_ptr() % 2**21 == 0


def test_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            raise OSError("no huge pages")

    monkeypatch.setattr(mmap, "mmap", Plain)
    assert pages.zeros((2, 2), torch.float32).tolist() == [[0, 0], [0, 0]]

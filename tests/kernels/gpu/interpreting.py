"""Fixtures of tests in Triton's interpreter: what it does otherwise than a GPU is mended, references are the operators.

A plugin, of the files that `test_interpreted` runs in processes of their own.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

import kernels


@pytest.fixture(autouse=True)
def _scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter makes integers by `int(array)`, which numpy allows only without dimensions since 2.4."""
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(autouse=True)
def _rounding_to_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's loses the carry of a mantissa that rounds up to the next power of two."""
    convert = interpreter._convert_float

    def converted(x: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
        if target.is_fp8e4nv():
            return torch.from_numpy(x.astype(np.float32)).to(kernels.FP8).view(torch.uint8).numpy()
        return convert(x, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


@pytest.fixture(autouse=True)
def _least_of_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's minimum of NaN and a number is NaN."""

    def least(self: interpreter.InterpreterBuilder, left: object, right: object) -> object:
        return self.binary_op(left, right, np.fmin)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_minnumf", least)


@pytest.fixture(autouse=True)
def _references() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kernels.start(kernels.Implementation.REFERENCE)

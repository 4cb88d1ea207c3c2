"""Compiles what the launchers would launch, for a GPU that is not there.

Launchers are called with CPU tensors; instead of running, each launch is compiled for the target
with its own types, constants and options, and its shared memory is checked against the target's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from kernels._gluon import TensorDescriptor
from kernels.gpu import launch

SHARED_MEMORY = {80: 166_912, 90: 232_448}
_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")


@dataclass(slots=True)
class Compiled:
    """Names of the kernels compiled, in order, with their register spills or stack left to ptxas. `layouts` are
    Triton's own form of them, `dependent` the names of those that may begin before the kernel before them has ended.
    """

    names: list[str] = field(default_factory=list)
    dependent: list[str] = field(default_factory=list)
    assembly: list[str] = field(default_factory=list)
    layouts: list[str] = field(default_factory=list)


@contextmanager
def compiling(capability: int, monkeypatch: pytest.MonkeyPatch, *, warpgroups: bool = False) -> Iterator[Compiled]:
    compiled = Compiled()
    seen: set[str] = set()

    def run(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> None:
        del grid, warmup
        source, chosen = _source(self, args, options)
        mark = f"{self.fn.__name__} {source.signature} {source.constants} {chosen}"
        if mark in seen:
            return
        seen.add(mark)
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chosen)
        assert kernel.metadata.shared <= SHARED_MEMORY[capability], mark
        compiled.names.append(self.fn.__name__)
        if chosen.get("launch_pdl"):
            compiled.dependent.append(self.fn.__name__)
        compiled.assembly.append(kernel.asm["ptx"])
        compiled.layouts.append(kernel.asm["ttgir"])

    limits = launch.Limits(
        num_sms=132,
        shared_memory=SHARED_MEMORY[capability],
        dependent=capability >= 90,
        warpgroups=warpgroups,
    )
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        for module in (
            "activation",
            "decode",
            "embedding",
            "experts",
            "held",
            "logprobs",
            "matmul",
            "norm",
            "prefill",
            "rope",
            "routing",
            "sampling",
            "short",
            "vector",
        ):
            patch.setattr(f"kernels.gpu.{module}.limits", lambda device: limits)
        yield compiled


def _source(
    kernel: JITFunction, args: tuple[object, ...], options: dict[str, object]
) -> tuple[ASTSource, dict[str, object]]:
    names = kernel.arg_names
    values = dict(zip(names, args, strict=False)) | {k: v for k, v in options.items() if k in names}
    constants: dict[str, object] = {}
    signature: dict[str, str] = {}
    aligned: dict[tuple[int, ...], list[list[object]]] = {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
            aligned[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            element = _TYPES[value.base.dtype].removeprefix("*")
            signature[parameter.name] = f"tensordesc<{element}{value.block_shape},{value.layout!r}>"
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                aligned[(place,)] = [["tt.divisibility", 16]]
    chosen = {name: options[name] for name in _OPTIONS if name in options}
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    return language(kernel, signature, constants, aligned), chosen

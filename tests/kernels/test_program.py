"""Programs: the same bits as the calls they were recorded from, for any number of rows; what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import kernels

ROWS, HIDDEN, HEADS, KV_HEADS, DIM, EXPERTS = 24, 48, 4, 2, 16, 5


@dataclass(frozen=True)
class Layer:
    """A layer that uses every operation, on a pool of its own."""

    weight: Tensor
    qkv: kernels.PackedLinear
    output: kernels.PackedLinear
    bias: Tensor
    table: Tensor
    norms: kernels.HeadNorms
    router: kernels.PackedLinear
    experts: kernels.PackedExperts
    keys: Tensor
    values: Tensor

    @classmethod
    def make(cls, dtype: torch.dtype) -> Layer:
        k_shape, v_shape = kernels.kv_cache_shapes(ROWS, 16, KV_HEADS, DIM)
        experts = kernels.empty_experts(EXPERTS, HIDDEN, DIM, dtype=dtype, device=torch.device("cpu"))
        for expert in range(EXPERTS):
            gate, up, down = (torch.randn(DIM, HIDDEN).to(dtype) for _ in range(3))
            experts.fill(expert, gate, up, down.t())
        return cls(
            weight=torch.randn(HIDDEN).to(dtype),
            qkv=kernels.pack_linear(torch.randn((HEADS + 2 * KV_HEADS) * DIM, HIDDEN).to(dtype)),
            output=kernels.pack_linear(torch.randn(2 * HIDDEN, HEADS * DIM).to(dtype)),
            bias=torch.randn(2 * HIDDEN),
            table=torch.randn(64, DIM),
            norms=kernels.HeadNorms(torch.randn(DIM).to(dtype), torch.randn(DIM).to(dtype), 1e-6),
            router=kernels.pack_linear(torch.randn(EXPERTS, HIDDEN).to(dtype)),
            experts=experts,
            keys=torch.zeros(k_shape, dtype=dtype),
            values=torch.zeros(v_shape, dtype=dtype),
        )

    def __call__(self, x: Tensor, batch: kernels.AttentionBatch, slots: Tensor) -> tuple[Tensor, Tensor]:
        normed, residual = kernels.rms_norm(x, self.weight, 1e-5)
        attended = kernels.rotate_and_attend(
            *(kernels.linear(normed, self.qkv), self.table, self.keys, self.values, batch, slots),
            num_heads=HEADS,
            scale=0.25,
            norms=self.norms,
        )
        gates = kernels.linear(attended.view(x.shape[0], -1), self.output, self.bias)
        _, residual = kernels.rms_norm(kernels.silu_and_mul(gates), self.weight, 1e-5, residual)
        normed, residual = kernels.rms_norm(kernels.gelu_and_mul(gates), self.weight, 1e-5, residual)
        logits = kernels.linear(normed, self.router, out_dtype=torch.float32)
        mixed = kernels.mix_experts(normed, *kernels.route(logits, 2, renormalize=True), self.experts)
        return kernels.rms_norm(mixed, self.weight, 1e-5, residual)


def batch_of(rows: int) -> tuple[kernels.AttentionBatch, Tensor]:
    """One sequence a row, each at another position; its block is the row's number."""
    numbers = torch.arange(rows, dtype=torch.int32)
    tables = torch.arange(ROWS, dtype=torch.int32).view(ROWS, 1)
    return kernels.AttentionBatch(tables, numbers, numbers % 16), numbers.long() * 16 + numbers % 16


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bits_are_those_of_the_operators(native: None, dtype: torch.dtype, threads: int) -> None:
    kernels.set_num_threads(threads)
    layer = Layer.make(dtype)
    x = torch.randn(ROWS, HIDDEN).to(dtype)
    batch, slots = batch_of(ROWS)
    program, (output, residual) = kernels.record(lambda: layer(x, batch, slots), ROWS)
    assert len(program) == 17
    for rows in (ROWS, 1, 7):
        layer.keys.zero_()
        layer.values.zero_()
        program.run(rows)
        pool = layer.keys.clone(), layer.values.clone()
        few = replace(batch, seq_index=batch.seq_index[:rows], positions=batch.positions[:rows])
        expected = layer(x[:rows], few, slots[:rows])
        assert torch.equal(output[:rows], expected[0])
        assert torch.equal(residual[:rows], expected[1])
        assert torch.equal(pool[0], layer.keys)
        assert torch.equal(pool[1], layer.values)
        x.copy_(x.flip(1))


def test_a_run_reads_its_inputs_anew_and_keeps_its_buffers_alive(native: None) -> None:
    packed = kernels.pack_linear(torch.randn(32, 16))
    x = torch.randn(3, 16)
    program, y = kernels.record(lambda: kernels.linear(kernels.linear(x, packed)[:, :16], packed), 3)
    for _ in range(2):
        x.normal_()
        program.run(3)
        assert torch.equal(y, kernels.linear(kernels.linear(x, packed)[:, :16], packed))


def test_buffers_are_used_again(native: None) -> None:
    """A chain of ten layers needs two buffers, and those whose result is still wanted stay apart."""
    packed = kernels.pack_linear(torch.eye(16))
    x = torch.randn(4, 16)

    def chain() -> tuple[Tensor, Tensor]:
        first = y = kernels.linear(x, packed)
        for _ in range(10):
            y = kernels.linear(y, packed)
        return first, y

    program, (first, last) = kernels.record(chain, 4)
    assert len(program._memory) == 3
    program.run(4)
    assert torch.equal(first, x)
    assert torch.equal(last, x)


def test_refusal_of_indices_names_the_operator(native: None) -> None:
    layer = Layer.make(torch.float32)
    x = torch.randn(ROWS, HIDDEN)
    batch, slots = batch_of(ROWS)
    program, _ = kernels.record(lambda: layer(x, batch, slots), ROWS)
    slots[2] = -1
    program.run(2)
    with pytest.raises(IndexError, match=r"write_kv \(call 6 of the program\)"):
        program.run(3)
    batch.positions[0] = 64
    with pytest.raises(IndexError, match=r"rope \(call 4 of the program\)"):
        program.run(1)


X = torch.ones(3, 16)

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "arithmetic": (lambda: X + 1, "torch's add"),
    "a copy": (lambda: X[:, ::2].contiguous(), "torch's contiguous"),
    "another dtype": (lambda: X.to(torch.bfloat16), "torch's to"),
    "in place": (lambda: X.mul_(1), "torch's mul_"),
    "assignment": (lambda: X.__setitem__(0, 1.0), "torch's __setitem__"),
    "into a result": (lambda: torch.add(X, 1, out=torch.empty(3, 16)), "torch's add"),
    "a value": (lambda: int(X.max()), "torch's max"),
    "other rows": (lambda: kernels.silu_and_mul(X[:2]), "silu_and_mul is called for 2 of 3 rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_operator_is_refused(native: None, name: str) -> None:
    body, text = REFUSED[name]
    with pytest.raises(kernels.NotRecordable, match=text):
        kernels.record(body, 3)
    assert torch.equal(X, torch.ones(3, 16))
    assert torch.equal(kernels.rms_norm(X, torch.ones(16), 0.0)[0], X), "operators compute again"


def test_operators_outside_a_program_are_refused(native: None) -> None:
    ids = torch.ones(3, dtype=torch.int64)
    with pytest.raises(kernels.NotRecordable, match="gumbel_noise cannot be a part"):
        kernels.record(lambda: kernels.gumbel_noise(ids, ids, 9), 3)


def test_references_are_not_recorded() -> None:
    kernels.start(kernels.Implementation.REFERENCE)
    with pytest.raises(kernels.NotRecordable, match="not in force"):
        kernels.record(lambda: None, 3)

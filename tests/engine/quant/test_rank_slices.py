"""What several devices read of a matrix, joined, is the matrix, in every format; and none reads it whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.loading.formats import Checkpoint, Region
from engine.loading.quantization import Quantization
from engine.loading.store import ModelError
from engine.loading.weights import DummyWeights, WeightReader
from engine.quant import LinearMethod, LinearPart, method_of
from engine.quant.unquantized import UnquantizedWeight
from tests.engine.quant.checkpoints import module_folder, open_folder
from tests.engine.quant.packers import Packed, awq, gptq, packed_int, scaled_bytes

# The first layer of a session may have to build the kernels.
pytestmark = pytest.mark.timeout(300)

FP8 = torch.float8_e4m3fn
ROWS, COLUMNS = 64, 256
WHOLE = LinearPart("m", ROWS, COLUMNS)


def gptq_config(bits: int, group_size: int) -> dict[str, object]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": False, "desc_act": True}


def compressed(storage: str, **weights: object) -> dict[str, object]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": storage, "config_groups": groups}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
BYTES = {"num_bits": 8, "type": "float", "strategy": "channel"}

CASES: dict[str, tuple[dict[str, object], Packed]] = {
    **{
        f"gptq {bits} bits, groups of {size}": (
            gptq_config(bits, size),
            gptq(ROWS, COLUMNS, bits=bits, group_size=size),
        )
        for bits, size in ((2, 32), (3, 32), (4, 64), (8, -1))
    },
    "gptq act-order": (gptq_config(4, 32), gptq(ROWS, COLUMNS, act_order=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, awq(ROWS, COLUMNS, group_size=64)),
    "w4a16": (compressed("pack-quantized", **INT4), packed_int(ROWS, COLUMNS, symmetric=False)),
    "w4a16 act-order": (
        compressed("pack-quantized", **INT4, actorder="group"),
        packed_int(ROWS, COLUMNS, symmetric=False, act_order=True),
    ),
    "fp8 by row": (
        compressed("float-quantized", **BYTES),
        scaled_bytes(ROWS, COLUMNS, dtype=FP8, block=(1, COLUMNS)),
    ),
    "fp8 by matrix": (
        compressed("float-quantized", **BYTES | {"strategy": "tensor"}),
        scaled_bytes(ROWS, COLUMNS, dtype=FP8, block=(ROWS, COLUMNS)),
    ),
    "int8 in blocks": (
        compressed("int-quantized", num_bits=8, type="int", strategy="block", block_structure=[24, 48]),
        scaled_bytes(ROWS, COLUMNS, dtype=torch.int8, block=(24, 48)),
    ),
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [24, 48]},
        scaled_bytes(ROWS, COLUMNS, dtype=FP8, block=(24, 48), scale_name="weight_scale_inv"),
    ),
}


def loaded(method: LinearMethod, reader: WeightReader, part: LinearPart) -> Tensor:
    """The weight as it is multiplied by."""
    weight = method.load(reader, [part])
    assert isinstance(weight, UnquantizedWeight)
    return weight.packed.rows(torch.arange(part.shape[0]))


def share(rank: int, num_ranks: int, *, by_rows: bool) -> LinearPart:
    return WHOLE.of_rank(rank, num_ranks, by_rows=by_rows)


@pytest.mark.parametrize("name", CASES)
def test_shares_of_two_and_four(tmp_path: Path, name: str) -> None:
    config, packed = CASES[name]
    reader, method = open_folder(module_folder(tmp_path, config, {"m": packed}))
    for num_ranks in (2, 4):
        for by_rows in (True, False):
            shares = [loaded(method, reader, share(rank, num_ranks, by_rows=by_rows)) for rank in range(num_ranks)]
            assert torch.equal(torch.cat(shares, dim=0 if by_rows else 1), packed.weight), (num_ranks, by_rows)
    reader.finish(())


@pytest.mark.parametrize("name", CASES)
def test_any_part(tmp_path: Path, name: str) -> None:
    """Also where it begins and ends inside a word, a group and a block."""
    config, packed = CASES[name]
    reader, method = open_folder(module_folder(tmp_path, config, {"m": packed}))
    for rows, columns in ((range(5, 23), range(COLUMNS)), (range(ROWS), range(3, 101)), (range(63, 64), range(40, 41))):
        found = loaded(method, reader, replace(WHOLE, only_rows=rows, only_columns=columns))
        assert torch.equal(found, packed.weight[rows.start : rows.stop, columns.start : columns.stop])


def _joined(config: Mapping[str, object], method: LinearMethod, path: Path) -> None:
    weight = torch.randn(ROWS, COLUMNS)
    reader, _ = open_folder(module_folder(path, config, {"m": weight}))
    whole = loaded(method, reader, WHOLE)
    for by_rows in (True, False):
        shares = [loaded(method, reader, share(rank, 4, by_rows=by_rows)) for rank in range(4)]
        assert torch.equal(torch.cat(shares, dim=0 if by_rows else 1), whole)


def test_plain_weights_and_those_rounded_at_load(tmp_path: Path) -> None:
    """A row's scale does not depend on how many devices share it."""
    _joined({"quant_method": "fp8"}, method_of(None), tmp_path / "plain")
    _joined({"quant_method": "fp8"}, method_of(Quantization("fp8", "--quantization fp8", {})), tmp_path / "online")


def test_dummy_weights() -> None:
    reader = DummyWeights(torch.float32, torch.device("cpu"))
    whole = reader.take("m.weight", (ROWS, COLUMNS))
    own = share(1, 4, by_rows=True)
    assert torch.equal(reader.take("m.weight", (ROWS, COLUMNS), own.region), whole[16:32])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("by_rows", [True, False])
def test_no_more_than_the_share_is_read(
    tmp_path: Path, name: str, by_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, packed = CASES[name]
    reader, method = open_folder(module_folder(tmp_path, config, {"m": packed}))
    read: dict[str, int] = {}
    whole_read = Checkpoint.read

    def counted(checkpoint: Checkpoint, tensor: str, region: Region | None = None) -> Tensor:
        found = whole_read(checkpoint, tensor, region)
        read[tensor] = found.nbytes
        return found

    monkeypatch.setattr(Checkpoint, "read", counted)
    loaded(method, reader, share(1, 4, by_rows=by_rows))
    for ending in ("qweight", "weight", "weight_packed"):
        if ending in packed.tensors:
            assert read[f"m.{ending}"] == packed.tensors[ending].nbytes // 4
    assert sum(read.values()) <= sum(tensor.nbytes for tensor in packed.tensors.values()) * 0.4


def test_shares_that_are_not_equal() -> None:
    with pytest.raises(ModelError, match="m has 64 rows, which cannot be divided among 3 devices"):
        share(0, 3, by_rows=True)
    with pytest.raises(ModelError, match="m has 256 columns, which cannot be divided among 3 devices"):
        share(0, 3, by_rows=False)


def test_a_share_of_a_share() -> None:
    """Queries in a matrix that holds keys and values as well."""
    queries = replace(WHOLE, only_rows=range(32))
    assert queries.of_rank(1, 2, by_rows=True).region == (range(16, 32), range(COLUMNS))

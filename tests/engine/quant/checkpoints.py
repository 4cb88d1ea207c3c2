"""Folders with quantized modules, and the readers of what is in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.loading.formats import Checkpoint
from engine.loading.quantization import read_quantization
from engine.loading.store import ModelFolder
from engine.loading.weights import WeightReader
from engine.quant import LinearMethod, method_of
from tests.engine.quant.packers import Packed


def module_folder(path: Path, config: Mapping[str, object], modules: Mapping[str, Packed | Tensor]) -> Path:
    """A folder whose config.json has this `quantization_config`, and these modules, quantized or plain."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"quantization_config": dict(config)}))
    tensors: dict[str, Tensor] = {}
    for name, module in modules.items():
        parts = {"weight": module} if isinstance(module, Tensor) else module.tensors
        tensors |= {f"{name}.{ending}": tensor for ending, tensor in parts.items()}
    save_file(tensors, path / "model.safetensors")
    return path


def open_folder(path: Path, dtype: torch.dtype = torch.float32) -> tuple[WeightReader, LinearMethod]:
    folder = ModelFolder(path)
    method = method_of(read_quantization(folder, None))
    return WeightReader(Checkpoint(folder), dtype, lambda phase, done, total: None), method

"""`sluicegate check MODEL`: what a start would find, without starting."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import ByteSize, Field, model_validator

from engine.config import BLOCK_UNIT, EngineConfig
from engine.plan import LoadError
from engine.preflight import check
from engine.preflight.devices import find_device
from engine.preflight.table import render
from engine.preflight.wanted import Wanted
from engine.sources import resolve
from protocol import logs
from protocol.config import Positional, Spelled
from protocol.progress import ProgressBar


class CheckConfig(EngineConfig):
    """Look at a model before it is loaded: files, shapes, tokenizer, quantization, and what fits."""

    #: What has no part in the answer.
    decided: ClassVar[frozenset[str]] = frozenset(
        name
        for name in EngineConfig.model_fields
        if name.startswith(("fake_", "curve_"))
        or name
        in (
            *("listen", "served_model_name", "metrics_port", "hang_timeout", "drain_timeout", "threads"),
            *("enable_prefix_caching", "parent_pipe", "reproducible"),
        )
    )

    model: Annotated[str, Positional()] = Field(
        description="Folder of the model, org/name of a hub, or s3://bucket/prefix."
    )
    #: Judged in the report, with all other problems.
    block_size: int = Field(BLOCK_UNIT, ge=1, description="Tokens in a block of KV.")
    gpu_memory_bytes: ByteSize | None = Field(
        None, description="Memory of each GPU, such as 24GiB, to plan for one that is not in this machine."
    )
    as_json: Annotated[bool, Spelled("--json")] = Field(False, description="Print the report as JSON.")

    @model_validator(mode="before")
    @classmethod
    def _for_a_gpu(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Memory of a GPU names the device, which other settings depend on."""
        return {"device": "cuda", **given} if given.get("gpu_memory_bytes") is not None else given


def main(argv: Sequence[str]) -> int:
    """0 when the model can be served, 1 when not."""
    config = CheckConfig.from_command_line(argv, prog="sluicegate check")
    logs.configure("warning", config.log_format)
    bar = ProgressBar()
    try:
        path = resolve(
            config.model, cache_dir=config.cache_dir, revision=config.revision, offline=config.offline, progress=bar
        )
    except LoadError as error:
        bar.close()
        sys.stderr.write(f"sluicegate check: {error}\n")
        return 1
    bar.close()
    device = find_device(config.device, config.gpu_memory_bytes)
    report = check(path, Wanted.by(config, device), name=config.model)
    if config.as_json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print(render(report, color=sys.stdout.isatty()))
    return 0 if report.ok else 1

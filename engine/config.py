"""What the operator asked of an engine (`EngineConfig`) and what start-up decided (`Resolved`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ByteSize, Field, model_validator

from engine.plan import ModelInfo
from protocol.config import Positional, Settings, Shown
from protocol.messages import MAX_MODEL_NAME

#: A block holds this many tokens' KV, or a multiple up to the largest.
BLOCK_UNIT, LARGEST_BLOCK = 16, 256

#: vLLM's other names of dtypes.
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


#: Requests at a time and tokens of a step, by device: a step of 256 tokens takes a CPU half a second for a small model,
#: and a GPU does nothing else while it reads the weights for fewer than some hundred.
_STEP_SIZES = {"cpu": (64, 256), "cuda": (256, 16384)}

#: Where the driver of a GPU is loaded; torch, which knows better, takes seconds to import.
_DRIVER = Path("/dev/nvidiactl")


def _step_sizes(device: str) -> tuple[int, int]:
    if device == "auto":
        device = "cuda" if _DRIVER.exists() else "cpu"
    return _STEP_SIZES[device]


def _default_max_num_seqs(given: dict[str, Any]) -> int:
    return _step_sizes(given.get("device", "auto"))[0]


def _default_max_num_batched_tokens(given: dict[str, Any]) -> int:
    return _step_sizes(given.get("device", "auto"))[1]


def _dtype(asked: object) -> object:
    return _DTYPE_ALIASES.get(asked, asked) if isinstance(asked, str) else asked


class EngineConfig(Settings):
    """Load a model onto this machine's device and serve it to gateways."""

    model: Annotated[str | None, Positional()] = Field(
        None, description="The model: a folder, ORG/NAME[@REVISION] of a hub, or s3://BUCKET/PREFIX."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub's model.")
    offline: bool = Field(False, description="Take models from the cache alone, and ask no hub or object store.")
    served_model_name: str | None = Field(
        None, description="Name that requests call the model by, instead of what was given as --model."
    )
    listen: str = Field(
        "tcp://127.0.0.1:5557", description="Address that gateways connect to: tcp://HOST:PORT or ipc://PATH."
    )
    backend: str = Field(
        "auto",
        description="What computes: torch_runner, transformers, fake, or a plug-in's; auto is torch_runner for the "
        "architectures it has and transformers, slow, for others.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where the model runs; auto is a GPU if there is one."
    )
    load_format: Literal["auto", "safetensors", "pt", "gguf", "dummy"] = Field(
        "auto",
        description="Weight files: auto takes safetensors, else pt (pytorch_model.bin), else gguf; dummy takes random "
        "weights, for measurements.",
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(_dtype)] = Field(
        "auto",
        description="Type of weights, activations and KV; auto is what the model's config says. half is float16, "
        "float is float32.",
    )
    quantization: Literal["awq", "compressed-tensors", "fp8", "gptq"] | None = Field(
        None,
        description="Confirms how the weights are quantized, which is found by itself. fp8 rounds plain weights to FP8 "
        "as they are loaded.",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=1024,
        description="Devices that the model is divided among. An engine has one so far; `sluicegate check` plans for "
        "more.",
    )
    kv_cache_dtype: Literal["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"] = Field(
        "auto",
        description="Type of the KV pool: auto is that of activations, or fp8 where the checkpoint has a "
        "kv_cache_scheme. fp8 is fp8_e4m3, takes half of bfloat16's memory and the model's scales; a GPU has it from "
        "compute capability 8.9 on.",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Longest sequence, prompt and answer, in tokens; the model's own context if not given."
    )
    max_num_batched_tokens: Annotated[int, Shown("256, on a GPU 16384")] = Field(
        default_factory=_default_max_num_batched_tokens,
        ge=1,
        description="Tokens computed in one step; longer prompts are taken in chunks.",
    )
    max_num_prefill_tokens: Annotated[int | None, Shown("on a GPU what it computes in 20 ms, else no limit")] = Field(
        None,
        ge=1,
        description="Tokens of a step that has both prompts and decodes, lest streams wait for long prompts; half are "
        "left to prompts in any case.",
    )
    max_num_seqs: Annotated[int, Shown("64, on a GPU 256")] = Field(
        default_factory=_default_max_num_seqs, ge=1, le=4096, description="Requests that run at the same time."
    )
    block_size: int = Field(
        BLOCK_UNIT, ge=BLOCK_UNIT, le=LARGEST_BLOCK, multiple_of=BLOCK_UNIT, description="Tokens in a block of KV."
    )
    kv_cache_memory_bytes: Annotated[ByteSize | None, Shown("min(2GiB, a quarter of free memory)")] = Field(
        None, description="Memory for the KV block pool, such as 512MiB."
    )
    gpu_memory_utilization: float = Field(
        0.92, gt=0, le=1, description="Share of a GPU's memory for weights, steps and, with what is left, the KV pool."
    )
    enable_prefix_caching: bool = Field(True, description="Keep the KV of finished prompts for those that begin alike.")
    reproducible: bool = Field(
        True,
        description="Give a request the same bits in any batch, and wherever it is resumed. `--no-reproducible` takes "
        "the fastest kernels instead; on a CPU it changes nothing.",
    )
    threads: Annotated[int | None, Shown("all cores")] = Field(None, ge=1, description="Threads of the CPU device.")
    hang_timeout: float = Field(
        10.0, gt=0, description="Seconds without a finished step after which gateways take a busy engine for hung."
    )
    drain_timeout: float = Field(
        5.0, ge=0, description="Seconds that running requests get to finish after SIGTERM, before gateways move them."
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Port on 127.0.0.1 for /metrics, /health and /ready; off if not given."
    )
    curve_secret_key_file: Path | None = Field(
        None, description="CURVE key pair of this engine (`zmq.auth` certificate); required off loopback and ipc."
    )
    curve_allowed_keys_dir: Path | None = Field(
        None, description="Folder of the public keys of the gateways that may connect; required with a key pair."
    )
    step_log: Path | None = Field(None, description="File for the times at which steps are sent, as JSON lines.")
    profile_dir: Path | None = Field(
        None, description="Folder for profiles: SIGUSR2 then records the next 64 steps into a Chrome trace."
    )
    fake_num_blocks: int = Field(4096, ge=1, description="fake backend: size of the block pool.")
    fake_step_ms: float = Field(0.0, ge=0, description="fake backend: least time of a step.")
    fake_token_us: float = Field(0.0, ge=0, description="fake backend: time added by each token computed in a step.")
    fake_depth: int = Field(1, ge=1, le=2, description="fake backend: steps in flight.")
    fake_mean_length: int = Field(
        0, ge=0, description="fake backend: average tokens before it says end-of-sequence; 0 is never."
    )
    fake_numerics: str = Field("", description="fake backend: told apart by gateways as an engine of other bits.")
    fake_deadly_token: int | None = Field(
        None, ge=0, description="fake backend: a prompt with this token id ends the process when it is computed."
    )
    fake_load_s: float = Field(0.0, ge=0, description="fake backend: time to load.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"--max-num-batched-tokens must be at least --max-num-seqs ({self.max_num_seqs}), since every running "
                f"request computes a token in a step; got {self.max_num_batched_tokens}."
            )
        if (self.curve_secret_key_file is None) != (self.curve_allowed_keys_dir is None):
            raise ValueError("--curve-secret-key-file and --curve-allowed-keys-dir go together.")
        if len(self.public_name) > MAX_MODEL_NAME:
            raise ValueError(
                f"a model's public name has at most {MAX_MODEL_NAME} characters, got {len(self.public_name)}; "
                "give a shorter --served-model-name."
            )
        return self

    @property
    def public_name(self) -> str:
        """The name requests call the model by."""
        return self.served_model_name or self.model or self.backend


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings in force once the backend has loaded. Never changes afterwards."""

    public_name: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_prefill_tokens: int  # of a step in which others decode, with these
    enable_prefix_caching: bool
    hang_timeout_ms: int
    info: ModelInfo


def resolve(config: EngineConfig, info: ModelInfo) -> Resolved:
    """What was asked, with what the backend found."""
    return Resolved(
        public_name=config.public_name,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_prefill_tokens=config.max_num_prefill_tokens or info.prefill_tokens or config.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching and info.prefix_caching,
        hang_timeout_ms=round(config.hang_timeout * 1000),
        info=info,
    )

"""Every command and every call of `LLM` in the texts, as they stand there.

The texts name vLLM's module; a command is read with this program's name in its place.
"""

from __future__ import annotations

import shlex
from typing import Any

#: The server's commands, with lines joined.
COMMANDS = (
    "python -m vllm.entrypoints.openai.api_server --model /models/llama-7b-hf --dtype float16 --tensor-parallel-size 1",
    "python -m vllm.entrypoints.openai.api_server --model /models/llama-70b-hf --dtype bfloat16 "
    "--tensor-parallel-size 4 --gpu-memory-utilization 0.92",
    "python -m vllm.entrypoints.openai.api_server --model /models/llama-2-7b-gptq --quantization gptq --dtype float16 "
    "--tensor-parallel-size 1",
    "python -m vllm.entrypoints.openai.api_server --model /models/mistral-7b-awq --quantization awq --dtype float16 "
    "--tensor-parallel-size 2",
    "python -m vllm.entrypoints.openai.api_server --model ./llama-3-8b-awq --quantization awq --tensor-parallel-size 2 "
    "--max-model-len 8192 --gpu-memory-utilization 0.90",
    "python -m vllm.entrypoints.api_server --model Qwen/Qwen-7B-Chat --quantization gptq",
)

#: The keyword arguments of each `LLM(...)`.
CALLS: tuple[dict[str, Any], ...] = (
    {"model": "meta-llama/Llama-2-7b-chat-hf", "tensor_parallel_size": 2, "gpu_memory_utilization": 0.9},
    {"model": "TheBloke/Llama-2-13B-chat-GPTQ", "quantization": "gptq", "dtype": "half"},
)


def options(command: str) -> list[str]:
    """The words after the module's name: those after `sluicegate serve`."""
    python, flag, module, *words = shlex.split(command)
    assert (python, flag, module.split(".")[0]) == ("python", "-m", "vllm")
    return words


def without_parallel(words: list[str]) -> list[str]:
    """The command for one device."""
    at = words.index("--tensor-parallel-size") if "--tensor-parallel-size" in words else len(words)
    return words[:at] + words[at + 2 :]

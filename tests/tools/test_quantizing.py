"""Real checkpoints of the tools of docs/quantizing.md, made by the page's commands and served.

    pytest -m tools

makes each tool's environment once (some GB, in the cache), quantizes the demo model, asks it, and reads the log.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import Process, Server
from tests.tools.page import Page

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."

START_TIMEOUT_S = 240.0


#: Texts to calibrate with: enough for one of AutoAWQ's blocks of 512 tokens, few enough for minutes. For AWQ by LLM
#: Compressor, which runs a layer some hundred times for each text, that would be hours on a busy core.
TEXTS, FEW_TEXTS = 24, 4


@dataclass(frozen=True, slots=True)
class Made:
    """A folder of the page: the tool that writes it, the format's name in the log, how `check` describes it,
    what the answer in greedy decoding begins with, and the texts to calibrate with.
    """

    tool: str
    target: str
    format: str
    described: str
    answer: str = ANSWER
    num_texts: int = TEXTS

    def __str__(self) -> str:
        return self.target


MADE = [
    Made("llmcompressor", "smollm2-w4a16", "compressed-tensors", "4 bit, groups of 64", ANSWER[:-1]),
    Made("llmcompressor", "smollm2-w4a16-asym", "compressed-tensors", "4 bit, groups of 64", ANSWER[:-1]),
    Made("llmcompressor", "smollm2-w8a16", "compressed-tensors", "8 bit, groups of 64"),
    Made("llmcompressor", "smollm2-w8a8", "compressed-tensors", "8 bit, a scale a row"),
    Made("llmcompressor", "smollm2-fp8", "compressed-tensors", "8 bit, a scale a row"),
    Made("llmcompressor", "smollm2-fp8-block", "compressed-tensors", "8 bit, blocks of 128×128"),
    Made("llmcompressor", "smollm2-gptq-w4a16", "compressed-tensors", "4 bit, groups of 64", ANSWER[:-1]),
    Made("llmcompressor", "smollm2-awq-w4a16", "compressed-tensors", "4 bit, groups of 64", ANSWER[:-1], FEW_TEXTS),
    Made("llmcompressor", "smollm2-w8a8-kv", "compressed-tensors", "8 bit, a scale a row", ANSWER[:-1]),
    Made("gptqmodel", "smollm2-gptq", "GPTQ", "4 bit, groups of 64, act-order"),
    Made("gptqmodel", "smollm2-gptq-8", "GPTQ", "8 bit, a scale a row"),
    Made("autoawq", "smollm2-awq", "AWQ", "4 bit, groups of 32"),
    Made("autoawq", "llama-3-8b-awq", "AWQ", "4 bit, groups of 128", ""),
]


@pytest.mark.tools
@pytest.mark.timeout(9000)
@pytest.mark.parametrize("made", MADE, ids=str)
def test_is_served(
    made: Made,
    quantize: Callable[[str, str, int], Path],
    start_serve: Callable[..., Server],
    page: Page,
    tmp_path: Path,
) -> None:
    folder = quantize(made.tool, made.target, made.num_texts)
    check = Process(["check", str(folder), *page.flags("check", made.target)], tmp_path / "check.log")
    assert check.wait(START_TIMEOUT_S) == 0, check.output()
    assert made.described in " ".join(check.output().split())
    server = start_serve(f"./{made.target}", *page.flags("serve", made.target))
    server.wait_until_ready(START_TIMEOUT_S)
    assert f"Loading {made.format} model" in server.output()
    assert f"Using {made.format} kernel: " in server.output()
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": f"./{made.target}", "messages": messages, "temperature": 0, "max_tokens": 16}
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    text = json.loads(answer)["choices"][0]["message"]["content"]
    assert text.startswith(made.answer), text


def test_every_command_of_the_page_is_run(page: Page) -> None:
    tools = {made.tool for made in MADE}
    shown = {(tool, target) for tool in tools for target in page.quantizing(tool)}
    assert shown == {(made.tool, made.target) for made in MADE}
    assert page.scripts.keys() == {f"quantize_{tool}.py" for tool in tools}
    assert all(page.installing(tool) for tool in tools)


def test_scripts_of_the_page_are_python(page: Page) -> None:
    for name, text in page.scripts.items():
        compile(text, name, "exec")

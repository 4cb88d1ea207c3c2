"""The case of the texts from its last step on: a quantized model served, its log looked at, clients and metrics."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from tests.engine.tiny_models import character
from tests.processes import Server, free_port
from tests.seeds.commands import COMMANDS, options, without_parallel
from tests.seeds.models import Weights, write_folder
from tests.seeds.serving import PROMPT, SHORT, served

pytestmark = pytest.mark.timeout(300)

(COMMAND,) = (command for command in COMMANDS if "./llama-3-8b-awq" in command)


def metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"sluicegate:{name}{{"))


def test_an_awq_model_is_served_to_openais_client(
    machine: Path,
    awq_weights: Weights,
    kernel_cache: Path,
    tmp_path: Path,
    start_serve: Callable[..., Server],
) -> None:
    engine_port = free_port()
    words = without_parallel(options(COMMAND))
    words[words.index("./llama-3-8b-awq")] = f"{machine}/llama-3-8b-awq"
    here = ["--device=cpu", "--threads=1", f"--cache-dir={kernel_cache}", "--kv-cache-memory-bytes=64MiB"]
    server = start_serve(*words, *here, f"--metrics-port={engine_port}", "--log-format=text")
    output = server.wait_for_output("curl -N", timeout_s=120)

    # "Check the log for ..."
    assert "Loading AWQ model" in output
    assert "Using AWQ kernel: " in output

    # Where openai.Completion.create() was, only the address is another.
    plain = write_folder(tmp_path / "plain", awq_weights.plain)
    expected, _ = served([str(plain), *SHORT, f"--cache-dir={kernel_cache}"])
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list().data
        answer = client.completions.create(
            model=model.id,
            prompt="".join(map(character, PROMPT)),
            max_tokens=8,
            temperature=0,
            extra_body={"min_tokens": 8},
        )
        assert answer.choices[0].text == "".join(map(character, expected))

        # A fixed beginning is computed once; the rate of hits is hits by queries.
        prompt = "a system message that does not change, and "
        for end, cached in (("one", 0), ("other", 32)):
            usage = client.completions.create(model=model.id, prompt=prompt + end, max_tokens=1).usage
            assert usage is not None
            details = usage.prompt_tokens_details
            assert details is not None
            assert details.cached_tokens == cached
    deadline = time.monotonic() + 5
    while metric(engine_port, "prefix_cache_hits_total") < 32:  # what was answered is counted right after
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert metric(engine_port, "prefix_cache_hits_total") == 32
    assert metric(engine_port, "prefix_cache_queries_total") == 2 * len(prompt) + len("oneother") + len(PROMPT)
    assert metric(engine_port, "kv_cache_usage_perc") == 0
    assert server.terminate() == 0

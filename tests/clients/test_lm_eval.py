"""lm-eval over HTTP (`local-completions`) gives the numbers of its own `hf` model on the same folder.

Needs lm-eval in an environment of its own: `pip install 'lm-eval[api,hf]'` there, and LM_EVAL set
to its `lm_eval` program. The tasks are made here, so nothing is fetched.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Server

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

PASSAGES = [
    ("The capital of France is", " Paris, a city on the river Seine."),
    ("Water boils at one hundred degrees", " Celsius, unless you climb a mountain first."),
    ("def add(a, b):\n", "    return a + b\n"),
    ("\n1. Carol has 20", " apples and gives 5 of them to Dave.\n2. Dave eats one."),
    ("Ünïcödé and 日本語", " are text like any other, and so is 🌶."),
    ("A block has sixteen positions, so a prompt that is longer than a few of them " * 6, "is scored in several."),
]
QUESTIONS = [
    ("The opposite of hot is", [" cold", " green", " a bicycle"], 0),
    ("Two plus two is", [" five", " four", " Tuesday"], 1),
    ("Dogs like to", [" photosynthesise", " bark", " compile"], 1),
    ("The sun rises in the", [" east", " cellar", " past tense"], 0),
]

#: What the tasks have in common, then what each is.
COMMON = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{text}}",
    "target_delimiter": "",
    "num_fewshot": 0,
}
TASKS: dict[str, dict[str, Any]] = {
    "own_loglikelihood": {
        "output_type": "loglikelihood",
        "doc_to_target": "{{target}}",
        "metric_list": [{"metric": "acc"}],  # perplexity is bootstrapped for minutes
    },
    "own_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "own_generate": {
        "output_type": "generate_until",
        "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
}
DOCUMENTS: dict[str, list[dict[str, Any]]] = {
    "own_loglikelihood": [{"text": text, "target": target} for text, target in PASSAGES],
    "own_choice": [{"text": text, "choices": choices, "answer": answer} for text, choices, answer in QUESTIONS],
    "own_generate": [{"text": text, "target": target} for text, target in PASSAGES],
}


def write_tasks(folder: Path) -> None:
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS[name]))
        config = COMMON | task | {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}}
        (folder / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML


def evaluate(program: str, folder: Path, model: str, model_args: str) -> dict[str, list[Any]]:
    """What a model answers to each document of each task, in order, and the tasks' metrics."""
    output = folder / model
    command = [program, "--model", model, "--model_args", model_args, "--tasks", ",".join(TASKS), "--log_samples"]
    command += ["--include_path", str(folder), "--output_path", str(output), "--batch_size", "1", "--device", "cpu"]
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "OPENAI_API_KEY": "none",
        "OMP_NUM_THREADS": "1",  # several threads spin for minutes beside other work
    }
    done = subprocess.run(command, cwd=folder, env=os.environ | offline, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = output.rglob("results_*.json")
    metrics = json.loads(results.read_text())["results"]
    answers: dict[str, list[Any]] = {}
    for name in TASKS:
        (samples,) = output.rglob(f"samples_{name}_*.jsonl")
        rows = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda row: row["doc_id"])
        answers[name] = [row["resps"] for row in rows]
        numbers = {key: value for key, value in metrics[name].items() if isinstance(value, int | float)}
        answers[f"{name} metrics"] = sorted(numbers.items())
    return answers


def test_local_completions_equals_hf(start_serve: Callable[..., Server], tiny_models: Path, tmp_path: Path) -> None:
    program = os.environ.get("LM_EVAL")
    if program is None:
        pytest.skip("LM_EVAL does not name the lm_eval program of an environment that has it")
    write_tasks(tmp_path)
    model = tiny_models / "llama_untied"
    expected = evaluate(program, tmp_path, "hf", f"pretrained={model},dtype=float32")
    server = start_serve(str(model), "--served-model-name=demo", "--dtype=float32")
    server.wait_until_ready()
    url = f"base_url={server.url}/v1/completions,num_concurrent=4,max_retries=1"
    found = evaluate(program, tmp_path, "local-completions", f"model=demo,tokenizer={model},{url}")
    worst = _assert_equal(found, expected)
    print(f"largest difference {worst:.2e}; {json.dumps(found)}")  # noqa: T201 - the figures of a report


def _assert_equal(found: Any, expected: Any) -> float:
    """Within 1e-3 where lm-eval has numbers (written as text in its samples), else the same. The largest difference."""
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        return max((_assert_equal(a, b) for a, b in zip(found, expected, strict=True)), default=0.0)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        return max(_assert_equal(found[key], value) for key, value in expected.items())
    try:
        a, b = float(found), float(expected)
    except ValueError:
        assert found == expected
        return 0.0
    assert a == pytest.approx(b, abs=1e-3, rel=1e-3)
    return abs(a - b)

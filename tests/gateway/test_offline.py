"""`LLM` as a user's program meets it: its answers are a server's, and its engine comes and goes with it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import sluicegate
from gateway.errors import Unavailable
from gateway.generation import Generation
from gateway.offline import LLM, EngineError, RequestOutput, SamplingParams
from gateway.offline_engine import OfflineEngine
from gateway.stream import GenerationRequest
from tests.processes import ROOT, command_line

#: The tests' own environment, not the user's.
pytestmark = pytest.mark.timeout(120)


def engines_of(pid: int) -> list[int]:
    """Engines that a process has started, from whichever of its threads."""
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    children = [int(child) for listed in lists for child in listed]
    return [child for child in children if "engine" in command_line(child)[:6]]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while is_running(pid):
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM("fake", backend="fake", cache_dir=tmp_path_factory.mktemp("cache")) as llm:
        yield llm


@pytest.fixture(scope="module")
def slow_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of engine options with which a token takes 10 ms."""
    path = tmp_path_factory.mktemp("config") / "engine.toml"
    path.write_text("fake_step_ms = 10.0\n")
    return path


def texts(outputs: list[RequestOutput]) -> list[list[str]]:
    return [[completion.text for completion in output.outputs] for output in outputs]


# --- the shape of answers ------------------------------------------------------------------------


def test_prompts_in_every_form(llm: LLM) -> None:
    params = SamplingParams(seed=1, max_tokens=5)
    (one,) = llm.generate("hello", params)
    assert (one.prompt, one.prompt_token_ids, one.finished) == ("hello", list(b"hello"), True)
    assert one.prompt_logprobs is None
    (completion,) = one.outputs
    assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
    assert completion.text.encode() == bytes(completion.token_ids)
    assert len(completion.token_ids) == 5
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)
    others = llm.generate(["hello", {"prompt": "hello"}, {"prompt_token_ids": list(b"hello")}], params)
    others += llm.generate({"prompt_token_ids": np.frombuffer(b"hello", np.uint8)}, params)
    assert [output.outputs for output in others] == [one.outputs] * 4
    assert [output.prompt for output in others] == ["hello", "hello", None, None]
    assert len({output.request_id for output in [one, *others]}) == 5
    assert llm.generate([], params) == []


def test_a_prefix_that_was_there_is_counted(llm: LLM) -> None:
    prompt = "a prefix of more than two blocks, and then some"
    params = SamplingParams(max_tokens=1)
    assert [llm.generate(prompt, params)[0].num_cached_tokens for _ in range(2)] == [0, 32]


def test_parameters_for_all_or_one_each(llm: LLM) -> None:
    each = [SamplingParams(seed=1, max_tokens=3, n=2), SamplingParams(temperature=0, max_tokens=7)]
    first, second = llm.generate(["a", "b"], each)
    assert [[len(c.token_ids) for c in output.outputs] for output in (first, second)] == [[3, 3], [7]]
    assert [c.index for c in first.outputs] == [0, 1]
    assert llm.generate("a", each[0])[0].outputs == first.outputs
    with pytest.raises(ValueError, match="one for each of 3 prompts; got 2"):
        llm.generate(["a", "b", "c"], each)


def test_more_prompts_than_the_engine_takes_at_once(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(300)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert texts(outputs[:3]) == [
        texts(llm.generate(p, SamplingParams(temperature=0, max_tokens=3)))[0] for p in prompts[:3]
    ]


def test_the_longest_go_first_and_equal_ones_as_they_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come in the order of the prompts, with the seeds of their places. (Texts are encoded in a thread, and may
    overtake each other.)
    """
    begun: list[int] = []
    begin = OfflineEngine.begin

    async def recorded(engine: OfflineEngine, request: GenerationRequest) -> Generation:
        begun.append(request.sampling.max_tokens)
        return await begin(engine, request)

    monkeypatch.setattr(OfflineEngine, "begin", recorded)
    prompt = {"prompt_token_ids": [97, 98]}
    lengths = [3, 20, 16, 1, 20, None]
    params = [SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True) for length in lengths]
    with LLM("fake", backend="fake", cache_dir=tmp_path, max_model_len=64) as llm:
        together = llm.generate([prompt] * 6, params, use_tqdm=False)
    with LLM("fake", backend="fake", cache_dir=tmp_path, max_model_len=64) as llm:
        alone = [llm.generate(prompt, each, use_tqdm=False)[0] for each in params]
    assert begun[:6] == [62, 20, 20, 16, 3, 1]
    assert [len(output.outputs[0].token_ids) for output in together] == [3, 20, 16, 1, 20, 62]
    assert texts(together) == texts(alone)


def test_max_tokens_none_fills_the_context(llm: LLM) -> None:
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    by_text, by_ids = llm.generate(["x" * 8000, {"prompt_token_ids": [120] * 8000}], params)
    assert len(by_text.outputs[0].token_ids) == len(by_ids.outputs[0].token_ids) == 192
    with pytest.raises(ValueError, match=r"prompts\[0\]: This model's context length is 8192 tokens"):
        llm.generate("x" * 9000, params)


def test_logprobs_have_the_token_first_and_then_the_likeliest(llm: LLM) -> None:
    (output,) = llm.generate("a", SamplingParams(temperature=0, max_tokens=2, logprobs=2))
    (completion,) = output.outputs
    assert completion.logprobs is not None
    for token, position in zip(completion.token_ids, completion.logprobs, strict=True):
        assert list(position) == [token, token + 1]
        assert (position[token].logprob, position[token].rank) == (-0.5, 1)
        assert (position[token + 1].logprob, position[token + 1].rank) == (-1.0, 2)
        assert position[token].decoded_token == chr(token)
    assert completion.cumulative_logprob == -1.0


def test_prompt_logprobs_have_none_for_the_first_token(llm: LLM) -> None:
    (output,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, n=2))
    assert output.prompt_logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None
    for token, position in zip(b"bc", others, strict=True):
        assert position is not None
        assert next(iter(position)) == token
        assert position[token].decoded_token == chr(token)
    (bare,) = llm.generate("abc", SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    assert bare.prompt_logprobs is not None
    assert [list(position or ()) for position in bare.prompt_logprobs] == [[], [ord("b")], [ord("c")]]


def test_bad_words_do_not_come(llm: LLM) -> None:
    (whole,) = texts(llm.generate("bad", SamplingParams(temperature=0, max_tokens=20)))[0]
    (without,) = texts(llm.generate("bad", SamplingParams(temperature=0, max_tokens=20, bad_words=[whole[4]])))[0]
    assert whole[4] not in without


def test_stop_strings_and_ids(llm: LLM) -> None:
    (whole,) = texts(llm.generate("stop", SamplingParams(temperature=0, max_tokens=20)))[0]
    params = SamplingParams(temperature=0, max_tokens=20, stop=[whole[5:7]])
    (cut,) = llm.generate("stop", params)[0].outputs
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole[: whole.index(whole[5:7])], "stop", whole[5:7])
    kept = SamplingParams(temperature=0, max_tokens=20, stop=whole[5:7], include_stop_str_in_output=True)
    assert llm.generate("stop", kept)[0].outputs[0].text == cut.text + whole[5:7]
    by_id = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[ord(whole[3])])
    (ended,) = llm.generate("stop", by_id)[0].outputs
    assert (ended.text, ended.stop_reason) == (whole[: whole.index(whole[3])], ord(whole[3]))
    # A special token as a stop string is looked for by its id, and told as it was given.
    special = SamplingParams(temperature=0, stop="<|endoftext|>", allowed_token_ids=[256])
    assert llm.generate("stop", special)[0].outputs[0].stop_reason == "<|endoftext|>"


def test_seeds_follow_from_the_llms_own_or_are_drawn(tmp_path: Path) -> None:
    def generated(seed: int | None) -> list[list[str]]:
        with LLM("fake", backend="fake", seed=seed, cache_dir=tmp_path) as llm:
            return texts(llm.generate(["a", "a"], SamplingParams(n=2)))

    first = generated(7)
    assert generated(7) == first
    assert len({text for output in first for text in output}) == 4
    assert generated(None) != first


# --- the engine's life ---------------------------------------------------------------------------


def test_close_ends_the_engine_and_what_still_generates(tmp_path: Path, slow_steps: Path) -> None:
    before = set(engines_of(os.getpid()))
    llm = LLM("fake", backend="fake", config=slow_steps, cache_dir=tmp_path)
    (engine,) = set(engines_of(os.getpid())) - before
    found: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate("a", SamplingParams(max_tokens=5000), use_tqdm=False)
        except EngineError as error:
            found.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    time.sleep(0.3)
    llm.close()
    thread.join(10)
    assert [str(error) for error in found] == ["this LLM is closed"]
    assert not is_running(engine)
    llm.close()
    with pytest.raises(EngineError, match="this LLM is closed"):
        llm.generate("a")


def test_a_killed_engine_costs_no_token(tmp_path: Path, slow_steps: Path) -> None:
    before = set(engines_of(os.getpid()))
    params = SamplingParams(max_tokens=60, n=2, seed=3, ignore_eos=True, logprobs=1)
    with LLM("fake", backend="fake", config=slow_steps, max_num_seqs=3, cache_dir=tmp_path, log_level="error") as llm:
        undisturbed = llm.generate(["a", "b", "c", "d"], params)
        (engine,) = set(engines_of(os.getpid())) - before
        killer = threading.Timer(0.4, os.kill, (engine, signal.SIGKILL))
        killer.start()
        again = llm.generate(["a", "b", "c", "d"], params)
        killer.join()
        assert [output.outputs for output in again] == [output.outputs for output in undisturbed]
        (other,) = set(engines_of(os.getpid())) - before
        assert other != engine


async def test_an_engine_that_goes_away_before_it_has_sent_the_tokenizer_is_waited_for() -> None:
    engine = object.__new__(OfflineEngine)
    engine._failure, engine._changed = None, asyncio.Event()
    models = iter([["first"], [], [], ["second"], ["second"]])

    class Gone:
        def models(self) -> list[str]:
            asyncio.get_running_loop().call_soon(engine._changed.set)
            return next(models)

        async def get(self, serving: str) -> str:
            if serving == "first":
                raise Unavailable("no engine could send the tokenizer of this model; try again.")
            return f"text of {serving}"

    engine._router = engine._texts = Gone()
    assert await engine.served() == ("second", "text of second")
    models = iter([["first"], ["first"]])
    with pytest.raises(Unavailable):  # an engine that is here has said all it has
        await engine.served()


async def test_inside_a_running_event_loop(llm: LLM) -> None:
    assert asyncio.get_running_loop().is_running()
    assert len(llm.generate("a", SamplingParams(max_tokens=3))[0].outputs[0].token_ids) == 3


PROGRAM = """
import sys
from sluicegate import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM("fake", backend="fake", config=sys.argv[1], cache_dir=sys.argv[2])
    print("ready", flush=True)
    try:
        llm.generate("a", SamplingParams(max_tokens=5 if sys.argv[3] == "short" else 5000))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        raise
"""


def start_program(slow_steps: Path, tmp_path: Path, length: str) -> tuple[subprocess.Popen[str], int]:
    """A program that forgets to close its LLM, generating; and its engine's pid."""
    (tmp_path / "program.py").write_text(PROGRAM)
    program = subprocess.Popen(
        [sys.executable, "program.py", str(slow_steps), str(tmp_path), length],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    (engine,) = engines_of(program.pid)
    return program, engine


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("ctrl-c", -signal.SIGINT),
        pytest.param("end", 0, marks=pytest.mark.slow),
        pytest.param("kill -9", -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_the_engine_ends_with_the_program(slow_steps: Path, tmp_path: Path, how: str, status: int) -> None:
    program, engine = start_program(slow_steps, tmp_path, "short" if how == "end" else "long")
    if how != "end":
        time.sleep(0.2)
        program.send_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGKILL)
    out, errors = program.communicate(timeout=20)
    assert program.returncode == status, errors
    assert out == ("interrupted\n" if how == "ctrl-c" else "")
    if how == "kill -9":
        wait_until_gone(engine)
    assert not is_running(engine)


def test_an_llm_that_is_forgotten_ends_its_engine(tmp_path: Path) -> None:
    before = set(engines_of(os.getpid()))
    llm = LLM("fake", backend="fake", cache_dir=tmp_path)
    (engine,) = set(engines_of(os.getpid())) - before
    del llm
    assert not is_running(engine)


# --- the front door ------------------------------------------------------------------------------


def test_the_front_door_has_the_names_and_no_others() -> None:
    assert sluicegate.LLM is LLM
    assert sluicegate.SamplingParams is SamplingParams
    with pytest.raises(AttributeError, match="has no attribute 'LLMs'"):
        _ = sluicegate.LLMs  # type: ignore[attr-defined]

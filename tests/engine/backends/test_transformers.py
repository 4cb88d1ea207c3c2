"""transformers' models behind our scheduler: its ids, and the same bits in any company, cut and life."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import transformers

from engine.backends import create
from engine.backends.fake_tokenizer import VOCAB_SIZE
from engine.backends.transformers import TransformersRunner
from engine.backends.transformers_model import SEGMENT
from engine.config import EngineConfig, resolve
from engine.core import EngineCore
from engine.events import Delivery
from engine.inbox import Inbox, Submitted
from engine.loading.store import ModelError
from engine.metrics import EngineMetrics
from protocol.config import default_cache_dir
from protocol.messages import Admitted, Finished, Logprobs, PromptLogprobs, Step, Submit, u32
from protocol.sampling import SamplingParams
from tests.e2e.api import Api, assert_identical
from tests.engine.backends.transformers_models import CONTEXT_LENGTH, SETTINGS, greedy, make
from tests.processes import Engine, Server

pytestmark = pytest.mark.timeout(180)

#: On both sides of a block and of a segment.
LENGTHS = (1, 5, 16, 17, SEGMENT, SEGMENT + 44)
NUM_NEW = 12


def prompt(number: int) -> list[int]:
    return [(7 * number + 13 * place + place * place) % 250 for place in range(LENGTHS[number])]


def submit(number: int, **values: object) -> Submit:
    fields = {"max_tokens": NUM_NEW + number, "temperature": (0.0, 0.9)[number % 2], "logprobs": 2, "min_tokens": 30}
    fields["min_tokens"] = fields["max_tokens"]
    if number % 3 == 0:
        fields |= {"frequency_penalty": 0.3, "prompt_logprobs": 1}
    sampling = SamplingParams(**fields | values)  # type: ignore[arg-type]
    return Submit(
        handle=number,
        request_id=f"r{number}",
        prompt_ids=u32(prompt(number)),
        sampling=sampling,
        seed=number,
        prompt_logprobs_from=-1 if sampling.prompt_logprobs is None else 0,
    )


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    rows: list[tuple[float, int, list[int], list[float]]] = field(default_factory=list)
    prompt_rows: list[tuple[float, int, list[int], list[float]]] = field(default_factory=list)
    reason: str = ""
    num_cached: int = 0


def rows_of(columns: Logprobs) -> Iterator[tuple[float, int, list[int], list[float]]]:
    for row, (own, rank) in enumerate(zip(columns.own, columns.rank, strict=True)):
        top = slice(row * columns.k, (row + 1) * columns.k)
        yield own, rank, columns.top_ids[top].tolist(), columns.top[top].tolist()


class Loop:
    """An EngineCore over the model at `folder`, without threads or sockets."""

    def __init__(self, folder: Path, **values: object) -> None:
        settings = {"model": str(folder), "backend": "transformers", "device": "cpu", "threads": 1}
        config = EngineConfig.model_validate(settings | values)
        self.runner = create(config)
        self.info = self.runner.load(lambda phase, done, total: None)
        resolved = resolve(config, self.info)
        self._delivered: list[Delivery] = []
        self._inbox = Inbox()
        self.core = EngineCore(resolved, self.runner, self._inbox, self._delivered.extend, EngineMetrics(resolved))

    def run(self, submits: list[Submit]) -> dict[int, Answer]:
        for message in submits:
            self._inbox.put(Submitted(1, message))
        while self.core.step():
            self.core.scheduler.check()
        answers = {message.handle: Answer() for message in submits}
        for _, message in self._delivered:
            match message:
                case Admitted():
                    answers[message.handle].num_cached = message.cached_tokens
                case Step(logprobs=columns):
                    assert columns is not None
                    rows = list(rows_of(columns))
                    for handle, token, row in zip(message.handles, message.ids, rows, strict=True):
                        answers[handle].ids.append(token)
                        answers[handle].rows.append(row)
                case PromptLogprobs():
                    answers[message.handle].prompt_rows += rows_of(message.logprobs)
                case Finished():
                    answers[message.handle].reason = message.reason
        self._delivered.clear()
        return answers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpt2")


@pytest.fixture(scope="module")
def model(folder: Path) -> transformers.PreTrainedModel:
    torch.set_num_threads(1)
    return make("gpt2", folder)


@pytest.fixture(scope="module")
def submits() -> list[Submit]:
    return [submit(number) for number in range(len(LENGTHS))]


@pytest.fixture(scope="module")
def alone(folder: Path, model: transformers.PreTrainedModel, submits: list[Submit]) -> dict[int, Answer]:
    loop = Loop(folder)
    answers: dict[int, Answer] = {}
    for message in submits:
        answers |= loop.run([message])
    return answers


def test_greedy_ids_are_those_of_transformers(folder: Path, model: transformers.PreTrainedModel) -> None:
    numbers = range(len(LENGTHS))
    found = Loop(folder).run([submit(n, temperature=0.0, frequency_penalty=0.0) for n in numbers])
    for number in numbers:
        assert found[number].ids == greedy(model, prompt(number), NUM_NEW + number)
        assert found[number].reason == "length"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"enable_prefix_caching": False, "block_size": 32},
    ],
    ids=["all at once", "chunks of 7", "without prefix caching"],
)
def test_answers_equal_those_alone(
    folder: Path, submits: list[Submit], alone: dict[int, Answer], values: dict[str, object]
) -> None:
    assert Loop(folder, **values).run(submits) == alone


def test_preempted_for_want_of_blocks(folder: Path, model: object) -> None:
    few = Loop(folder, max_model_len=48, kv_cache_memory_bytes=5 * 16 * 512)
    longer = [submit(number, max_tokens=24, min_tokens=24) for number in range(4)]
    assert few.run(longer) == Loop(folder).run(longer)
    assert few.core.status.totals.preemptions > 0


def test_nothing_is_taken_from_another_request(folder: Path, submits: list[Submit], alone: dict[int, Answer]) -> None:
    loop = Loop(folder, enable_prefix_caching=True)
    for _ in range(2):
        assert loop.run(submits) == alone  # with num_cached 0


def test_resumed_in_the_middle(folder: Path, submits: list[Submit], alone: dict[int, Answer]) -> None:
    rest = [
        replace(message, generated_ids=u32(alone[message.handle].ids[:5]), resume=True, prompt_logprobs_from=-1)
        for message in submits
    ]
    found = Loop(folder, max_num_batched_tokens=64).run(rest)
    for handle, answer in alone.items():
        assert found[handle].ids == answer.ids[5:]
        assert found[handle].rows == answer.rows[5:]


@torch.inference_mode()
def test_logprobs_are_those_of_the_models_logits(model: transformers.PreTrainedModel, alone: dict[int, Answer]) -> None:
    for number in (0, 3):
        answer, ids = alone[number], prompt(number)
        expected = model(torch.tensor([ids + answer.ids])).logits[0].log_softmax(-1)
        for at, (own, rank, top_ids, top) in enumerate([*answer.prompt_rows, *answer.rows]):
            token = (ids + answer.ids)[at + 1]
            assert own == pytest.approx(expected[at, token].item(), abs=1e-4)
            assert rank == 1 + (expected[at] > expected[at, token]).sum().item()
            assert top == pytest.approx(expected[at].topk(len(top)).values.tolist(), abs=1e-4)
            assert top_ids == expected[at].topk(len(top)).indices.tolist()
        assert len(answer.prompt_rows) == len(ids) - 1


def test_prompt_logprobs_that_are_asked_for_without_a_number(folder: Path, alone: dict[int, Answer]) -> None:
    bare = replace(submit(3, prompt_logprobs=None), prompt_logprobs_from=9)
    found = Loop(folder, max_num_batched_tokens=7, max_num_seqs=2).run([bare])[3]
    assert found.prompt_rows == alone[3].prompt_rows[8:]


def test_caches_of_those_that_left_are_let_go(folder: Path, submits: list[Submit], model: object) -> None:
    loop = Loop(folder, max_num_seqs=4, max_model_len=320, kv_cache_memory_bytes=21 * 16 * 512)
    assert loop.info.num_blocks == 21
    loop.run(submits)
    assert isinstance(loop.runner, TransformersRunner)
    held = sum(s.num_computed for s in loop.runner._slots.values() if s.cache is not None)
    assert held <= 21 * 16


def test_what_is_said_of_the_model(folder: Path, model: object) -> None:
    info = Loop(folder).info
    assert (info.vocab_size, info.context_length, info.eos_ids) == (VOCAB_SIZE, CONTEXT_LENGTH, (258,))
    assert not info.prefix_caching
    others = [Loop(folder, dtype="bfloat16").info, Loop(folder, threads=2).info]
    torch.set_num_threads(1)
    assert len({info.numerics, *(other.numerics for other in others)}) == 3
    assert {other.digest for other in others} == {info.digest}


def test_bfloat16_is_as_exact(folder: Path, submits: list[Submit], model: object) -> None:
    loop = Loop(folder, dtype="bfloat16")
    together = loop.run(submits)
    assert together == {message.handle: loop.run([message])[message.handle] for message in submits}


def test_auto_takes_ours_for_what_we_have_and_warns_otherwise(
    folder: Path, model: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with caplog.at_level(logging.WARNING, "engine"):
        ours = create(EngineConfig(model=str(tmp_path)))
        assert type(ours).__name__ == "TorchRunner"
        assert not caplog.records
        assert isinstance(create(EngineConfig(model=str(folder))), TransformersRunner)
    (record,) = caplog.records
    assert "GPT2LMHeadModel" in record.__dict__["reason"]
    with pytest.raises(ModelError, match="/nowhere is not a directory"):
        create(EngineConfig(model="/nowhere"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "nonesuch"}, r"transformers \S+ has no model_type 'nonesuch'\. Update transformers"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, r"'mine'\. Its own code, .* is never run"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "makes a GPT2LMHeadModel of it, which is another model"),
        ({"n_layer": 3}, r"hold no transformer\.h\.2\.attn\S* and \d+ more"),
        ({"n_embd": 36}, "transformers cannot load"),
        ({"n_positions": None}, r"config\.json: transformers refuses it: .*n_positions"),
    ],
)
def test_models_that_cannot_be_served(
    folder: Path, model: object, tmp_path: Path, change: dict[str, object], text: str
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=text):
        Loop(tmp_path)


def test_settings_that_cannot_be_had(folder: Path, model: object) -> None:
    with pytest.raises(ModelError, match="--load-format gguf: the transformers backend reads safetensors alone"):
        Loop(folder, load_format="gguf")
    with pytest.raises(ModelError, match="--quantization is torch_runner's"):
        Loop(folder, quantization="fp8")
    with pytest.raises(ModelError, match=r"--max-model-len 641 is more than .* 640"):
        Loop(folder, max_model_len=641)
    with pytest.raises(ModelError, match=r"needs 40 KV blocks .* to at most 624"):
        Loop(folder, kv_cache_memory_bytes=40 * 16 * 512 - 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in SETTINGS if kind != "gpt2"])
def test_other_architectures(kind: str, tmp_path: Path, submits: list[Submit]) -> None:
    torch.set_num_threads(1)
    own = make(kind, tmp_path)
    values = {"max_model_len": CONTEXT_LENGTH, "cache_dir": default_cache_dir()}
    loop = Loop(tmp_path, **values)
    greedy_submits = [submit(n, temperature=0.0, frequency_penalty=0.0) for n in range(len(LENGTHS))]
    found = loop.run(greedy_submits)
    for number in range(len(LENGTHS)):
        assert found[number].ids == greedy(own, prompt(number), NUM_NEW + number)
    together = loop.run(submits)
    chunked = Loop(tmp_path, max_num_batched_tokens=7, max_num_seqs=4, **values)
    assert chunked.run(submits) == together
    assert {message.handle: chunked.run([message])[message.handle] for message in submits} == together
    rest = [
        replace(message, generated_ids=u32(together[message.handle].ids[:5]), resume=True, prompt_logprobs_from=-1)
        for message in submits
    ]
    for handle, answer in chunked.run(rest).items():
        assert answer.ids == together[handle].ids[5:]
        assert answer.rows == together[handle].rows[5:]


@pytest.mark.slow
def test_a_killed_engine_costs_no_token(
    folder: Path, model: object, start_engine: Callable[..., Engine], start_gateway: Callable[..., Server]
) -> None:
    flags = (str(folder), "--served-model-name=tiny", "--threads=1", "--device=cpu")
    engine = start_engine(*flags)
    # transformers alone takes ten seconds of processor time to import.
    gateway = start_gateway(engine.address, flags=("--resume-timeout=100",))
    gateway.wait_until_ready(100)
    assert "backend_fallback" in engine.output()
    api = Api(gateway.url)
    body = {"prompt": "abc " * 90, "seed": 3, "temperature": 0.8, "max_tokens": 200, "n": 2, "logprobs": 1}
    expected = api.answer("/v1/completions", body | {"cache_salt": "a"})
    with api.stream("/v1/completions", body | {"cache_salt": "b"}) as stream:
        stream.read_events(20)
        engine.kill()
        start_engine(*flags, address=engine.address)
        assert_identical(expected, stream.read_to_end())
    assert api.metric("resumes_total") == 2

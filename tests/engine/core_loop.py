"""The engine's step loop over a tiny model, without threads or sockets, and what it answers."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from engine.backends.torch_runner import TorchRunner
from engine.config import EngineConfig, resolve
from engine.core import EngineCore
from engine.events import Delivery
from engine.inbox import Inbox, Submitted
from engine.metrics import EngineMetrics
from protocol.messages import Admitted, Finished, Logprobs, PromptLogprobs, Step, Submit
from tests.engine.torch_runners import no_progress

#: A token's own logprob and rank, and its alternatives' ids and logprobs.
Row = tuple[float, int, tuple[int, ...], tuple[float, ...]]


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    logprobs: list[Row] = field(default_factory=list)
    prompt_logprobs: list[Row] = field(default_factory=list)
    reason: str = ""
    num_cached: int = 0


class Loop:
    """An EngineCore over the model at `folder`, without threads or sockets."""

    def __init__(self, folder: Path, *, depth: int = 1, num_blocks: int = 2000, **values: object) -> None:
        # Of llama_head_dim: layers, heads, head_dim of keys and (padded) values, positions, bytes.
        block_bytes = 3 * 2 * (20 + 32) * 16 * (2 if values.get("dtype") == "bfloat16" else 4)
        settings = {
            "model": str(folder),
            "device": "cpu",
            "threads": 1,
            "kv_cache_memory_bytes": num_blocks * block_bytes,
        }
        config = EngineConfig.model_validate(settings | values)
        runner = TorchRunner(config)
        runner.max_in_flight = depth
        resolved = resolve(config, runner.load(no_progress))
        assert resolved.info.num_blocks == num_blocks
        self._delivered: list[Delivery] = []
        self._inbox = Inbox()
        self.core = EngineCore(resolved, runner, self._inbox, self._delivered.extend, EngineMetrics(resolved))

    def run(self, submits: list[Submit]) -> dict[int, Answer]:
        for message in submits:
            self._inbox.put(Submitted(1, message))
        num_top = {message.handle: message.sampling.logprobs or 0 for message in submits}
        while self.core.step():
            self.core.scheduler.check()
        answers: dict[int, Answer] = defaultdict(Answer)
        for _, message in self._delivered:
            match message:
                case Admitted():
                    answers[message.handle].num_cached = message.cached_tokens
                case PromptLogprobs():
                    answer = answers[message.handle]
                    assert not answer.ids
                    answer.prompt_logprobs += _rows(message.logprobs)
                case Step():
                    _read(message, answers, num_top)
                case Finished():
                    answers[message.handle].reason = message.reason
        self._delivered.clear()
        return answers


def _read(step: Step, answers: dict[int, Answer], num_top: dict[int, int]) -> None:
    """A Step has as many alternatives for each token as the one that asked for most."""
    assert step.logprobs is not None
    for handle, token, (own, rank, ids, top) in zip(step.handles, step.ids, _rows(step.logprobs), strict=True):
        answers[handle].ids.append(token)
        answers[handle].logprobs.append((own, rank, ids[: num_top[handle]], top[: num_top[handle]]))


def _rows(columns: Logprobs) -> list[Row]:
    def row(number: int) -> Row:
        top = slice(number * columns.k, (number + 1) * columns.k)
        return columns.own[number], columns.rank[number], tuple(columns.top_ids[top]), tuple(columns.top[top])

    return [row(number) for number in range(len(columns.own))]


def same(found: dict[int, Answer], expected: dict[int, Answer]) -> None:
    for handle, answer in expected.items():
        assert dataclasses.replace(found[handle], num_cached=0) == answer

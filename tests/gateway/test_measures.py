"""What is observed of requests that are answered, streamed or not, and of those that are cut."""

from __future__ import annotations

import time

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gateway.errors import EngineFailed
from gateway.generation import Generation
from gateway.measures import Measures, RequestMeasure
from protocol import metrics
from protocol.messages import FinishReason, u32
from tests.gateway.scripted_engine import request


class Measured:
    """A request of two choices that arrived at second 100, and a clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stream: bool) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        self._registry = CollectorRegistry()
        self._stream = stream
        asked = request([1, 2, 3], n=2, stream=stream)
        self.generation = Generation(asked, ())
        measures = Measures(metrics.build(metrics.Owner.GATEWAY, self._registry))
        self.measure: RequestMeasure = measures.request(asked, self.generation, self.now)

    def push(self, at: float, index: int, *ids: int) -> None:
        self.now = at
        choice = self.generation.choices[index]
        choice.push(len(choice.generated_ids), u32(ids))

    async def read(self, at: float) -> None:
        """What is unread goes to the client."""
        self.now = at
        delta = await self.generation.next()
        assert delta is not None
        if self._stream:
            self.measure.streamed(delta)
        else:
            self.measure.ended(delta)

    def end(self, index: int) -> None:
        self.generation.choices[index].finish(FinishReason.LENGTH, None)

    def shown(self, name: str) -> tuple[float, float]:
        """(count, sum) of a histogram."""
        values = self._values()
        return values[f"sluicegate:{name}_count"], values[f"sluicegate:{name}_sum"]

    def ended(self) -> dict[str, float]:
        """Choices by finish reason, without the reasons that none has."""
        families = text_string_to_metric_families(metrics.exposition(self._registry).decode())
        return {
            sample.labels["finished_reason"]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == "sluicegate:request_success_total" and sample.value
        }

    def _values(self) -> dict[str, float]:
        families = text_string_to_metric_families(metrics.exposition(self._registry).decode())
        return {sample.name: sample.value for family in families for sample in family.samples}


async def test_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch, stream=True)
    measured.push(100.5, 0, 7)
    await measured.read(100.75)
    assert measured.shown("time_to_first_token_seconds") == (1, 0.5)  # at once, however long the rest takes
    measured.push(101.0, 1, 7)
    await measured.read(101.0)
    measured.push(101.5, 0, 8)
    await measured.read(101.75)
    measured.push(102.5, 0, 9)
    measured.end(0)
    await measured.read(102.5)
    measured.end(1)
    await measured.read(103.0)
    measured.now = 104.0
    measured.measure.finish()
    assert measured.shown("time_to_first_token_seconds") == (1, 0.5)
    assert measured.shown("inter_token_latency_seconds") == (2, 1.0 + 0.75)
    assert measured.shown("request_time_per_output_token_seconds") == (1, 1.0)  # the other has one token
    assert measured.shown("e2e_request_latency_seconds") == (1, 4.0)
    assert measured.shown("request_prompt_tokens") == (1, 3)
    assert measured.shown("request_generation_tokens") == (1, 4)
    assert measured.shown("request_max_num_generation_tokens") == (1, 3)
    assert measured.shown("request_params_n") == (1, 2)
    assert measured.ended() == {"length": 2}


async def test_an_answer_in_one_piece_has_a_first_token_too(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch, stream=False)
    measured.push(101.0, 1, 7)
    measured.push(102.0, 0, 7)
    measured.push(103.0, 0, 7, 7)
    for index in (0, 1):
        measured.end(index)
        await measured.read(104.0)
    measured.measure.finish()
    assert measured.shown("time_to_first_token_seconds") == (1, 1.0)
    assert measured.shown("inter_token_latency_seconds") == (0, 0)
    assert measured.shown("request_time_per_output_token_seconds") == (1, 1.0)
    assert measured.ended() == {"length": 2}


@pytest.mark.parametrize("fails", [False, True])
async def test_a_request_that_was_cut_counts_by_its_choices_alone(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    measured = Measured(monkeypatch, stream=True)
    measured.push(100.5, 0, 7)
    measured.end(0)
    await measured.read(101.0)
    if fails:
        measured.generation.choices[1].fail(EngineFailed("out of luck"))
    else:
        measured.generation.abort()
    measured.measure.finish()
    assert measured.ended() == {"length": 1, "error" if fails else "abort": 1}
    assert measured.shown("time_to_first_token_seconds") == (1, 0.5)
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"):
        assert measured.shown(name) == (0, 0)

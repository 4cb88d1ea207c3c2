"""What a client sees of time and size, measured at the gateway."""

from __future__ import annotations

import time
from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from gateway.stream import Delta, Generation, GenerationRequest
from protocol.messages import FinishReason
from protocol.metrics import Instruments, Tally


class Measures:
    """The gateway's instruments of requests, bound to models as they are first asked for."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        self._models: dict[str, _ModelMeasures] = {}

    def request(self, request: GenerationRequest, arrived: float) -> RequestMeasure:
        """Begin to measure a request that arrived at `arrived` (`time.perf_counter`)."""
        model = self._models.get(request.model)
        if model is None:
            model = self._models[request.model] = _bind(self._instruments, request.model)
        model.prompt_tokens.observe(sum(map(len, request.prompts)))
        model.n.observe(request.n)
        model.max_tokens.observe(request.sampling.max_tokens)
        return RequestMeasure(model, arrived)

    def error(self, status: int) -> None:
        self._instruments.counter("request_errors_total").labels(status=str(status)).inc()


@dataclass(frozen=True, slots=True)
class _ModelMeasures:
    first_token: Histogram
    gaps: Tally
    per_token: Histogram
    whole: Histogram
    prompt_tokens: Histogram
    generated_tokens: Histogram
    n: Histogram
    max_tokens: Histogram
    ended: dict[FinishReason, Counter]


def _bind(instruments: Instruments, model: str) -> _ModelMeasures:
    def histogram(name: str) -> Histogram:
        return instruments.histogram(name).labels(model_name=model)

    success = instruments.counter("request_success_total")
    return _ModelMeasures(
        first_token=histogram("time_to_first_token_seconds"),
        gaps=Tally(histogram("inter_token_latency_seconds")),
        per_token=histogram("request_time_per_output_token_seconds"),
        whole=histogram("e2e_request_latency_seconds"),
        prompt_tokens=histogram("request_prompt_tokens"),
        generated_tokens=histogram("request_generation_tokens"),
        n=histogram("request_params_n"),
        max_tokens=histogram("request_params_max_tokens"),
        ended={reason: success.labels(model_name=model, finished_reason=reason.value) for reason in FinishReason},
    )


class RequestMeasure:
    """The times of one request, in seconds of `time.perf_counter`."""

    def __init__(self, model: _ModelMeasures, arrived: float) -> None:
        self._model = model
        self._arrived = arrived
        self._first: dict[int, float] = {}  # by choice
        self._last: dict[int, float] = {}

    def streamed(self, delta: Delta) -> None:
        """A delta that goes to the client now."""
        now = time.perf_counter()
        if delta.ids:
            index = delta.index
            last = self._last.get(index)
            self._last[index] = now
            if last is not None:
                self._model.gaps.observe(now - last, now)
            else:
                if not self._first:
                    self._model.first_token.observe(now - self._arrived)
                self._first[index] = now
        if delta.finish_reason is not None:
            first = self._first.get(delta.index)
            if first is not None and delta.num_generated > 1:
                self._model.per_token.observe((now - first) / (delta.num_generated - 1))
            self.ended(delta)

    def ended(self, delta: Delta) -> None:
        """The last delta of a choice."""
        assert delta.finish_reason is not None
        self._model.ended[delta.finish_reason].inc()

    def finish(self, generation: Generation) -> None:
        """The request has been answered, in full or in part."""
        self._model.gaps.flush()
        self._model.whole.observe(time.perf_counter() - self._arrived)
        self._model.generated_tokens.observe(sum(len(choice.generated_ids) for choice in generation.choices))

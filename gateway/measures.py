"""What a client sees of time and size, measured at the gateway."""

from __future__ import annotations

import time
from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from gateway.generation import Generation
from gateway.stream import Delta, GenerationRequest
from protocol.messages import FinishReason
from protocol.metrics import Instruments
from protocol.tally import Stopwatch, Tally


class Measures:
    """The gateway's instruments of requests, bound to models as they are first asked for."""

    def __init__(self, instruments: Instruments) -> None:
        self._instruments = instruments
        self._models: dict[str, _ModelMeasures] = {}

    def request(self, request: GenerationRequest, generation: Generation, arrived: float) -> RequestMeasure:
        """Begin to measure a request that arrived at `arrived` (`time.perf_counter`)."""
        model = self._models.get(request.model)
        if model is None:
            model = self._models[request.model] = _bind(self._instruments, request.model)
        return RequestMeasure(model, request, generation, arrived)

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
    longest_choice: Histogram
    n: Histogram
    max_tokens: Histogram
    ended: dict[FinishReason, Counter]


def _bind(instruments: Instruments, model: str) -> _ModelMeasures:
    def histogram(name: str) -> Histogram:
        return instruments.histogram(name).labels(model_name=model)

    success = instruments.counter("request_success_total")
    return _ModelMeasures(
        first_token=histogram("time_to_first_token_seconds"),
        gaps=instruments.tallied("inter_token_latency_seconds").labels(model),
        per_token=histogram("request_time_per_output_token_seconds"),
        whole=histogram("e2e_request_latency_seconds"),
        prompt_tokens=histogram("request_prompt_tokens"),
        generated_tokens=histogram("request_generation_tokens"),
        longest_choice=histogram("request_max_num_generation_tokens"),
        n=histogram("request_params_n"),
        max_tokens=histogram("request_params_max_tokens"),
        ended={reason: success.labels(model_name=model, finished_reason=reason.value) for reason in FinishReason},
    )


class RequestMeasure:
    """One request: `streamed` or `ended` for its deltas, or laps of `gaps`, then `finish`.

    Times are of `time.perf_counter`.
    """

    def __init__(
        self, model: _ModelMeasures, request: GenerationRequest, generation: Generation, arrived: float
    ) -> None:
        self._model = model
        self._request = request
        self._generation = generation
        self._arrived = arrived
        self._has_first = False
        self._num_ended = 0
        #: Takes the lap of a choice's stopwatch when tokens of it go to the client, which `streamed` does by itself.
        self.gaps = model.gaps
        self.stopwatches = [Stopwatch() for _ in generation.choices]

    def streamed(self, delta: Delta) -> None:
        """A delta that goes to the client now."""
        if delta.ids:
            self.gaps.lap(self.stopwatches[delta.index])
            self._begun()
        if delta.finish_reason is not None:
            self.ended(delta)

    def ended(self, delta: Delta) -> None:
        """The last delta of a choice."""
        assert delta.finish_reason is not None
        self._num_ended += 1
        self._model.ended[delta.finish_reason].inc()
        self._begun()
        began_at = self._generation.choices[delta.index].first_token_at
        if began_at is not None and delta.num_generated > 1:
            self._model.per_token.observe((time.perf_counter() - began_at) / (delta.num_generated - 1))

    def finish(self) -> None:
        """No more of it goes to the client: it was answered in full, or failed, or the client left."""
        self._model.gaps.flush()
        choices = self._generation.choices
        if num_cut := len(choices) - self._num_ended:
            reason = FinishReason.ERROR if self._generation.has_failed else FinishReason.ABORT
            self._model.ended[reason].inc(num_cut)
            return
        self._model.whole.observe(time.perf_counter() - self._arrived)
        self._model.prompt_tokens.observe(sum(map(len, self._request.prompts)))
        num_generated = [len(choice.generated_ids) for choice in choices]
        self._model.generated_tokens.observe(sum(num_generated))
        self._model.longest_choice.observe(max(num_generated))
        self._model.n.observe(self._request.n)
        self._model.max_tokens.observe(self._request.sampling.max_tokens)

    def _begun(self) -> None:
        """There are tokens; only the first of all counts."""
        if not self._has_first:
            began_at = [at for choice in self._generation.choices if (at := choice.first_token_at) is not None]
            if began_at:
                self._has_first = True
                self._model.first_token.observe(min(began_at) - self._arrived)

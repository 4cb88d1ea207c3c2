"""The engine's metrics, and the small HTTP server that shows them on `--metrics-port`.

Counters and gauges are set from `Status` when somebody asks; only histograms are fed by the step
loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry

from engine.config import Resolved
from engine.events import Ended, Entered, Event, Sampled
from engine.request import RequestKey
from engine.status import Status
from protocol import metrics
from protocol.messages import Finished, FinishReason, Phase, Totals

#: Row of `protocol.metrics` and the total it shows.
_COUNTERS: tuple[tuple[str, Callable[[Totals], int]], ...] = (
    ("prompt_tokens_total", lambda totals: totals.prompt),
    ("generation_tokens_total", lambda totals: totals.generated),
    ("prefix_cache_queries_total", lambda totals: totals.prefix_queries),
    ("prefix_cache_hits_total", lambda totals: totals.prefix_hits),
    ("num_preemptions_total", lambda totals: totals.preemptions),
    ("num_aborts_total", lambda totals: totals.aborted),
)


@dataclass(slots=True)
class _Life:
    """When a request got its slot and its first token, in monotonic seconds."""

    entered: float
    first_token: float | None = None


class EngineMetrics:
    """Instruments of one engine, labelled with the model's public name."""

    def __init__(self, resolved: Resolved) -> None:
        model_name, info = resolved.public_name, resolved.info
        self._registry = CollectorRegistry()
        self._num_blocks = info.num_blocks
        self._shown = Totals()
        self._lives: dict[RequestKey, _Life] = {}
        self._fresh: dict[RequestKey, _Life] = {}  # without a token yet: the only ones of whom a token is news
        self._lock = threading.Lock()
        instruments = metrics.build(metrics.Owner.ENGINE, self._registry)
        self._counters = [(instruments.counter(name).labels(model_name), total) for name, total in _COUNTERS]
        self._running = instruments.gauge("num_requests_running").labels(model_name)
        self._waiting = instruments.gauge("num_requests_waiting").labels(model_name)
        self._usage = instruments.gauge("kv_cache_usage_perc").labels(model_name)
        self._queue = instruments.histogram("request_queue_time_seconds").labels(model_name)
        self._prefill = instruments.histogram("request_prefill_time_seconds").labels(model_name)
        self._decode = instruments.histogram("request_decode_time_seconds").labels(model_name)
        self._inference = instruments.histogram("request_inference_time_seconds").labels(model_name)
        self._computed = instruments.histogram("request_prefill_kv_computed_tokens").labels(model_name)
        self._tokens = instruments.histogram("iteration_tokens_total").labels(model_name)
        self._duration = instruments.histogram("step_duration_seconds").labels(model_name)
        caching = str(resolved.enable_prefix_caching)
        instruments.gauge("cache_config_info").labels(model_name, info.block_size, info.num_blocks, caching).set(1)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        self._tokens.observe(num_tokens)
        self._duration.observe(seconds)

    def observe_events(self, events: Iterable[Event], now: float) -> None:
        """What happened to requests up to `now`, in monotonic seconds."""
        for event in events:
            match event:
                case Sampled(request=request):
                    if self._fresh and (life := self._fresh.pop(request.key, None)) is not None:
                        life.first_token = now
                case Entered(owner=owner, message=admitted, at=at):
                    self._queue.observe(admitted.queue_ms / 1000)
                    self._lives[owner, admitted.handle] = self._fresh[owner, admitted.handle] = _Life(at)
                case Ended(owner=owner, message=finished):
                    key = owner, finished.handle
                    self._fresh.pop(key, None)
                    if (ended := self._lives.pop(key, None)) is not None:
                        self._observe_end(ended, finished, now)

    def _observe_end(self, life: _Life, finished: Finished, now: float) -> None:
        """The times of requests that came to their own end, with the last token; others were cut somewhere."""
        if finished.reason in (FinishReason.STOP, FinishReason.LENGTH) and life.first_token is not None:
            self._prefill.observe(life.first_token - life.entered)
            self._decode.observe(now - life.first_token)
            self._inference.observe(now - life.entered)
            self._computed.observe(finished.num_prompt - finished.num_cached)

    def exposition(self, look: Callable[[], Status]) -> bytes:
        """Prometheus text of the moment when `look` is called. Any thread may ask, each after the other's look: totals
        only grow.
        """
        with self._lock:
            status = look()
            for counter, total in self._counters:
                counter.inc(total(status.totals) - total(self._shown))
            self._shown = status.totals
            self._running.set(status.running)
            self._waiting.set(status.waiting)
            self._usage.set(1 - status.free_blocks / self._num_blocks)
            return metrics.exposition(self._registry)


class MetricsServer:
    """Answers `/metrics`, `/health` (the process lives) and `/ready` (it serves) on 127.0.0.1.

    `phase` and `exposition` are called from the server's threads; `exposition` is b"" while loading.
    """

    def __init__(self, port: int, phase: Callable[[], Phase], exposition: Callable[[], bytes]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                match self.path:
                    case "/metrics":
                        self._answer(200, exposition(), metrics.CONTENT_TYPE)
                    case "/health":
                        self._answer(200, b"ok\n")
                    case "/ready":
                        current = phase()
                        self._answer(200 if current is Phase.SERVING else 503, f"{current}\n".encode())
                    case _:
                        self._answer(404, b"/metrics, /health and /ready are here\n")

            def _answer(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """A scrape is no event."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

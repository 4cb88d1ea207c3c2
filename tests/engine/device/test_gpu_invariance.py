"""Random requests on a GPU, Llama-3.1-8B's and Qwen3-0.6B's shapes: no composition of steps changes a bit of an answer.
`pytest -m gpu -k invariance`.

Bits depend on the shapes of layers, not on their number: two of them, with random weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.device import gpu_inputs, graphs
from engine.device.gpu_inputs import GpuInputs, Prepared
from engine.plan import StepPlan
from loadtest.shapes import SHAPES, Shape, write_folder
from protocol.messages import Submit
from tests.engine.core_loop import Answer, Loop, same
from tests.engine.random_requests import random_request

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

LAYERS, CONTEXT, REQUESTS = 2, 1400, 100

#: On both sides of blocks (16), tiles of keys (64) and of queries (32), splits (256), graphs' tokens (512, 1024) and
#: chunks (64, 1000).
LENGTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 130, 255, 257, 600, 800, 1001, 1024, 1300)


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape, the requests, and what each is answered by itself: whole prompt, nothing cached or beside it."""

    start: Callable[..., Loop]
    requests: list[Submit]
    alone: dict[int, Answer]


def _starter(shape: Shape, folder: Path, cache: Path, pool: str) -> Callable[..., Loop]:
    def start(num_blocks: int = 3000, **values: object) -> Loop:
        number_bytes = 1 if pool == "fp8" else 2
        return Loop(
            folder,
            num_blocks=num_blocks,
            kv_cache_memory_bytes=num_blocks * LAYERS * 2 * shape.kv_heads * shape.head_dim * 16 * number_bytes,
            kv_cache_dtype=pool,
            device="cuda",
            load_format="dummy",
            cache_dir=cache,
            **({"depth": 2, "max_model_len": CONTEXT} | values),
        )

    return start


@pytest.fixture(scope="module", params=[("llama8b", "auto"), ("qwen06b", "auto"), ("qwen06b", "fp8")], ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Case:
    name, pool = request.param
    shape = dataclasses.replace(SHAPES[name], layers=LAYERS)
    folder = tmp_path_factory.mktemp(name)
    write_folder(shape, folder)
    start = _starter(shape, folder, kernel_cache, pool)
    requests = [
        random_request(number, vocab_size=shape.vocab, lengths=LENGTHS, max_tokens=48) for number in range(REQUESTS)
    ]
    one = start(depth=1, max_num_seqs=4, max_num_batched_tokens=2048, enable_prefix_caching=False)
    alone: dict[int, Answer] = {}
    for message in requests:
        alone |= one.run([message])
    return Case(start, requests, alone)


def test_together_and_with_cached_prefixes(case: Case) -> None:
    """3, 17 and 100 at a time, in chunks of up to 1000 tokens."""
    together = case.start(max_num_seqs=REQUESTS, max_num_batched_tokens=1000)
    for size in (3, 17):
        for first in range(0, REQUESTS, size):
            some = case.requests[first : first + size]
            same(together.run(some), {message.handle: case.alone[message.handle] for message in some})
    again = together.run(case.requests)
    same(again, case.alone)
    assert sum(answer.num_cached > 0 for answer in again.values()) > REQUESTS // 3


def test_beside_single_tokens_in_graphs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that are not long chunks alone; the second time many chunks are short, behind cached prefixes."""
    monkeypatch.setattr(graphs, "_ITEMS_SIZES", (16,))
    seen: set[int] = set()
    prepare = GpuInputs.prepare

    def noted(inputs: GpuInputs, plan: StepPlan) -> Prepared:
        prepared = prepare(inputs, plan)
        if prepared.in_graph and prepared.layout.num_single:
            seen.add(prepared.layout.num_tokens)
        return prepared

    monkeypatch.setattr(GpuInputs, "prepare", noted)
    for most in (640, 190):
        together = case.start(max_num_seqs=REQUESTS, max_num_batched_tokens=700, max_num_prefill_tokens=most)
        for _ in range(2):
            same(together.run(case.requests), case.alone)
    assert {192, 640} <= seen


def test_in_chunks_of_64(case: Case) -> None:
    same(case.start(max_num_seqs=60, max_num_batched_tokens=64).run(case.requests), case.alone)


def test_preempted(case: Case) -> None:
    """Too few blocks for the answers of those that were let in."""
    short = [message for message in case.requests if len(message.prompt_ids) <= 130]
    few = case.start(num_blocks=13, max_model_len=13 * 16, max_num_seqs=60, max_num_batched_tokens=256)
    same(few.run(short), {message.handle: case.alone[message.handle] for message in short})
    assert few.core.status.totals.preemptions > 0


def test_without_graphs(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_inputs, "decode_layouts", lambda *sizes: [])
    monkeypatch.setattr(gpu_inputs, "chunk_layouts", lambda *sizes: [])
    same(case.start(max_num_seqs=REQUESTS, max_num_batched_tokens=4096).run(case.requests), case.alone)

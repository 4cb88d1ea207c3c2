"""Times of a model's steps on a GPU: `python -m engine.backends.torch_benchmark llama8b`, one JSON object.

Steps go through TorchRunner as the engine's loop drives it: planned on the host, two in flight, ids
read one step late. A step's time is the wall time of many divided by their number.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.backends.torch_runner import TorchRunner
from engine.device.shapes import SHAPES, write_shape
from engine.plan import PlanEntry, SlotState, StepPlan
from protocol.messages import U32
from protocol.sampling import SamplingParams


@dataclass(frozen=True)
class Settings:
    """What TorchRunner reads, for one GPU."""

    model: str
    load_format: str
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int = 16384
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    reproducible: bool = True
    kv_cache_memory_bytes: int | None = None
    threads: int | None = None
    device: str = "cuda"
    gpu_memory_utilization: float = 0.92
    cache_dir: Path = Path.home() / ".cache" / "sluicegate"


class Bench:
    """Sequences of one length on slots 0, 1, …, whose prompts are taken as computed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._runner = TorchRunner(settings)
        start = time.perf_counter()
        self.info = self._runner.load(lambda phase, done, total: None)
        self.load_s = time.perf_counter() - start
        self._step = 0

    def decode_ms(self, batch: int, context: int, *, steps: int = 128, temperature: float = 0.0) -> float:
        """Milliseconds of a decode step, the context growing from `context` - steps / 2 to + steps / 2."""
        size = self._settings.block_size
        per_slot = -(-(context + steps) // size)
        entered = tuple(self._enter(slot, temperature) for slot in range(batch))
        plans = list(self._decodes(batch, context - steps // 2, steps, per_slot, entered))
        times = []
        for number, plan in enumerate(plans):
            self._runner.launch(plan)
            if number:
                self._runner.collect()
            times.append(time.perf_counter())
        self._runner.collect()
        begin = steps // 8  # the first launch compiles what is not compiled
        return (time.perf_counter() - times[begin]) / (steps - begin - 1) * 1e3

    def prefill_s(self, prompts: int, length: int, *, repeats: int = 3) -> float:
        """Seconds from launch to the last prompt's token, the median; steps of at most max_num_batched_tokens."""
        return statistics.median(self._prefill(prompts, length) for _ in range(repeats + 1))

    def _prefill(self, prompts: int, length: int) -> float:
        size = self._settings.block_size
        plans: list[StepPlan] = []
        budget, entered, entries = self._settings.max_num_batched_tokens, [], []
        for slot in range(prompts):
            begin = 0
            blocks = self._blocks(slot, -(-length // size), prompts)
            entered.append(self._enter(slot, 0.0))
            while begin < length:
                count = min(budget, length - begin)
                ids = array(U32, torch.randint(3, self.info.vocab_size, (count,)).tolist())
                done = begin + count == length
                entries.append(PlanEntry(slot, begin, count, ids, blocks if begin == 0 else (), done))
                begin, budget = begin + count, budget - count
                if budget == 0 or (done and slot == prompts - 1):
                    self._step += 1
                    plans.append(StepPlan(self._step, tuple(entered), tuple(entries)))
                    budget, entered, entries = self._settings.max_num_batched_tokens, [], []
        torch.cuda.synchronize()
        start = time.perf_counter()
        for number, plan in enumerate(plans):
            self._runner.launch(plan)
            if number:
                self._runner.collect()
        self._runner.collect()
        return time.perf_counter() - start

    def _decodes(
        self, batch: int, start: int, steps: int, per_slot: int, entered: tuple[SlotState, ...]
    ) -> Iterator[StepPlan]:
        for number in range(steps):
            self._step += 1
            entries = tuple(
                PlanEntry(
                    slot,
                    start + number,
                    1,
                    array(U32, [3 + slot]) if number == 0 else array(U32),
                    self._blocks(slot, per_slot, batch) if number == 0 else (),
                    True,
                )
                for slot in range(batch)
            )
            yield StepPlan(self._step, entered if number == 0 else (), entries)

    def _blocks(self, slot: int, count: int, num_slots: int) -> tuple[int, ...]:
        """Scattered, and different for each of `num_slots` slots."""
        assert count * num_slots <= self.info.num_blocks, "the pool is too small for this benchmark"
        return tuple(index * num_slots + slot for index in range(count))

    def _enter(self, slot: int, temperature: float) -> SlotState:
        sampling = SamplingParams(max_tokens=4096, temperature=temperature)
        return SlotState(slot, array(U32, [3]), array(U32), sampling, seed=slot)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.backends.torch_benchmark", description=__doc__)
    parser.add_argument("shape", choices=SHAPES, help="the model's shape; its weights are random")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prefill", default="1x128,1x1024,1x8192,16x2048", help="prompts x length, …")
    parser.add_argument("--no-reproducible", dest="reproducible", action="store_false")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_shape(asked.shape, Path(folder)))
        most = max(asked.batches)
        settings = Settings(model, "dummy", max_num_seqs=most, max_model_len=16384, reproducible=asked.reproducible)
        bench = Bench(settings)
    result: dict[str, object] = {
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "load_s": round(bench.load_s, 2),
        "kv_tokens": bench.info.num_blocks * bench.info.block_size,
    }
    for batch in asked.batches:
        result[f"decode_ms.{batch}"] = [round(bench.decode_ms(batch, asked.context), 3) for _ in range(3)]
        sys.stderr.write(f"{result}\n")
    result[f"decode_ms.{most}.sampled"] = round(bench.decode_ms(most, asked.context, temperature=0.6), 3)
    for shape in asked.prefill.split(","):
        prompts, length = map(int, shape.split("x"))
        seconds = bench.prefill_s(prompts, length)
        result[f"prefill.{shape}"] = {"s": round(seconds, 4), "tok_s": round(prompts * length / seconds)}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

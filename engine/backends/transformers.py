"""Any causal LM that transformers can build, behind the same scheduler, sampler and wire. Slow and right.

torch's products give a row other bits in another batch, so each request is computed by itself, and
cut where its own tokens say: the prompt in segments of `SEGMENT` positions from 0, every generated
token alone. Where a step's plan cuts a prompt elsewhere, a segment is computed with the first entry
that touches it. So the bits of a request depend on nothing else: not on the requests beside it, on
chunks, on a preemption or a resume, for dense, expert and recurrent models alike.

Each request has transformers' own cache, and blocks only bound how much all caches hold together.
Nothing is shared between requests, so there are no prefix hits.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

import kernels
from engine.backends.transformers_model import TransformersModel
from engine.config import EngineConfig
from engine.device.columns import u32_column
from engine.device.sampler import Sampler
from engine.device.scoring import ScoredRows, score
from engine.host_memory import default_kv_memory_bytes
from engine.loading.formats import Checkpoint
from engine.loading.generation import eos_ids, generation_defaults, read_generation_config
from engine.loading.identity import model_digest, numerics_hash
from engine.loading.store import ModelError, ModelFolder
from engine.loading.tokenizers import tokenizer_bundle
from engine.plan import ModelInfo, PlanEntry, Progress, SlotState, StepPlan, StepResult


class _Sequence:
    """The request in a slot: its tokens, and the cache of those computed. `cache` is None once it is gone.

    `logits` are those of the last computed segment, float32 [positions, vocab_size]: of all its
    positions where prompt logprobs may be asked for (`all_logits`), else of its last.
    """

    __slots__ = ("all_logits", "cache", "ids", "logits", "num_computed", "num_prompt")

    def __init__(self, state: SlotState, cache: DynamicCache) -> None:
        self.ids: array[int] = state.prompt_ids + state.generated_ids
        self.num_prompt = len(state.prompt_ids)
        self.all_logits = state.sampling.prompt_logprobs is not None
        self.num_computed = 0
        self.cache: DynamicCache | None = cache
        self.logits: Tensor | None = None

    def drop(self) -> None:
        """Its request has ended or was preempted."""
        self.cache = self.logits = None

    def compute(self, model: TransformersModel) -> None:
        """The next segment."""
        assert self.cache is not None, "a sequence is planned that lost its blocks"
        first = self.num_computed
        end = first + 1 if first >= self.num_prompt else min(first + model.segment, self.num_prompt)
        self.logits = model.forward(self.ids[first:end], self.cache, all_logits=self.all_logits)
        self.num_computed = end

    def logits_at(self, first: int, end: int) -> Tensor:
        """Logits after the positions from `first` to `end - 1`, all of the last computed segment."""
        assert self.logits is not None
        from_end = self.num_computed - first
        return self.logits[len(self.logits) - from_end : len(self.logits) - from_end + end - first]


class TransformersRunner:
    """`engine.plan.Runner` for what AutoModelForCausalLM knows, on a CPU or one GPU."""

    max_in_flight = 1

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._model: TransformersModel | None = None
        self._sampler = Sampler(config.max_num_seqs)
        self._slots: dict[int, _Sequence] = {}
        self._owners: dict[int, _Sequence] = {}  # of blocks
        self._launched: StepPlan | None = None

    def load(self, progress: Progress) -> ModelInfo:
        """Read everything. Raises ModelError for a model or setting that cannot be served."""
        config = self._config
        if config.model is None:
            raise ModelError("no model is named; give its folder as --model.")
        if config.load_format not in ("auto", "safetensors", "dummy"):
            raise ModelError(f"--load-format {config.load_format}: the transformers backend reads safetensors alone.")
        if config.quantization is not None:
            raise ModelError("--quantization is torch_runner's; a checkpoint's own is read without it.")
        if config.kv_cache_dtype != "auto":
            raise ModelError("--kv-cache-dtype is torch_runner's; here keys and values have the model's type.")
        folder = ModelFolder(Path(config.model))
        tokenizer = tokenizer_bundle(folder)
        generation = read_generation_config(folder)
        checkpoint = None if config.load_format == "dummy" else Checkpoint(folder, "safetensors")
        progress("preparing kernels", 0, 0)
        device = _start(config)
        progress("loading weights", 0, 0)
        model = self._model = TransformersModel.load(folder, config, device, dummy=checkpoint is None)
        vocab_size, kv_bytes = model.measure()
        context_length = model.context_length(config.max_model_len)
        digest = model_digest(folder, tokenizer, checkpoint)
        return ModelInfo(
            digest=digest,
            numerics=numerics_hash({"digest": digest, "sampler": kernels.numerics_name(), **model.facts()}),
            vocab_size=vocab_size,
            context_length=context_length,
            block_size=config.block_size,
            num_blocks=_num_blocks(config, device, kv_bytes, context_length),
            eos_ids=eos_ids(generation, folder.read_object("config.json"), vocab_size),
            generation_defaults=generation_defaults(generation),
            bundle=tokenizer,
            prefix_caching=False,
        )

    def launch(self, plan: StepPlan) -> None:
        """Only remembers the plan; `collect` runs it."""
        assert self._launched is None, "one step at a time"
        self._launched = plan

    @torch.inference_mode()
    def collect(self) -> StepResult:
        plan, self._launched = self._launched, None
        assert plan is not None
        assert self._model is not None, "load() comes first"
        for state in plan.entered:
            if (left := self._slots.get(state.slot)) is not None:
                left.drop()
            self._slots[state.slot] = _Sequence(state, self._model.new_cache())
            self._sampler.enter(state)
        model = self._model
        to_score: list[Tensor] = []
        rows = [self._compute(model, entry, to_score) for entry in plan.entries]
        scored = ScoredRows.of(plan)
        # The rows are logits already.
        scores = None if scored is None else score(lambda logits: logits, torch.cat(to_score), scored)
        sampling = [(entry, row) for entry, row in zip(plan.entries, rows, strict=True) if entry.sample]
        if not sampling:
            return StepResult(plan.step, u32_column(torch.empty(0)), scored=scores)
        slots = np.array([entry.slot for entry, _ in sampling], np.int64)
        positions = np.array([entry.start + entry.count for entry, _ in sampling], np.int64)
        sampled = self._sampler.sample(torch.stack([row for _, row in sampling]), slots, positions)
        return StepResult(plan.step, u32_column(sampled.ids), sampled.logprobs, sampled.failed, scores)

    def close(self) -> None:
        """Let go of weights and caches."""
        self._model = None
        self._slots.clear()
        self._owners.clear()

    def _compute(self, model: TransformersModel, entry: PlanEntry, to_score: list[Tensor]) -> Tensor:
        """Compute an entry's positions; the logits [vocab_size] after its last, if that ends a segment.

        The rows that its scoring is made from, [positions, vocab_size], are added to `to_score`.
        """
        sequence = self._slots[entry.slot]
        for block in entry.new_blocks:
            # Blocks are not shared here, so its last owner is gone.
            owner = self._owners.get(block)
            if owner is not None and owner is not sequence:
                owner.drop()
            self._owners[block] = sequence
        at, end, scoring = entry.start, entry.start + entry.count, entry.scoring
        sequence.ids[at:end] = entry.ids
        if scoring is not None and not sequence.all_logits:
            # Asked for on the wire without saying how many: from the beginning again, keeping logits.
            sequence.all_logits, sequence.num_computed, sequence.cache = True, 0, model.new_cache()
        while at < end:
            while sequence.num_computed <= at:
                sequence.compute(model)
            upto = min(end, sequence.num_computed)
            if scoring is not None and (first := max(at, scoring.first - 1)) < upto:
                last = min(upto, scoring.first - 1 + len(scoring.ids))
                to_score.append(sequence.logits_at(first, last))
            at = upto
        if end < sequence.num_computed:
            return torch.empty(0)  # nothing is sampled here
        (row,) = sequence.logits_at(end - 1, end)
        return row


def _start(config: EngineConfig) -> torch.device:
    """The device in force. Sampling is on the CPU whatever it is."""
    kernels.start(cache_dir=config.cache_dir / "kernels")
    threads = config.threads or len(os.sched_getaffinity(0))
    kernels.set_num_threads(threads)
    torch.set_num_threads(threads)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: torch sees no GPU here. Use --device cpu, or install a torch built for CUDA.")
    return torch.device("cpu" if config.device == "cpu" or not torch.cuda.is_available() else "cuda")


def _num_blocks(config: EngineConfig, device: torch.device, kv_bytes: int, context_length: int) -> int:
    """Blocks of what caches may hold together. Raises ModelError when one full sequence is too much."""
    needed = -(-context_length // config.block_size)
    most = needed * config.max_num_seqs
    if not kv_bytes:  # a state of fixed size
        return most
    memory_bytes = config.kv_cache_memory_bytes
    if memory_bytes is None:
        memory_bytes = _default_memory_bytes(config, device)
    num_blocks = memory_bytes // (kv_bytes * config.block_size)
    if num_blocks < needed:
        raise ModelError(
            f"--max-model-len {context_length} needs {needed} KV blocks "
            f"({needed * config.block_size * kv_bytes} bytes) for one sequence, and --kv-cache-memory-bytes "
            f"{memory_bytes} holds {num_blocks}. Raise the memory, or set --max-model-len to at most "
            f"{num_blocks * config.block_size}."
        )
    return min(num_blocks, most)


def _default_memory_bytes(config: EngineConfig, device: torch.device) -> int:
    if device.type == "cpu":
        return default_kv_memory_bytes(0)  # the weights are loaded
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - round((1 - config.gpu_memory_utilization) * total))

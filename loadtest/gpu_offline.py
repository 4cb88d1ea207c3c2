"""What `LLM.generate` takes on this machine's device, one JSON object a line: a process of its own for each model.

Whole control plane, wall time: scheduler, wire, detokenizing. Weights are random, prompts random ids, the end of
sequence is ignored. Run by `loadtest.gpu`, which says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sluicegate import LLM, RequestOutput, SamplingParams

#: Ids below are bytes and the like in most vocabularies.
_LEAST_ID = 1000

#: A decode step is timed between these two lengths, after prompts of this many tokens that are cached.
_SHORT, _LONG, _PROMPT = 129, 257, 832

#: Offline throughput: sequences, and the range of their prompts' and answers' lengths.
_SEQUENCES, _LEAST, _MOST = 256, 100, 1024
_TEMPERATURE = 0.6

_HITS = 7  # measurements of a prompt that is cached


@dataclass(slots=True)
class Offline:
    """A model, and random prompts for it."""

    llm: LLM
    vocab: int
    repeats: int
    random: random.Random

    def prompt(self, length: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [self.random.randrange(_LEAST_ID, self.vocab) for _ in range(length)]}

    def seconds(self, prompts: list[dict[str, list[int]]], lengths: Sequence[int], temperature: float = 0.0) -> float:
        """Wall time of answers of exactly `lengths` tokens."""
        params = [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True) for n in lengths]
        begun = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        taken = time.perf_counter() - begun
        _check(outputs, lengths)
        return taken

    def warm_up(self) -> None:
        self.seconds([self.prompt(64) for _ in range(16)], [16] * 16)
        self.seconds([self.prompt(300) for _ in range(8)], [8] * 8, _TEMPERATURE)

    def decode_ms(self, batch: int) -> Iterator[float]:
        """Of a step with contexts of 961 to 1,089 tokens."""
        prompts = [self.prompt(_PROMPT) for _ in range(batch)]
        self.seconds(prompts, [1] * batch)
        for _ in range(self.repeats):
            short, long = (self.seconds(prompts, [length] * batch) for length in (_SHORT, _LONG))
            yield (long - short) / (_LONG - _SHORT) * 1e3

    def prefill_tok_s(self, prompts: int, length: int) -> Iterator[float]:
        """Prompt tokens a second, until the last of `prompts` fresh ones has its first token."""
        for number in range(self.repeats + 1):
            taken = self.seconds([self.prompt(length) for _ in range(prompts)], [1] * prompts)
            if number:  # the first warms up
                yield prompts * length / taken

    def ttft_ms(self, length: int) -> Iterator[float]:
        """Of a fresh prompt alone."""
        for rate in self.prefill_tok_s(1, length):
            yield length / rate * 1e3

    def hit_ms(self, length: int) -> Iterator[float]:
        """Of a prompt whose blocks are cached."""
        prompt = self.prompt(length)
        for number in range(_HITS + 1):
            taken = self.seconds([prompt], [1])
            if number:
                yield taken * 1e3

    def tok_s(self) -> Iterator[float]:
        """Output tokens a second of 256 sequences of mixed lengths at once, sampled at 0.6."""
        for _ in range(self.repeats):
            lengths = random.Random(0)
            prompts, answers = (
                [lengths.randint(_LEAST, _MOST) for _ in range(_SEQUENCES)] for _ in ("prompts", "answers")
            )
            yield sum(answers) / self.seconds([self.prompt(n) for n in prompts], answers, _TEMPERATURE)


def _check(outputs: Sequence[RequestOutput], lengths: Sequence[int]) -> None:
    """A model that stops early would be measured as a fast one."""
    for output, length in zip(outputs, lengths, strict=True):
        if len(output.outputs[0].token_ids) != length:
            raise ValueError(f"an answer has {len(output.outputs[0].token_ids)} tokens, {length} were asked for")


#: Measures by the first word of their names: `decode:64`, `prefill:16x2048`, `ttft:128`, `hit:8192`, `tok_s`.
_MEASURES: dict[str, Callable[[Offline, str], Iterator[float]]] = {
    "decode": lambda offline, of: offline.decode_ms(int(of)),
    "prefill": lambda offline, of: offline.prefill_tok_s(*map(int, of.split("x"))),
    "ttft": lambda offline, of: offline.ttft_ms(int(of)),
    "hit": lambda offline, of: offline.hit_ms(int(of)),
    "tok_s": lambda offline, of: offline.tok_s(),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu_offline", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("measures", nargs="+")
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--no-reproducible", dest="reproducible", action="store_false")
    options = parser.parse_args(argv)
    begun = time.perf_counter()
    with LLM(options.model, load_format="dummy", device=options.device, reproducible=options.reproducible) as llm:
        _print("load_s", [time.perf_counter() - begun])
        offline = Offline(llm, options.vocab, options.repeats, random.Random(1))
        offline.warm_up()
        for name in options.measures:
            kind, _, of = name.partition(":")
            _print(name, list(_MEASURES[kind](offline, of)))
    return 0


def _print(name: str, values: list[float]) -> None:
    sys.stdout.write(json.dumps({"name": name, "median": statistics.median(values), "values": values}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

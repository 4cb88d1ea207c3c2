"""What is asked and when: prompts of given sizes and their arrival times, the same for the same seed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

# Common words: with its leading space each is one token in most BPE vocabularies, so sizes are right to a few tokens
# without a tokenizer. Results carry the server's own count.
_COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name president team minute idea body information back parent "
    "face others level office door health person art war history party result change morning reason research girl guy "
    "moment air teacher force education"
)
WORDS = _COMMON_WORDS.split()


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes are means in tokens; each size is drawn evenly from mean · (1 ± spread).

    The first `prefix_tokens` are one of `num_prefixes` texts that requests share, taken in turn. `burst_size` requests
    of an open loop arrive at the same moment.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    spread: float = 0.0
    prefix_tokens: int = 0
    num_prefixes: int = 1
    burst_size: int = 1


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("chat", prompt_tokens=128, output_tokens=128, spread=0.5),
        Workload("shared-prefix", prompt_tokens=12, output_tokens=16, prefix_tokens=1000),
        Workload("long", prompt_tokens=1500, output_tokens=64, spread=0.2),  # fits a context of 2048
        Workload("burst", prompt_tokens=128, output_tokens=64, spread=0.5, burst_size=16),
    )
}


@dataclass(frozen=True, slots=True)
class Prompt:
    prefix: str  # empty without a shared prefix
    prefix_index: int
    text: str
    output_tokens: int


def prompts(workload: Workload, seed: int) -> Iterator[Prompt]:
    """Endless. Texts are random words, so two prompts share no block of a prefix cache beyond their prefix."""
    rng = random.Random(f"{seed} prompts")
    prefixes = [_words(rng, workload.prefix_tokens) for _ in range(workload.num_prefixes)]
    index = 0
    while True:
        text = _words(rng, _size(rng, workload.prompt_tokens, workload.spread))
        output_tokens = _size(rng, workload.output_tokens, workload.spread)
        yield Prompt(prefixes[index % len(prefixes)], index % len(prefixes), text, output_tokens)
        index += 1


def arrivals(rate: float, burst_size: int, seed: int) -> Iterator[float]:
    """Endless times in seconds from the start: a Poisson process of `rate` requests per second in bursts."""
    rng = random.Random(f"{seed} arrivals")
    at = 0.0
    while True:
        for _ in range(burst_size):
            yield at
        at += rng.expovariate(rate / burst_size)


def _size(rng: random.Random, mean: int, spread: float) -> int:
    return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))

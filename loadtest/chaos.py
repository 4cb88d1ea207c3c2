"""Engine and gateway killed and stopped at random tokens: every answer must be that of an undisturbed run.

A black box: it starts the two programs by their command lines, speaks HTTP, sends signals, and reads metrics.
"""

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from tqdm import tqdm

from loadtest.asking import Asked, ask
from loadtest.compare import Answer, differences
from loadtest.machine import read_code, read_hardware, read_versions
from loadtest.matrix import Case, cases
from loadtest.servers import Pair, TrialError
from loadtest.stats import distribution

#: Undisturbed runs at a time.
REFERENCE_CONCURRENCY = 8
#: The other requests of a blow go out this long before the one that times it, so that they are at work too.
HEAD_START_S = 0.02
#: A blow that fell on nothing is no evidence and is repeated; a server that is never hit ends the run.
MAX_MISSES_IN_A_ROW = 20
#: The promise for a gateway that dies: its blocks are free again.
FREED_WITHIN_S = 10.0

SCHEMA_VERSION = 1


class Blow(StrEnum):
    ENGINE_KILL = "engine killed"
    ENGINE_STOP = "engine stopped"
    GATEWAY_KILL = "gateway killed"


@dataclass(frozen=True, slots=True)
class ChaosConfig:
    """`stop_s` is how long a stopped engine stands still; `width` requests run when a blow falls."""

    engine_flags: tuple[str, ...]
    gateway_flags: tuple[str, ...]
    engine_kills: int
    engine_stops: int
    gateway_kills: int
    stop_s: float
    num_cases: int
    width: int
    seed: int


@dataclass(frozen=True, slots=True)
class Reference:
    case: Case
    answer: Answer

    @property
    def num_tokens(self) -> int:
        return int((self.answer.usage or {}).get("completion_tokens", 0))


@dataclass(frozen=True, slots=True)
class Struck:
    """One blow and what came of it. `freed_s`: how long a dead gateway's requests stayed at the engine."""

    blow: Blow
    at_token: int
    of_tokens: int
    cases: list[str]
    num_resumed: int
    longest_pause_s: float
    freed_s: float | None
    differences: list[str]


@dataclass(frozen=True, slots=True)
class Report:
    schema_version: int
    command: list[str]
    code: Any
    hardware: Any
    versions: Any
    config: ChaosConfig
    num_cases: int
    options: dict[str, dict[str, int]]  # axis -> option -> answers compared
    num_missed: int
    blows: list[Struck]

    @property
    def num_different(self) -> int:
        return sum(len(struck.differences) for struck in self.blows)


async def chaos(config: ChaosConfig, command: list[str]) -> Report:
    """The whole run. Raises ServerFailed, or TrialError where an undisturbed request fails."""
    rng = random.Random(config.seed)
    async with Pair(config.engine_flags, config.gateway_flags) as pair:
        references = await _references(pair, cases(config.seed, config.num_cases), rng)
        blows, options, num_missed = await _strike_all(pair, config, references, rng)
    return Report(
        schema_version=SCHEMA_VERSION,
        command=command,
        code=asdict(read_code()),
        hardware=asdict(read_hardware()),
        versions=read_versions(),
        config=config,
        num_cases=len(references),
        options=options,
        num_missed=num_missed,
        blows=blows,
    )


async def _references(pair: Pair, made: Sequence[Case], rng: random.Random) -> list[Reference]:
    """Undisturbed answers, for cases with stop strings and the like cut out of an answer before that."""
    room = asyncio.Semaphore(REFERENCE_CONCURRENCY)

    async def undisturbed(case: Case, salt: str) -> Answer:
        async with room:
            asked = await ask(pair.client, case.path, {**case.body, "cache_salt": salt})
        if asked.answer is None or asked.answer.error is not None:
            raise TrialError(f"undisturbed, {case.name}: {asked.failure or asked.answer}")
        return asked.answer

    drafts = await asyncio.gather(*(undisturbed(case, "draft") for case in made))
    final = [case.derived(draft, rng) for case, draft in zip(made, drafts, strict=True)]
    answers = await asyncio.gather(*(undisturbed(case, "undisturbed") for case in final))
    return [Reference(case, answer) for case, answer in zip(final, answers, strict=True)]


async def _strike_all(
    pair: Pair, config: ChaosConfig, references: list[Reference], rng: random.Random
) -> tuple[list[Struck], dict[str, dict[str, int]], int]:
    planned = [
        *[Blow.ENGINE_KILL] * config.engine_kills,
        *[Blow.ENGINE_STOP] * config.engine_stops,
        *[Blow.GATEWAY_KILL] * config.gateway_kills,
    ]
    targets = [reference for reference in references if reference.case.streamed and reference.num_tokens > 1]
    if planned and not targets:
        raise TrialError(f"of {len(references)} cases none is streamed and has two tokens: give more --cases")
    blows, seen, num_missed, in_a_row = list[Struck](), Counter[tuple[str, str]](), 0, 0
    bar = tqdm(total=len(planned), desc="blows", disable=None, leave=False)
    while len(blows) < len(planned):
        target = rng.choice(targets)
        beside = rng.sample([r for r in references if r is not target], min(config.width, len(references)) - 1)
        struck = await _strike(pair, config, planned[len(blows)], [*beside, target], rng)
        if struck.blow is not Blow.GATEWAY_KILL and not struck.num_resumed and not struck.differences:
            num_missed, in_a_row = num_missed + 1, in_a_row + 1
            if in_a_row == MAX_MISSES_IN_A_ROW:
                raise TrialError(f"{in_a_row} blows in a row fell on nothing: the engine answers too fast to be hit")
            continue
        in_a_row = 0
        blows.append(struck)
        seen.update(item for reference in (*beside, target) for item in reference.case.options.items())
        bar.update()
    bar.close()
    options: dict[str, dict[str, int]] = {}
    for (axis, option), count in sorted(seen.items()):
        options.setdefault(axis, {})[option] = count
    return blows, options, num_missed


async def _strike(
    pair: Pair, config: ChaosConfig, blow: Blow, chosen: Sequence[Reference], rng: random.Random
) -> Struck:
    """Ask all that are chosen, and strike when the last of them has a random number of its tokens."""
    target = chosen[-1]
    at_token = rng.randrange(1, target.num_tokens)
    resumed_before = await pair.gateway_metric("resumes_total", 'exact="true"')
    salt = f"{blow}-{rng.random()}"
    tasks, struck_at = await _ask_until(pair, blow, chosen, salt, at_token)
    freed_s = None
    if struck_at is not None:
        freed_s = await _after(pair, config, blow)
    asked = await asyncio.gather(*tasks)
    await pair.wait_until_ready()
    found = [] if blow is Blow.GATEWAY_KILL else _found(chosen, asked)
    if blow is Blow.GATEWAY_KILL and struck_at is not None and freed_s is None:
        found.append(f"requests of the dead gateway are at the engine after {FREED_WITHIN_S:g} s")
    resumed = await pair.gateway_metric("resumes_total", 'exact="true"')
    return Struck(
        blow=blow,
        at_token=at_token,
        of_tokens=target.num_tokens,
        cases=[reference.case.name for reference in chosen],
        num_resumed=0 if blow is Blow.GATEWAY_KILL else round(resumed - resumed_before),
        longest_pause_s=round(asked[-1].longest_pause_s, 3),
        freed_s=None if freed_s is None else round(freed_s, 3),
        differences=found,
    )


async def _ask_until(
    pair: Pair, blow: Blow, chosen: Sequence[Reference], salt: str, at_token: int
) -> tuple[list[asyncio.Task[Asked]], float | None]:
    """The requests under way, and when the blow fell; None if the target ended without having come so far."""
    victim = pair.gateway if blow is Blow.GATEWAY_KILL else pair.engine
    number = signal.SIGSTOP if blow is Blow.ENGINE_STOP else signal.SIGKILL
    fell: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def strike(num_tokens: int) -> None:
        if num_tokens >= at_token and not fell.done():
            victim.signal(number)
            fell.set_result(time.perf_counter())

    *beside, target = chosen
    tasks = [asyncio.create_task(_ask(pair, reference, salt)) for reference in beside]
    await asyncio.sleep(HEAD_START_S)
    body = {**target.case.body, "cache_salt": salt}
    tasks.append(asyncio.create_task(ask(pair.client, target.case.path, body, strike)))
    awaited: set[asyncio.Future[Any]] = {fell, tasks[-1]}
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
    return tasks, fell.result() if fell.done() else None


async def _ask(pair: Pair, reference: Reference, salt: str) -> Asked:
    return await ask(pair.client, reference.case.path, {**reference.case.body, "cache_salt": salt})


async def _after(pair: Pair, config: ChaosConfig, blow: Blow) -> float | None:
    """Let the victim live again; for a gateway, once the engine has let go of its requests."""
    match blow:
        case Blow.ENGINE_KILL:
            pair.engine.kill()
            pair.engine.start()
        case Blow.ENGINE_STOP:
            await asyncio.sleep(config.stop_s)
            pair.engine.signal(signal.SIGCONT)
        case Blow.GATEWAY_KILL:
            freed_s = await pair.idle_within(FREED_WITHIN_S)
            pair.gateway.kill()
            pair.gateway.start()
            return freed_s
    return None


def _found(chosen: Sequence[Reference], asked: Sequence[Asked]) -> list[str]:
    found = []
    for reference, one in zip(chosen, asked, strict=True):
        texts = [one.failure] if one.answer is None else map(str, differences(reference.answer, one.answer))
        found += [f"{reference.case.name}: {text}" for text in texts]
    return found


def table(report: Report) -> str:
    """Markdown: what was struck, and which options the compared answers had."""
    lines = ["| blow | times | answers | choices resumed | differences | longest pause, median and most (s) |"]
    lines.append("|---|---|---|---|---|---|")
    for blow in Blow:
        struck = [each for each in report.blows if each.blow is blow]
        if not struck:
            continue
        gateway = blow is Blow.GATEWAY_KILL
        pauses = distribution(each.freed_s or 0.0 if gateway else each.longest_pause_s for each in struck)
        assert pauses is not None
        lines.append(
            f"| {blow} | {len(struck)} | {'lost with it' if gateway else sum(len(each.cases) for each in struck)} "
            f"| {sum(each.num_resumed for each in struck)} | {sum(len(each.differences) for each in struck)} "
            f"| {pauses.p50:.2f}, {pauses.max:.2f}{' until its blocks were free' if gateway else ''} |"
        )
    for axis, options in report.options.items():
        lines.append(f"\n{axis}: " + ", ".join(f"{option} {count}" for option, count in options.items()))
    found = [f"- {each.blow} at token {each.at_token}: {text}" for each in report.blows for text in each.differences]
    return "\n".join([*lines, *(["", *found] if found else [])]) + "\n"

"""A choice without any wire: what carries it, how its text is made and read."""

from __future__ import annotations

import asyncio
from array import array

from gateway.generation import Generation
from gateway.stream import Choice, Delta
from protocol.messages import AbortReason
from protocol.sampling import SamplingParams
from tests.gateway.scripted_engine import EOS, request


class Carrier:
    def __init__(self) -> None:
        self.left: list[AbortReason] = []

    def leave(self, reason: AbortReason) -> None:
        self.left.append(reason)


class Halves:
    """Two tokens make a letter, as the bytes of a character do."""

    next_json = None

    def __init__(self, prompt_ids: array[int]) -> None:
        self._half: int | None = None

    def push(self, token_id: int) -> str:
        if self._half is None:
            self._half = token_id
            return ""
        letter, self._half = chr(ord("a") + self._half), None
        return letter

    def finish(self) -> str:
        return "" if self._half is None else "\ufffd"


def one(**fields: object) -> tuple[Generation, Choice, Carrier]:
    generation = Generation(request(**fields), (EOS,))
    carrier = Carrier()
    generation.choices[0].carried_by(carrier)
    return generation, generation.choices[0], carrier


def sampling(**fields: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 100} | fields))  # type: ignore[arg-type]


async def take(generation: Generation) -> Delta:
    delta = await asyncio.wait_for(generation.next(), 1)
    assert delta is not None
    return delta

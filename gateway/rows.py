"""Rows of logprobs as they come, collected for one choice."""

from __future__ import annotations

from array import array

from protocol.messages import F32, U32, Logprobs
from protocol.sampling import SamplingParams


class Gap(Exception):
    """Something was skipped on the way: the link that brought this frame cannot be trusted."""


def no_rows(sampling: SamplingParams) -> Logprobs | None:
    """To collect those of generated tokens, as wide as asked; None when nobody asked."""
    return None if sampling.logprobs is None else _empty(sampling.logprobs)


def no_prompt_rows(sampling: SamplingParams) -> Logprobs | None:
    """To collect those of the prompt, as wide as they come: the wire carries at least one alternative."""
    return None if sampling.prompt_logprobs is None else _empty(max(sampling.prompt_logprobs, 1))


def append_row(to: Logprobs, rows: Logprobs, at: int) -> None:
    """Row `at` of a frame, which is as wide as the widest asked for in it, cut to what this choice asked."""
    if rows.k < to.k:
        raise Gap(f"logprobs came with {rows.k} alternatives where {to.k} were asked")
    start = at * rows.k
    to.own.append(rows.own[at])
    to.rank.append(rows.rank[at])
    to.top_ids.extend(rows.top_ids[start : start + to.k])
    to.top.extend(rows.top[start : start + to.k])


def append_rows(to: Logprobs, rows: Logprobs, start: int) -> None:
    """Rows from `start` on, of which a frame may have thousands; nearly always just as wide as asked."""
    k = to.k
    if rows.k != k:
        for at in range(start, len(rows.own)):
            append_row(to, rows, at)
        return
    to.own.extend(rows.own[start:])
    to.rank.extend(rows.rank[start:])
    to.top_ids.extend(rows.top_ids[start * k :])
    to.top.extend(rows.top[start * k :])


def _empty(k: int) -> Logprobs:
    return Logprobs(k, array(F32), array(U32), array(U32), array(F32))

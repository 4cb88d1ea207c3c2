"""Values that clients and peers should not send, and some that they may."""

from __future__ import annotations

import random
from typing import Any

_FIXED: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    127,
    128,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32 - 1,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63),
    -(2**63) - 1,
    2**64 - 1,
    2**64,
    10**400,
    0.0,
    -0.0,
    0.5,
    1.0,
    2.0,
    1e-320,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    " ",
    "0",
    "1",
    "true",
    "null",
    "NaN",
    "stop",
    "a" * 300,
    "a" * 70_000,
    "\x00",
    "\x00\x01\x1f\x7f",
    "\ud83d",
    "a\udc00b",
    "\U0001f336",
    "‮​",
    "<|im_end|>",
    "{{ 7 * 7 }}{% raise %}",
    "../../etc/passwd",
    [],
    [[]],
    [None],
    [0],
    [-1],
    [2**32],
    [0.5],
    [True],
    ["a"],
    ["", ""],
    ["a", 1],
    [[1], ["a"]],
    [{}],
    list(range(3000)),
    ["x"] * 3000,
    {},
    {"": ""},
    {"a": {"b": {"c": [1, {"d": None}]}}},
    {"0": 1e9},
    {"type": "text"},
    {"type": "json_object"},
    {"include_usage": "yes"},
    {str(number): 1 for number in range(2000)},
)


def odd_value(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.8:
        return rng.choice(_FIXED)
    if kind < 0.9:
        return rng.randint(-(2**70), 2**70)
    return {rng.choice(("a", "role", "content", "type", "function")): rng.choice(_FIXED) for _ in range(3)}

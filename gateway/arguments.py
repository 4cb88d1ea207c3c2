"""Unknown keyword arguments of the Python interface: an error that names the nearest."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def names_nearest(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """`function`, with a TypeError for an unknown keyword argument that says which one may be meant."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    owner = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name in kwargs:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(names)}."
                raise TypeError(f"{owner}() has no argument {name!r}; {hint}")
        return function(*args, **kwargs)

    return checked

"""The bar that a person sees."""

from __future__ import annotations

import io

import pytest

from protocol.process import Progress
from protocol.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_draws_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    bar = ProgressBar()
    bar.show("engine", Progress("preparing kernels", 0, 0))
    bar.show("engine", Progress("loading weights", 5_000_000, 20_000_000))
    bar.close()
    drawn = terminal.getvalue()
    bar.show("engine", Progress("loading weights of the next life", 0, 0))
    assert terminal.getvalue() == drawn
    assert "preparing kernels ..." in terminal.getvalue()
    assert "loading weights:  25%|" in terminal.getvalue()
    assert "| 5.00M/20.0M [" in terminal.getvalue()


def test_the_bar_draws_nothing_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar()
    bar.show("engine", Progress("loading weights", 1, 2))
    bar.close()
    assert capsys.readouterr().err == ""


def test_a_bar_that_nobody_wants_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    bar = ProgressBar(wanted=False)
    bar.show("engine", Progress("loading weights", 1, 2))
    bar.close()
    assert not bar.draws
    assert terminal.getvalue() == ""

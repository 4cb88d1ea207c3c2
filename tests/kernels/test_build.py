import ctypes
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.cpu import build


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in compiler that is quick: it notes each call and writes its output file; `fail` makes it fail."""
    script = tmp_path / "compiler"
    script.write_text(
        "#!/bin/sh\n"
        f'echo "$*" >> {tmp_path}/calls\n'
        '[ "$1" = --version ] && { echo "compiler 1.0"; exit 0; }\n'
        f"[ -e {tmp_path}/fail ] && {{ echo 'no such register' >&2; exit 1; }}\n"
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo built > "$2"; shift; done\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(ctypes, "CDLL", Path)
    return tmp_path


def _builds(folder: Path) -> int:
    return sum("-shared" in line for line in (folder / "calls").read_text().splitlines())


def test_builds_once_and_leaves_nothing_else(compiler: Path) -> None:
    cache = compiler / "cache" / "kernels"
    first, second = build.load(cache), build.load(cache)
    assert first == second
    assert _builds(compiler) == 1
    assert sorted(path.name for path in cache.iterdir()) == sorted(["lock", Path(str(first)).name])
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_several_at_once_build_once(compiler: Path) -> None:
    cache = compiler / "cache"
    with ThreadPoolExecutor(4) as callers:
        paths = list(callers.map(lambda _: build.load(cache), range(4)))
    assert len(set(paths)) == 1
    assert _builds(compiler) == 1


def test_another_compiler_or_cpu_is_another_library(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = compiler / "cache"
    first = build.load(cache)
    monkeypatch.setattr(build, "_cpu_flags", lambda: "flags: sse2")
    second = build.load(cache)
    script = Path(os.environ["CXX"])
    script.write_text(script.read_text().replace("compiler 1.0", "compiler 2.0"))
    third = build.load(cache)
    assert len({first, second, third}) == 3


def test_a_failed_build_says_what_the_compiler_said_and_leaves_no_library(compiler: Path) -> None:
    (compiler / "fail").touch()
    cache = compiler / "cache"
    with pytest.raises(build.BuildError, match="no such register"):
        build.load(cache)
    assert [path.name for path in cache.iterdir()] == ["lock"]
    (compiler / "fail").unlink()
    assert Path(str(build.load(cache))).exists()


def test_a_folder_that_cannot_be_written_is_named(compiler: Path) -> None:
    (compiler / "file").touch()
    with pytest.raises(build.BuildError, match=f"{compiler}/file/kernels"):
        build.load(compiler / "file" / "kernels")


def test_no_compiler_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler \(g\+\+, c\+\+, clang\+\+\) on PATH"):
        build.load(tmp_path)


def test_the_default_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert build.default_cache_dir() == Path("/somewhere/sluicegate/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.default_cache_dir() == Path.home() / ".cache/sluicegate/kernels"

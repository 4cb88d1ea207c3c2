import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import kernels
from kernels import Implementation, check

#: Runs operators in a process of its own, as the compiler is looked for once in a process.
PROGRAM = """
import logging, sys
from pathlib import Path
logging.basicConfig(format="%(levelname)s %(message)s")
import torch, kernels
print(kernels.start(cache_dir=Path(sys.argv[1])).value)
kernels.start(cache_dir=Path(sys.argv[1]))
packed = kernels.pack_linear(torch.ones(3, 4))
print(kernels.linear(torch.ones(2, 4), packed).tolist())
print(kernels.numerics_name())
"""


def _run(cache_dir: Path, cxx: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"CXX": cxx}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(cache_dir)],
        env=environ,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


@pytest.mark.parametrize(
    ("cxx", "reason"),
    [("/nonexistent", "CXX names '/nonexistent', which is not an executable command"), ("false", "false --version")],
)
def test_without_a_compiler_the_references_run_with_one_warning(tmp_path: Path, cxx: str, reason: str) -> None:
    done = _run(tmp_path, cxx)
    implementation, result, numerics = done.stdout.splitlines()
    assert implementation == "reference"
    assert result == "[[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]"
    assert numerics.startswith(f"reference-{kernels.NUMERICS} torch-{torch.__version__}")
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert "plain torch, several times slower" in warnings[0]
    assert reason in warnings[0]


def test_native_can_be_insisted_on(tmp_path: Path) -> None:
    program = "import kernels, pathlib; kernels.start(kernels.Implementation.NATIVE, pathlib.Path('.'))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"CXX": "/nonexistent", "PYTHONPATH": str(Path(__file__).parents[2])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "BuildError: CXX names '/nonexistent'" in done.stderr


def test_the_choice_can_change_while_running(native: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert kernels.start(Implementation.REFERENCE) is Implementation.REFERENCE
        assert kernels.numerics_name().startswith("reference-")
        assert not kernels.pack_linear(torch.zeros(3, 4)).in_panels
        assert kernels.start() is Implementation.NATIVE
        assert kernels.numerics_name().startswith(f"native-{kernels.NUMERICS} -std=c++20")
        assert kernels.pack_linear(torch.zeros(3, 4)).in_panels
    assert caplog.records == []


def test_the_native_operators_have_threads_and_the_references_one(implementation: Implementation) -> None:
    for count in (2, 3, 1):
        kernels.set_num_threads(count)
        assert kernels.num_threads() == (count if implementation is Implementation.NATIVE else 1)
    with pytest.raises(ValueError, match="number of threads must be at least 1, got 0"):
        kernels.set_num_threads(0)


def test_the_callers_rounding_mode_changes_no_bit(native: None) -> None:
    x, packed = torch.full((40, 64), 1e-30), kernels.pack_linear(torch.full((48, 64), 1e-12))
    kernels.set_num_threads(2)
    expected = kernels.linear(x, packed)
    assert 0 < float(expected[0, 0]) < torch.finfo(torch.float32).tiny
    assert torch.set_flush_denormal(True)
    try:
        flushed = kernels.linear(x, packed)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed, expected)


def test_operators_may_be_called_from_several_threads(native: None) -> None:
    kernels.set_num_threads(3)
    x, packed = torch.randn(32, 200), kernels.pack_linear(torch.randn(500, 200))
    expected = kernels.linear(x, packed)

    def repeat(_: int) -> bool:
        return all(torch.equal(kernels.linear(x, packed), expected) for _ in range(100))

    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(repeat, range(8)))


def test_the_check_at_the_start_passes(implementation: Implementation) -> None:
    kernels.self_check()


def test_the_check_names_the_shape_that_fails(implementation: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    def unstable(x: torch.Tensor, packed: kernels.PackedLinear) -> torch.Tensor:
        return kernels.linear(x, packed) * (1 + 2**-20 * x.shape[0])

    monkeypatch.setattr(check, "linear", unstable)
    with pytest.raises(RuntimeError, match=r"other bits in a batch of 1 than in one of 17 \(weight 256 x 192\)"):
        check.self_check()

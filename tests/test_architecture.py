"""The import rules and the bans of DESIGN.md, read off the source of every package."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from protocol import metrics

ROOT = Path(__file__).parents[1]
OURS = ("engine", "gateway", "kernels", "loadtest", "protocol", "sluicegate", "sluicegate_serve")
DEVICE_FOLDERS = ("device", "layers", "models", "quant", "loading")

#: Who may import which of our packages.
MAY_IMPORT = {
    "protocol": {"protocol"},
    "kernels": {"kernels"},
    "loadtest": {"loadtest", "sluicegate"},
    "gateway": {"gateway", "protocol"},
    "engine": {"engine", "protocol", "kernels"},
    "sluicegate": {"gateway", "protocol"},  # the former for type checkers alone
    "sluicegate_serve": {"engine", "gateway", "protocol"},
}

#: Packages of others that must not be imported.
BANNED = {
    "protocol": {"torch", "triton", "numpy", "zmq", "starlette", "uvicorn", "transformers"},
    "kernels": {"zmq", "transformers", "pydantic"},
    "loadtest": {"torch", "transformers", "zmq"},
    "gateway": {"torch", "triton", "safetensors"},
    "engine": {"starlette", "uvicorn", "sse_starlette"},
    "sluicegate": {"torch", "pydantic", "asyncio"},
    "sluicegate_serve": {"torch", "zmq", "transformers"},
}

#: The only files that may import these.
ONLY_IN = {
    "zmq": {"gateway/dealer.py", "engine/server.py"},
    "triton": {"kernels/_triton.py", "kernels/_gluon.py"},
}

#: An engine never tokenizes: what reads a model's folder makes tokenizer.json and sees whether it loads.
TOKENIZER_READERS = ("engine/loading/", "engine/preflight/tokenizer.py")

#: The only files that may read the environment: ours there, and a compiler's own variable here.
ENVIRONMENT_READERS = {"protocol/config.py", "kernels/cpu/build.py"}

#: Modules that build objects, or run code, out of data.
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


def sources() -> list[Path]:
    files = [ROOT / "sluicegate.py", ROOT / "sluicegate_serve.py"]
    for package in OURS:
        files += sorted((ROOT / package).rglob("*.py"))
    return files


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[str]:
    """Full names of all modules a file imports, wherever in the file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module
            # `from engine import plan` imports engine.plan; that it may be no module does no harm.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_control_plane(path: Path) -> bool:
    """Whether a file is directly in engine/, or of the backend that has no device."""
    return path.parent == ROOT / "engine" or name_of(path).startswith("engine/backends/fake")


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_imports_keep_to_the_rules(path: Path) -> None:
    package = package_of(path)
    for module in imports_of(path):
        top = module.partition(".")[0]
        if top in OURS:
            assert top in MAY_IMPORT[package], f"{package} must not import {module}"
        assert top not in BANNED[package], f"{package} must not import {module}"
        assert top not in UNSAFE_MODULES, module
        if top in ONLY_IN:
            assert name_of(path) in ONLY_IN[top], f"{top} is imported in {sorted(ONLY_IN[top])} alone"
        if top == "tokenizers" and package == "engine":
            assert name_of(path).startswith(TOKENIZER_READERS)
        if top == "transformers" and package == "engine":
            assert name_of(path).startswith("engine/backends/transformers")


@pytest.mark.parametrize("path", [path for path in sources() if is_control_plane(path)], ids=name_of)
def test_the_control_plane_reaches_no_device(path: Path) -> None:
    for module in imports_of(path):
        top, _, rest = module.partition(".")
        assert top not in {"torch", "triton", "kernels", "safetensors"}, module
        if top == "engine":
            assert rest.partition(".")[0] not in DEVICE_FOLDERS, module
            assert not rest.startswith(("backends.torch_runner", "backends.transformers")), module


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_no_file_runs_data_or_hides_errors(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        where = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in UNSAFE_CALLS, where
        if isinstance(node, ast.keyword):
            assert node.arg != "trust_remote_code", where
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (isinstance(node.type, ast.Name) and node.type.id.endswith("Exception"))
            assert not (broad and all(isinstance(line, ast.Pass) for line in node.body)), f"{where} swallows all errors"


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_the_environment_is_read_in_two_places_alone(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            reads = node.attr in {"environ", "getenv", "putenv"}
            assert not reads or name_of(path) in ENVIRONMENT_READERS, f"{name_of(path)}:{node.lineno}"


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a program for the device: its loop cannot be cut in parts that run apart."""
    return any(ast.unparse(decorator).partition("(")[0].endswith("jit") for decorator in function.decorator_list)


@pytest.mark.parametrize("path", sources(), ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= 400
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{node.name} in {name_of(path)}"


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after a statement."""
    program = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def modules_in(folder: Path) -> list[str]:
    return [f"{folder.name}.{path.stem}" for path in sorted(folder.glob("*.py")) if not path.stem.startswith("__")]


def test_a_gateway_loads_no_torch() -> None:
    loaded = loaded_after("import gateway.__main__, gateway.app")
    assert not loaded & {"torch", "triton", "kernels", "engine"}
    assert "starlette" in loaded


def test_the_control_plane_loads_no_torch() -> None:
    modules = [*modules_in(ROOT / "engine"), "engine.__main__", "engine.backends.fake"]
    loaded = loaded_after(f"import {', '.join(modules)}")
    assert not loaded & {"torch", "triton", "kernels", "starlette", "gateway"}


def test_the_front_door_and_serve_load_only_what_they_need() -> None:
    assert not loaded_after("import sluicegate") & {"torch", "pydantic", "asyncio", "engine", "gateway"}
    assert not loaded_after("import sluicegate_serve") & {"torch", "transformers", "uvicorn"}


@pytest.mark.parametrize("row", metrics.TABLE, ids=lambda row: f"{row.owner}:{row.name}")
def test_every_metric_is_observed_by_its_owner(row: metrics.Metric) -> None:
    texts = {
        node.value
        for path in (ROOT / row.owner).rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert row.name in texts

"""The house keeps its shape: imports run downwards, what must be light stays free of torch, no file outgrows its room."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "openk3"
FILES = sorted(PACKAGE.rglob("*.py"))

# Which rooms a room may import from. `config` is every file that holds configs; errors may be imported from anywhere.
CONFIG_FILES = {"config", "config_rules", "named", "release_config", "release_keys", "strict_json"}
_MODEL = {"ops", "config", "accounting"}
_CHECKPOINT = {"model"} | _MODEL
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "config": set(),
    "accounting": {"config"},
    "ops": {"config"},
    "text": {"config"},
    "model": _MODEL,
    "parallel": _CHECKPOINT,
    "checkpoint": _CHECKPOINT,
    "train": {"checkpoint", "parallel", "text"} | _CHECKPOINT,
    "engine": {"checkpoint", "text"} | _CHECKPOINT,
    "server": {"engine", "checkpoint", "text"} | _CHECKPOINT,
    "insight": {"config", "accounting"},
    "bench": {"train", "engine", "checkpoint", "text"} | _CHECKPOINT,
    "commands": {"bench", "insight", "server", "train", "engine", "checkpoint", "text"} | _CHECKPOINT,
    "cli": {"commands"},
    "__main__": {"cli"},
    "__init__": {"checkpoint", "text"} | _CHECKPOINT,
}
# `from openk3 import __version__` is no import of a room.
ROOT_NAMES = {"__version__"}

WITHOUT_TORCH = ("openk3", "openk3.cli", "openk3.errors", "openk3.config", "openk3.named", "openk3.release_config", "openk3.accounting")

LONGEST = 450

# Written so that this file does not hold what it forbids.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|Not" r"ImplementedError)\b")
MACHINE_PATHS = re.compile(r"(?<![\w.$}])/(?:ho" r"me|ro" r"ot|tm" r"p|wo" r"rk|Users)/\w")


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "config" if parts[0] in CONFIG_FILES else parts[0]


def room_of_module(module: str) -> str:
    parts = module.split(".")
    return "__init__" if len(parts) == 1 else "config" if parts[1] in CONFIG_FILES else parts[1]


def imported_modules(tree: ast.AST) -> list[tuple[int, str]]:
    """Every module of openk3 that a file imports, anywhere in it, with the line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            if node.module == "openk3":
                found += [(node.lineno, f"openk3.{alias.name}") for alias in node.names if alias.name not in ROOT_NAMES]
            else:
                found.append((node.lineno, node.module or ""))
    return [(line, module) for line, module in found if module == "openk3" or module.startswith("openk3.")]


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_imports_run_downwards(path: Path) -> None:
    room = room_of(path)
    assert room in MAY_IMPORT, f"{path.name} opens a room that this test does not know"
    allowed = MAY_IMPORT[room] | {room, "errors"}
    wrong = [(line, module) for line, module in imported_modules(ast.parse(path.read_text())) if room_of_module(module) not in allowed]
    assert not wrong, f"{room} may import from {sorted(allowed)} only"


def test_the_check_sees_an_upward_import() -> None:
    tree = ast.parse("def f():\n from openk3.train.loop import train\n import openk3.ops.kda\n from openk3 import __version__, config\n")
    assert imported_modules(tree) == [(2, "openk3.train.loop"), (3, "openk3.ops.kda"), (4, "openk3.config")]
    assert room_of_module("openk3.train.loop") == "train" and "train" not in MAY_IMPORT["ops"]


def test_train_and_engine_do_not_know_each_other() -> None:
    assert "engine" not in MAY_IMPORT["train"] and "train" not in MAY_IMPORT["engine"]


def test_light_modules_do_not_import_torch() -> None:
    code = f"import sys, importlib\nfor name in {WITHOUT_TORCH!r}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("path", FILES, ids=names(FILES))
def test_no_file_outgrows_its_room(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST


def test_nothing_is_left_unfinished_or_tied_to_a_machine() -> None:
    files = [*FILES, *sorted((ROOT / "tests").rglob("*.py"))]
    files += [ROOT / name for name in ("README.md", "Makefile", "pyproject.toml", "constraints.txt", ".ci/run")]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if UNFINISHED.search(line) or MACHINE_PATHS.search(line)
    ]
    assert not found

"""The command line: help is quick and light, every mistake is one line with the right exit code."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from openk3 import __version__, cli
from openk3.errors import UserError


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "openk3", *arguments], capture_output=True, text=True, timeout=60)


def verb_that(monkeypatch: pytest.MonkeyPatch, main: Callable[[list[str]], int]) -> None:
    """Make `openk3 demo` run `main`."""
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: SimpleNamespace(main=main))


def test_help_is_quick_and_lists_every_verb() -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = run("--help")
        seconds.append(time.perf_counter() - start)
    assert done.returncode == 0 and done.stderr == ""
    for name, verb in cli.verbs().items():
        assert f"  {name} " in done.stdout and verb.summary in done.stdout
    assert "openk3 generate runs/demo --prompt" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert min(seconds) < 0.5


def test_help_imports_no_verb_and_no_torch() -> None:
    code = (
        "import sys; from openk3.cli import main; code = main(['--help']);"
        "heavy = [m for m in sys.modules if m.startswith('openk3.commands') or m in ('torch', 'numpy', 'rich', 'tyro')];"
        "sys.exit(code or bool(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize("name", list(cli.verbs()))
def test_each_verb_exists_and_says_what_it_does(name: str) -> None:
    source = cli.importlib.import_module(cli.verbs()[name].module)
    assert callable(source.main) and source.SUMMARY


@pytest.mark.parametrize("name", list(cli.verbs()))
def test_each_verb_has_help_with_an_example(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"openk3 {name}" in done.stdout


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"openk3 {__version__}\n")


def test_no_verb_prints_the_help_and_fails() -> None:
    done = run()
    assert done.returncode == 2 and "Usage: openk3 VERB" in done.stdout


@pytest.mark.parametrize(("typed", "answer"), [("gnerate", "did you mean `openk3 generate`?"), ("qqq", "`openk3 --help` lists them")])
def test_an_unknown_verb_gets_a_suggestion(typed: str, answer: str) -> None:
    done = run(typed)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"openk3: error: there is no verb {typed!r}; {answer}\n"


def test_a_user_error_is_one_line_on_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: list[str]) -> int:
        raise UserError(f"{argv[0]}: not\na checkpoint")

    verb_that(monkeypatch, main)
    assert cli.main(["demo", "x"]) == 2
    assert capsys.readouterr() == ("", "openk3 demo: error: x: not a checkpoint\n")


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: list[str]) -> int:
        raise KeyboardInterrupt

    verb_that(monkeypatch, main)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err.strip() == "openk3 demo: stopped"


def test_a_fault_is_one_line_unless_the_debug_variable_asks_for_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(argv: list[str]) -> int:
        raise RuntimeError("size\nmismatch")

    verb_that(monkeypatch, main)
    monkeypatch.delenv("OPENK3_DEBUG", raising=False)
    assert cli.main(["demo"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "unexpected RuntimeError: size mismatch" in line and "OPENK3_DEBUG=1" in line
    monkeypatch.setenv("OPENK3_DEBUG", "1")
    with pytest.raises(RuntimeError, match="size"):
        cli.main(["demo"])


@pytest.mark.parametrize(("stop", "code"), [(SystemExit(0), 0), (SystemExit(), 0), (SystemExit(3), 3), (SystemExit("no"), 1)])
def test_a_verb_that_exits_gives_its_code(monkeypatch: pytest.MonkeyPatch, stop: SystemExit, code: int) -> None:
    def main(argv: list[str]) -> int:
        raise stop

    verb_that(monkeypatch, main)
    assert cli.main(["demo"]) == code


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """`openk3 … | head -1`: what is written after the reader has gone is lost without a word."""
    code = (
        "import sys, openk3.cli as cli\n"
        "def main(argv):\n"
        "    for _ in range(100_000): print('a line that fills the pipe')\n"
        "    return 0\n"
        "cli.importlib.import_module = lambda name: type('verb', (), {'main': staticmethod(main)})\n"
        "sys.exit(cli.main(['demo']))\n"
    )
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=stderr)
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.stdout.close()
        assert writer.wait(timeout=60) == 0
    assert errors.read_text() == ""

"""`openk3 VERB …`: finds the verb's module, imports it only then, and turns what goes wrong into one line.

    openk3 --help
    openk3 generate RUN --prompt "def main("

Exit codes: 0 done, 1 a fault of openk3's own, 2 something a user gave is wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from dataclasses import dataclass

from openk3 import __version__
from openk3.errors import UserError

USER_ERROR = 2
INTERRUPTED = 130


@dataclass(frozen=True)
class Verb:
    """One subcommand: `module` has `main(argv: list[str]) -> int`; `summary` is its line in the help."""

    module: str
    summary: str


VERBS: dict[str, dict[str, Verb]] = {
    "Start here": {
        "demo": Verb("openk3.commands.demo", "train a small K3 on Python's own sources, then let it write"),
    },
    "Train": {
        "train": Verb("openk3.commands.train", "train a model on text, from scratch or from a checkpoint's weights"),
        "sft": Verb("openk3.commands.sft", "fine-tune on conversations, with quantization-aware training"),
        "resume": Verb("openk3.commands.resume", "go on with a run that was stopped, bit for bit"),
        "eval": Verb("openk3.commands.eval", "loss and bits per byte of a checkpoint on texts"),
    },
    "Use": {
        "generate": Verb("openk3.commands.generate", "continue a prompt with a trained model"),
    },
    "Exchange": {
        "inspect": Verb("openk3.commands.inspect", "check a checkpoint before any compute, or count a config's tensors"),
        "convert": Verb("openk3.commands.convert", "write a run or a release in another precision"),
        "quantize": Verb("openk3.commands.quantize", "post-training quantization of the routed experts"),
    },
    "Measure": {
        "bench": Verb("openk3.commands.bench", "time openk3 beside its peers, with where each number comes from"),
    },
}

EXAMPLES = """\
  openk3 demo
  openk3 train --help
  openk3 generate runs/demo --prompt "def main("
"""


def verbs() -> dict[str, Verb]:
    """Every verb by its name, in the order of the help."""
    return {name: verb for group in VERBS.values() for name, verb in group.items()}


def help_text() -> str:
    """What `openk3 --help` prints: the verbs by group, a line each, and examples."""
    width = max(map(len, verbs()))
    lines = ["Kimi K3, the whole of it, small enough to train on a laptop.", "", "Usage: openk3 VERB [ARGUMENTS]"]
    for group, members in VERBS.items():
        lines += ["", f"{group}:"] + [f"  {name:<{width}}  {verb.summary}" for name, verb in members.items()]
    lines += ["", "`openk3 VERB --help` tells a verb's arguments; `openk3 --version` the version.", "", "Examples:", EXAMPLES]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (`| head`) has gone. Python would complain once more when it flushes stdout at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text(), end="")
        return 0 if arguments else USER_ERROR
    if arguments[0] in ("-V", "--version"):
        print(f"openk3 {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    verb = verbs().get(name)
    if verb is None:
        return _fail("openk3", f"there is no verb {name!r}; {_suggestion(name)}")
    program = f"openk3 {name}"
    try:
        return int(importlib.import_module(verb.module).main(rest))
    except UserError as error:
        return _fail(program, str(error))
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        print(f"\n{program}: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        if os.environ.get("OPENK3_DEBUG"):
            raise
        _fail(program, f"unexpected {type(error).__name__}: {error} (a fault of openk3's; OPENK3_DEBUG=1 shows where)")
        return 1


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), verbs(), n=1, cutoff=0.5)
    return f"did you mean `openk3 {near[0]}`?" if near else "`openk3 --help` lists them"


def _fail(program: str, message: str) -> int:
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)
    return USER_ERROR

"""`openk3 generate RUN --prompt …`: continue a prompt, token by token, on stdout; what it took on stderr."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from openk3.commands import _base
from openk3.errors import UserError

if TYPE_CHECKING:
    from openk3.engine.sampler import SamplingParams
    from openk3.engine.session import Session, TextCompletion, TextGeneration

SUMMARY = "continue a prompt with a trained model"
INTERRUPTED = 130
EXAMPLES = (
    'openk3 generate runs/demo --prompt "def main("',
    'openk3 generate runs/demo --prompt "class " --temperature 0 --stop "def "',
    'openk3 generate runs/demo-chat --chat --prompt "def double(x):"',
    "openk3 generate runs/demo --prompt-file - --max-tokens 400 < start.py",
)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of `openk3 generate`."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A run directory (its newest checkpoint is used) or a checkpoint directory."""
    prompt: str | None = None
    """The text to continue. None and no --prompt-file: start from nothing. Control tokens in it are plain text."""
    prompt_file: str | None = None
    """Read the prompt from this UTF-8 file; "-" is stdin."""
    chat: bool = False
    """The prompt is a user's message; a model fine-tuned on conversations answers it."""
    max_tokens: int = 200
    """Stop after so many new tokens."""
    temperature: float = 0.8
    """0 always takes the likeliest token."""
    top_k: int = 0
    """Draw from the k likeliest tokens; 0 from all."""
    top_p: float = 0.95
    """Then from the fewest of them that hold this share of the probability."""
    min_p: float = 0.0
    """Then from those at least this share as likely as the likeliest."""
    seed: int = 0
    """The same seed gives the same text."""
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """End before this text; may be given several times."""
    json: bool = False
    """Print one JSON object at the end instead of the text as it comes."""
    dtype: Literal["stored", "float32", "bfloat16", "float64"] = "stored"
    """Precision of the weights while it runs."""


def main(argv: list[str]) -> int:
    """Run the verb; returns the exit code."""
    arguments = _base.parse(
        Arguments, argv, verb="generate", description=SUMMARY, examples=EXAMPLES, markers=(tyro.conf.FlagCreatePairsOff,)
    )
    prompt = _prompt(arguments)
    from openk3.engine.sampler import SamplingParams

    params = SamplingParams(
        temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p, min_p=arguments.min_p, seed=arguments.seed
    )
    if arguments.max_tokens < 0:
        raise UserError(f"--max-tokens is {arguments.max_tokens}; it must be 0 or more")
    session = _open(arguments)
    if session.ends.disagreement:
        print(f"openk3 generate: note: {session.ends.disagreement}", file=sys.stderr)
    with _interruptible() as interrupted:
        made = _write(session, prompt, params, arguments, interrupted)
    _report(made, params)
    return INTERRUPTED if interrupted.is_set() else 0


def _open(arguments: Arguments) -> Session:
    import torch

    from openk3.engine.session import Session

    dtype = None if arguments.dtype == "stored" else getattr(torch, arguments.dtype)
    return Session.open(arguments.run, dtype=dtype)


def _write(session: Session, prompt: str, params: SamplingParams, arguments: Arguments, interrupted: threading.Event) -> TextGeneration:
    """Generate, showing text as it comes unless one JSON object is asked for."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper):
        out.reconfigure(encoding="utf-8")
    terminal = out.isatty() and not arguments.json

    def show(_: int, piece: str) -> None:
        out.write(piece)
        out.flush()

    if terminal and prompt and not arguments.chat:
        out.write(f"\x1b[2m{prompt}\x1b[0m")
        out.flush()
    made = session.complete(
        [prompt],
        params,
        max_tokens=arguments.max_tokens,
        stops=arguments.stop,
        chat=arguments.chat,
        on_text=None if arguments.json else show,
        cancelled=interrupted.is_set,
    )
    if arguments.json:
        print(json.dumps(_as_json(session, made, params), ensure_ascii=False), file=out)
    elif terminal and not made.completions[0].text.endswith("\n"):
        out.write("\n")
    out.flush()
    return made


def _as_json(session: Session, made: TextGeneration, params: SamplingParams) -> dict[str, object]:
    done: TextCompletion = made.completions[0]
    return {
        "prompt": done.prompt,
        "text": done.text,
        "finish_reason": done.tokens.finish_reason,
        "stop": done.stop if done.stop is not None else done.tokens.stop_id,
        "prompt_ids": list(done.prompt_ids),
        "ids": list(done.tokens.ids),
        "logprobs": list(done.tokens.logprobs),
        "params": asdict(params),
        "timing": asdict(made.timing) | {"prefill_tokens_per_s": made.timing.prefill_rate, "decode_tokens_per_s": made.timing.decode_rate},
        "state_bytes": made.state_bytes,
        "end_tokens": {name: list(ids) for name, ids in session.ends.stated.items()},
        "checkpoint": str(session.checkpoint),
    }


def _report(made: TextGeneration, params: SamplingParams) -> None:
    timing, done = made.timing, made.completions[0]
    reason = done.tokens.finish_reason + (f" ({done.stop!r})" if done.stop is not None else "")
    print(
        f"prefill {timing.prompt_tokens} tokens at {timing.prefill_rate:,.0f}/s · decode {len(done.tokens.ids)} tokens at "
        f"{timing.decode_rate:,.0f}/s · ended by {reason}" + ("" if params.greedy else f" · seed {params.seed}"),
        file=sys.stderr,
    )


def _prompt(arguments: Arguments) -> str:
    if arguments.prompt_file is None:
        return arguments.prompt or ""
    if arguments.prompt is not None:
        raise UserError("give --prompt or --prompt-file, not both")
    source = "stdin" if arguments.prompt_file == "-" else arguments.prompt_file
    try:
        raw = sys.stdin.buffer.read() if arguments.prompt_file == "-" else Path(arguments.prompt_file).read_bytes()
    except OSError as error:
        raise UserError(f"the prompt cannot be read from {source}: {error.strerror}") from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt in {source} is not UTF-8 text (byte {error.start})") from None


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Within: the first Ctrl-C sets the event, so that what was produced is kept; a second one interrupts as usual."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)

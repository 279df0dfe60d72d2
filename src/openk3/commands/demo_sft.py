"""The demo's second stage: fine-tuning on questions about code, plain and with quantization-aware training, and what each loses."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from openk3.train.config import TrainConfig
    from openk3.train.events import OnEvent
    from openk3.train.loop import RunResult

SEED_OF_SAMPLE = 1
SAMPLE_TOKENS = 120
_LEAST_STEPS = 10


@dataclass(frozen=True)
class Stage:
    """What the second stage came to. Losses in nats a token, over the held-out conversations."""

    run: Path
    """Fine-tuned with quantization-aware training."""
    plain: Path
    """Fine-tuned for as many steps without it."""
    exported: Path
    """The first, packed."""
    losses: dict[str, float]
    packed_bytes: int
    plain_bytes: int
    question: str
    answer: str
    finished: bool = True


def fine_tune(base: RunResult, recipe: TrainConfig, minutes: float, on_event: OnEvent) -> Stage | RunResult:
    """Fine-tune `base` twice for about `minutes` together; returns the run that was stopped, if one was.

    Raises UserError when the sources give no conversations or a directory is in the way.
    """
    from openk3.text.code_conversations import write_conversations
    from openk3.text.corpus import standard_library
    from openk3.train.loop import RunResult, train

    chats = base.run / "conversations.jsonl"
    write_conversations(standard_library(), chats)
    # As many steps for both: only then is the difference between them the rounding's.
    rate = base.tokens / max(base.seconds, 1e-9)
    steps = max(_LEAST_STEPS, int(minutes / 2 * 60 * rate / recipe.data.tokens_per_batch))
    runs = []
    for name, experts in (("plain", "none"), ("chat", "mxfp4")):
        config = _settings(recipe, base, str(chats), steps, experts)
        result = train(config, base.run.with_name(f"{base.run.name}-{name}"), on_event=on_event)
        if not result.finished:
            return result
        runs.append(result)
    plain, chat = runs
    assert isinstance(chat, RunResult)
    return measure(plain.run, chat.run, base.run.with_name(f"{base.run.name}-exported"))


def _settings(recipe: TrainConfig, base: RunResult, chats: str, steps: int, experts: str) -> TrainConfig:
    from openk3.train.config import ModelSettings, QuantizationSettings, ScheduleSettings

    assert experts in ("none", "mxfp4")
    return dataclasses.replace(
        recipe,
        model=ModelSettings(),
        start_from=str(base.run),
        data=dataclasses.replace(recipe.data, kind="conversations", paths=(chats,), tokenizer=None, vocab_size=None, heldout=0.05),
        schedule=ScheduleSettings(steps=steps, warmup=0.05, final=0.05),
        optimizer=dataclasses.replace(recipe.optimizer, lr=recipe.optimizer.lr / 3),
        quantization=QuantizationSettings(experts="mxfp4" if experts == "mxfp4" else "none"),
    )


def measure(plain: Path, chat: Path, exported: Path) -> Stage:
    """Held-out loss in bf16, after rounding the plain run, and of the exported run that knew; and a reply of the export."""
    from openk3.checkpoint.convert import convert

    with tempfile.TemporaryDirectory(prefix="openk3-demo-") as scratch:
        bf16 = convert(plain, Path(scratch) / "bf16", "bf16")
        convert(plain, Path(scratch) / "ptq", "mxfp4", trunk="bf16", inputs="mxfp8")
        if exported.exists():
            shutil.rmtree(exported)
        packed = convert(chat, exported, "mxfp4", trunk="bf16")
        places = {"bf16": bf16.directory, "rounded afterwards (PTQ)": Path(scratch) / "ptq", "rounded in training (QAT)": exported}
        losses = {name: heldout_loss(plain, place) for name, place in places.items()}
    question, answer = sample(plain, exported)
    return Stage(chat, plain, exported, losses, packed.nbytes, bf16.nbytes, question, answer)


def heldout_loss(run: Path, checkpoint: Path) -> float:
    """Nats a token of `checkpoint` over the conversations that `run` held out, computed in fp32 on the stored values."""
    import torch

    from openk3.checkpoint.load import load
    from openk3.train.evaluate import evaluate_part
    from openk3.train.prepare import reopen
    from openk3.train.run import RunDirectory

    with RunDirectory.open(run) as directory:
        prepared = reopen(directory.settings(), directory)
    assert prepared.heldout is not None
    data = prepared.config.data
    model = load(checkpoint, dtype=torch.float32)
    return evaluate_part(
        model,
        prepared.heldout,
        tokens_per_batch=data.tokens_per_batch,
        sequence_length=data.sequence_length,
        max_tokens=2 * prepared.config.evaluation.tokens,
    ).loss


def sample(run: Path, exported: Path) -> tuple[str, str]:
    """The first question of the conversations, and what the exported checkpoint answers."""
    import torch

    from openk3.engine.sampler import SamplingParams
    from openk3.engine.session import Session

    question = 'def area(width, height):\n    """Return the area of a rectangle."""'
    session = Session.open(exported, dtype=torch.float32)
    params = SamplingParams(temperature=0.5, top_p=0.9, seed=SEED_OF_SAMPLE)
    made = session.complete([question], params, max_tokens=SAMPLE_TOKENS, chat=True)
    return question, made.completions[0].text


def stage_summary(stage: Stage, width: int) -> RenderableType:
    """The second stage, `width` characters wide."""
    table = Table(box=box.SIMPLE_HEAD, title="fine-tuned on questions about code", title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("routed experts")
    table.add_column("held-out loss", justify="right")
    table.add_column("against bf16", justify="right")
    base = stage.losses["bf16"]
    for name, loss in stage.losses.items():
        table.add_row(name, f"{loss:.4f}", "" if name == "bf16" else f"{loss - base:+.4f}")
    size = Text(f"exported: {stage.exported}, {stage.packed_bytes:,} bytes (all in bf16: {stage.plain_bytes:,})", style="dim")
    code = Syntax(f"{stage.question}\n{stage.answer}".rstrip(), "python", theme="ansi_dark", background_color="default", word_wrap=True)
    panel = Panel(code, title="asked and answered, from the packed export", title_align="left", border_style="dim", width=min(width, 100))
    ask = json.dumps('def double(x):\n    """Return twice x."""')
    hint = Text.assemble((f"openk3 generate {stage.exported} --chat --prompt {ask}", "cyan"), ("   ask it yourself", "dim"))
    return Group(table, size, panel, hint)

"""`openk3 demo`: the main job in one command. Trains `nano` on the Python standard library's own sources, lets it write, sums it up."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from openk3.commands import _base

if TYPE_CHECKING:
    from openk3.commands.demo_summary import Findings, Sample
    from openk3.engine.session import Session
    from openk3.train.config import TrainConfig
    from openk3.train.loop import RunResult

SUMMARY = "train a small K3 on Python's own sources, then let it write"
DEFAULT_OUT = Path("runs/demo")
EXAMPLES = (
    "openk3 demo",
    "openk3 demo --minutes 30 --out runs/longer",
    "openk3 demo --show runs/demo",
)
PROMPTS = ("def ", "class ", "import ")
SAMPLE_TOKENS = 90


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of `openk3 demo`."""

    minutes: float = 4.0
    """How long to train. Preparing the text and writing samples come on top: about a minute."""
    sft_minutes: float = 1.0
    """How long to fine-tune afterwards, on questions about code, with and without quantization-aware training. 0: not at all."""
    out: str | None = None
    """The run directory to make. None: runs/demo, or runs/demo-2, … when that is taken."""
    seed: int = 0
    """Of the starting weights, the order of the texts and the samples."""
    threads: int | None = None
    """CPU threads. None: the CPUs that this process may use."""
    show: str | None = None
    """Do not train: show the summary of this run again (of one that was stopped and resumed, for instance)."""


def main(argv: list[str]) -> int:
    """Run the verb; returns the exit code."""
    arguments = _base.parse(Arguments, argv, verb="demo", description=SUMMARY, examples=EXAMPLES, markers=(tyro.conf.FlagCreatePairsOff,))
    if arguments.show is not None:
        _show(Path(arguments.show), arguments)
        return 0
    config = recipe(arguments)
    out = Path(arguments.out) if arguments.out is not None else free_directory(DEFAULT_OUT)
    if arguments.out is None and out != DEFAULT_OUT:
        print(f"{DEFAULT_OUT} holds an earlier run, which is left alone; this one goes to {out}", file=sys.stderr)

    from openk3.commands.train import report
    from openk3.train.display import Display
    from openk3.train.loop import train

    with Display() as display:
        result = train(config, out, on_event=display)
    if not result.finished:
        code = report(result)
        print(f"the summary of what it has learned: openk3 demo --show {result.run}")
        return code
    _show(result.run, arguments)
    return _fine_tune(result, config, arguments.sft_minutes) if arguments.sft_minutes > 0 else 0


def _fine_tune(base: RunResult, config: TrainConfig, minutes: float) -> int:
    """The second stage and its summary; returns the exit code."""
    from rich.console import Console

    from openk3.commands.demo_sft import Stage, fine_tune, stage_summary
    from openk3.commands.train import report
    from openk3.train.display import Display

    with Display() as display:
        stage = fine_tune(base, config, minutes, on_event=display)
    if not isinstance(stage, Stage):
        return report(stage)
    console = Console(highlight=False)
    console.print(stage_summary(stage, console.width))
    return 0


def recipe(arguments: Arguments) -> TrainConfig:
    """How the demo trains: short, so at a high learning rate and in many small steps.

    Raises UserError for settings out of range, or when this Python comes without the sources of its library.
    """
    from openk3.text.corpus import standard_library
    from openk3.train.config import (
        CheckpointSettings,
        ComputeSettings,
        DataSettings,
        EvaluationSettings,
        ModelSettings,
        ScheduleSettings,
        TrainConfig,
    )
    from openk3.train.optimizer import OptimizerConfig

    return TrainConfig(
        model=ModelSettings(name="nano"),
        data=DataSettings(paths=tuple(map(str, standard_library())), tokens_per_batch=1024, sequence_length=256, heldout=0.02),
        schedule=ScheduleSettings(minutes=arguments.minutes, warmup=0.02, final=0.05),
        optimizer=OptimizerConfig(lr=2e-2),
        compute=ComputeSettings(threads=arguments.threads),
        checkpoint=CheckpointSettings(every=200, minutes=1.0, keep=1),
        evaluation=EvaluationSettings(every=50, tokens=8192),
        seed=arguments.seed,
    )


def free_directory(wanted: Path) -> Path:
    """`wanted`, or the first of `wanted-2`, `wanted-3`, … that does not exist: a run is never written over."""
    candidates = itertools.chain([wanted], (wanted.with_name(f"{wanted.name}-{n}") for n in itertools.count(2)))
    return next(path for path in candidates if not path.exists())


def _show(run: Path, arguments: Arguments) -> None:
    """Let the run write, and print the summary."""
    from rich.console import Console

    from openk3.commands.demo_summary import summary

    console = Console(highlight=False)
    with Console(stderr=True).status("writing samples …"):
        found = findings(run, arguments)
    console.print(summary(found, console.width))


def findings(run: Path, arguments: Arguments) -> Findings:
    """What the run at `run` has become: its metrics, its held-out loss, samples. Raises UserError when it has no checkpoint yet."""
    from openk3.commands.demo_summary import Findings
    from openk3.engine.session import Session
    from openk3.train.evaluate import evaluate_part
    from openk3.train.prepare import reopen
    from openk3.train.run import Metrics, RunDirectory

    session = Session.open(run)
    with RunDirectory.open(run) as directory:
        rows = list(Metrics.read(directory.metrics))
        prepared = reopen(directory.settings(), directory)
    heldout = None
    if prepared.heldout is not None:
        data, evaluation = prepared.config.data, prepared.config.evaluation
        heldout = evaluate_part(
            session.model,
            prepared.heldout,
            tokens_per_batch=data.tokens_per_batch,
            sequence_length=data.sequence_length,
            max_tokens=4 * evaluation.tokens,
        )
    samples, rate = write_samples(session, arguments.seed)
    return Findings(
        run=run,
        config=session.model.config,
        rows=rows,
        heldout=None if heldout is None else heldout.loss,
        bits_per_byte=None if heldout is None else heldout.bits_per_byte,
        samples=samples,
        decode_rate=rate,
    )


def write_samples(session: Session, seed: int) -> tuple[list[Sample], float]:
    """A sample after each of PROMPTS, and the tokens a second of all together."""
    from openk3.commands.demo_summary import Sample
    from openk3.engine.sampler import SamplingParams

    params = [SamplingParams(temperature=0.7, top_p=0.95, seed=seed + n) for n in range(len(PROMPTS))]
    made = session.complete(PROMPTS, params, max_tokens=SAMPLE_TOKENS)
    return [Sample(one.prompt, one.text) for one in made.completions], made.timing.decode_rate

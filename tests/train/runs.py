"""Small runs for tests: a model of a few layers of every kind, a text that can be learnt, and training in another process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import random
from pathlib import Path
from typing import Any

from openk3.train.config import (
    CheckpointSettings,
    ComputeSettings,
    DataSettings,
    EvaluationSettings,
    ModelSettings,
    ScheduleSettings,
    TrainConfig,
)

TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_layers": 3,
    "mla_layers": [1],
    "intermediate_size": 48,
    "attn_res_block_size": 2,
    "latent_size": 16,
    "moe_intermediate_size": 16,
}
"""Overrides of debug13: KDA with a dense MLP, MLA with experts, KDA with experts, two AttnRes blocks."""


def write_text(path: Path, documents: int = 40, seed: int = 0) -> Path:
    """A directory of little documents with some regularity."""
    chance = random.Random(seed)
    path.mkdir(parents=True, exist_ok=True)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "def", "return", "(x)", "= 1", "\n"]
    for number in range(documents):
        (path / f"{number:03d}.txt").write_text(" ".join(chance.choices(words, k=chance.randint(30, 120))) + "\n", encoding="utf-8")
    return path


def tiny(text: Path, steps: int | None = 8, **changes: Any) -> TrainConfig:
    """Settings of a run that takes a second or two; `changes` name fields of any section."""
    config = TrainConfig(
        model=ModelSettings(name="debug13", overrides=TINY),
        data=DataSettings(paths=(str(text),), heldout=0.1, tokens_per_batch=96, sequence_length=40),
        schedule=ScheduleSettings(steps=steps),
        compute=ComputeSettings(device="cpu", precision="fp32", threads=1),
        checkpoint=CheckpointSettings(every=3),
        evaluation=EvaluationSettings(every=4, tokens=200),
        seed=3,
    )
    for name, value in changes.items():
        section = next(
            (s for s in dataclasses.fields(config) if name in getattr(getattr(config, s.name), "__dataclass_fields__", {})), None
        )
        if section is None:
            config = dataclasses.replace(config, **{name: value})
        else:
            config = dataclasses.replace(config, **{section.name: dataclasses.replace(getattr(config, section.name), **{name: value})})
    return config


def fingerprint(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint that must not depend on how it came about: the clock stands in training.pt."""
    return {
        name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "config.json", "tokenizer.json")
    }


def timeless(metrics: Path) -> list[dict[str, Any]]:
    """The rows without what the clock and the machine decide."""
    rows = [json.loads(row) for row in metrics.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in ("seconds", "tokens_per_second", "memory")} for row in rows]


def process(target: Any, *arguments: Any) -> multiprocessing.process.BaseProcess:
    """`target(*arguments)` begun in a process of its own, forked from a server that has torch imported and has never used it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["openk3.train.loop", "matplotlib.figure", "matplotlib.backends.backend_agg"])
    child = context.Process(target=target, args=arguments)
    child.start()
    return child


def train_or_resume(config: TrainConfig, run: str) -> None:
    """What a person does after each crash."""
    from openk3.train.loop import resume, train

    if (Path(run) / "config.toml").exists():
        resume(run)
    else:
        train(config, run)

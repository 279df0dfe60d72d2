"""What changes from step to step: all of it is in a checkpoint, so that a run goes on from there bit for bit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openk3.checkpoint.load import load, unpack_experts
from openk3.checkpoint.quantization import expert_inputs_of, scale_rule_of
from openk3.errors import UserError
from openk3.model.decoder import Decoder
from openk3.model.qat import set_quantization
from openk3.text.tokenizer import SETTINGS_FILE, TOKENIZER_FILE
from openk3.train import checkpointing
from openk3.train.balancing import Balancer
from openk3.train.batches import PackedBatches
from openk3.train.checkpointing import Checkpoint
from openk3.train.guards import LossGuard
from openk3.train.optimizer import Optimizer, build_optimizer
from openk3.train.prepare import Prepared
from openk3.train.run import RunDirectory

_FORMAT = 1


@dataclass
class TrainingState:
    """Everything that a step reads and leaves changed."""

    model: Decoder
    optimizer: Optimizer
    balancer: Balancer
    batches: PackedBatches
    guard: LossGuard
    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Tokens trained on."""
    seconds: float = 0.0
    """Wall-clock time of training, preparation aside."""

    @staticmethod
    def build(prepared: Prepared, checkpoint: Checkpoint | None = None) -> TrainingState:
        """The state at `checkpoint`, or at the start: weights from the seed, or from where the settings say.

        Raises UserError when the checkpoint does not belong to this run.
        """
        config = prepared.config
        torch.manual_seed(config.seed)
        model = _model(prepared, checkpoint)
        state = TrainingState(
            model=model,
            optimizer=build_optimizer(model, config.optimizer),
            balancer=Balancer(model, **dataclasses.asdict(config.balancing)),
            batches=prepared.batches(),
            guard=LossGuard(config.guard.leap, config.guard.window),
        )
        if checkpoint is not None:
            state._restore(checkpoint)
        return state

    def save(self, run: RunDirectory, keep: int) -> Checkpoint:
        """Write a checkpoint into `run`. Raises UserError as `checkpointing.save` does."""
        companions = [run.path / name for name in (TOKENIZER_FILE, SETTINGS_FILE)]
        return checkpointing.save(run.checkpoints, self.step, self.model, companions, self._training(), keep)

    def _training(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "optimizer": self.optimizer.state_dict(),
            "balancer": self.balancer.state_dict(),
            "data": self.batches.state_dict(),
            "guard": self.guard.state_dict(),
            "rng": torch.get_rng_state(),
        }

    def _restore(self, checkpoint: Checkpoint) -> None:
        saved = checkpoint.training_state()
        if saved.get("format") != _FORMAT:
            raise UserError(f"{checkpoint.path}: its training state has format {saved.get('format')!r}, this version reads {_FORMAT}")
        try:
            self.step, self.tokens, self.seconds = int(saved["step"]), int(saved["tokens"]), float(saved["seconds"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.balancer.load_state_dict(saved["balancer"])
            self.batches.load_state_dict(saved["data"])
            self.guard.load_state_dict(saved["guard"])
            torch.set_rng_state(saved["rng"])
        except UserError as error:
            raise UserError(f"{checkpoint.path}: {error}") from None
        except KeyError as error:
            raise UserError(f"{checkpoint.path}: its training state lacks {error}") from None


def _model(prepared: Prepared, checkpoint: Checkpoint | None) -> Decoder:
    device = torch.device(prepared.config.compute.device)
    source: Path | None = checkpoint.path if checkpoint is not None else prepared.start
    if source is None:
        model = Decoder(prepared.model, generator=torch.Generator().manual_seed(prepared.config.seed)).to(device)
        set_quantization(model, scale_rule_of(prepared.model), expert_inputs_of(prepared.model))
        return model.train()
    # What is beside the weights may name other control tokens than the run does; the shapes are checked by the loader.
    return unpack_experts(load(source, dtype=torch.float32, device=device, config=prepared.model)).train()

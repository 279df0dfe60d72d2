"""From settings to what the loop needs: tokenizer, tokens, the model's config. What is wrong with them is found here, before training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from openk3 import accounting
from openk3.checkpoint.load import CHECKPOINTS, locate
from openk3.checkpoint.quantization import block, with_block
from openk3.config import ModelConfig
from openk3.errors import UserError
from openk3.ops.mx import BLOCK
from openk3.text.conversations import read_conversations
from openk3.text.corpus import CorpusReport, read_documents
from openk3.text.token_file import Part, TokenFile, encode_corpus
from openk3.text.tokenizer import TOKENIZER_FILE, Tokenizer
from openk3.train import cpus, memory
from openk3.train.batches import PackedBatches
from openk3.train.config import DEFAULT_MODEL, TrainConfig
from openk3.train.events import Notice, OnEvent
from openk3.train.run import RunDirectory

TOKEN_FILE = "texts.bin"
TOKENIZER_SAMPLE = 64 * 2**20
"""Characters of text that a tokenizer is trained on; more changes it little and takes memory."""


@dataclass(frozen=True)
class Prepared:
    """What training starts from."""

    config: TrainConfig
    """Resolved: nothing in it says auto any more."""
    model: ModelConfig
    tokenizer: Tokenizer
    train: Part
    heldout: Part | None
    start: Path | None
    """The checkpoint whose weights it starts from."""

    def batches(self) -> PackedBatches:
        """The stream of training batches. Raises UserError when there is less text than one batch."""
        data = self.config.data
        return PackedBatches(self.train, data.tokens_per_batch, data.sequence_length, seed=self.config.seed)


def resolve(config: TrainConfig) -> tuple[TrainConfig, ModelConfig, Tokenizer | None]:
    """Settle all that needs no text: device, precision, threads, the model, and the tokenizer if there is one already.

    Raises UserError for what does not fit together.
    """
    config = resolve_compute(config)
    config, model, tokenizer = _resolve_model(config)
    return config, _quantized(config, model), tokenizer


def _quantized(config: TrainConfig, model: ModelConfig) -> ModelConfig:
    """`model` with what the settings say of quantization written into it, so that every checkpoint carries its arithmetic."""
    settings = config.quantization
    if settings.experts == "none":
        return with_block(model, None)
    if not model.moe_layers:
        raise UserError("quantization.experts is mxfp4, but the model has no routed experts")
    for name, width in (("width of an expert (moe_intermediate_size)", model.moe_intermediate_size), ("latent", model.expert_width)):
        if width % BLOCK:
            raise UserError(f"quantization.experts is mxfp4, which packs blocks of {BLOCK}: the {name} is {width}, not a multiple of it")
    return with_block(model, block(settings.activations, trained_under=settings.scale_rule))


def _resolve_model(config: TrainConfig) -> tuple[TrainConfig, ModelConfig, Tokenizer | None]:
    if config.start_from is not None:
        return _from_checkpoint(config, config.start_from)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, name=config.model.name or DEFAULT_MODEL))
    model = config.model.build()
    if config.data.tokenizer is not None:
        tokenizer = Tokenizer.load(config.data.tokenizer)
        if "vocab_size" in config.model.overrides and model.vocab_size < tokenizer.vocab_size:
            raise UserError(
                f"the tokenizer {config.data.tokenizer} has {tokenizer.vocab_size} tokens, "
                f"more than the model's vocab_size={model.vocab_size}"
            )
        width = model.vocab_size if "vocab_size" in config.model.overrides else tokenizer.vocab_size
        return config, fit_vocabulary(model, tokenizer, width), tokenizer
    if config.data.vocab_size is not None:
        if config.model.overrides.get("vocab_size", config.data.vocab_size) < config.data.vocab_size:
            raise UserError(f"data.vocab_size is {config.data.vocab_size}, more than the model's vocab_size={model.vocab_size}")
        width = model.vocab_size if "vocab_size" in config.model.overrides else config.data.vocab_size
        model = model.replace(vocab_size=width, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return config, model, None


def resolve_compute(config: TrainConfig) -> TrainConfig:
    """Settle what says auto for this machine. Raises UserError for a GPU that is not there."""
    compute = config.compute
    device = compute.device if compute.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not torch.cuda.is_available():
        raise UserError(f"compute.device is {device}, but this machine has no GPU that PyTorch can use")
    precision = compute.precision if compute.precision != "auto" else "bf16-autocast" if multiplies_bf16(device) else "fp32"
    threads = compute.threads or min(torch.get_num_threads(), cpus.usable())
    return dataclasses.replace(config, compute=dataclasses.replace(compute, device=device, precision=precision, threads=threads))


def multiplies_bf16(device: str) -> bool:
    """Whether the hardware multiplies bf16 matrices at more than fp32's rate."""
    if device != "cpu":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    able = torch.cpu.get_capabilities()
    return bool(able.get("amx_bf16") or able.get("avx512_bf16"))


def fit_vocabulary(model: ModelConfig, tokenizer: Tokenizer, vocab_size: int) -> ModelConfig:
    """`model` with this vocabulary and the tokenizer's control tokens."""
    return model.replace(vocab_size=vocab_size, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id)


def _from_checkpoint(config: TrainConfig, start: str) -> tuple[TrainConfig, ModelConfig, Tokenizer | None]:
    """The model and the tokenizer of a checkpoint; a tokenizer that is named as well must be the same one."""
    checkpoint = locate(start)
    model = ModelConfig.from_json(checkpoint / "config.json")
    own = _tokenizer_place(checkpoint)
    if config.data.vocab_size is not None:
        raise UserError(
            f"data.vocab_size asks for a new tokenizer, but the weights of {checkpoint} belong to the one they were trained with"
        )
    if own is None and config.data.tokenizer is None:
        raise UserError(f"{checkpoint} has no {TOKENIZER_FILE} beside it: name the tokenizer it was trained with (data.tokenizer)")
    tokenizer = Tokenizer.load(own or str(config.data.tokenizer))
    if own is not None and config.data.tokenizer is not None:
        named = Tokenizer.load(config.data.tokenizer)
        if named.fingerprint != tokenizer.fingerprint:
            raise UserError(f"the tokenizer {config.data.tokenizer} is not the one that {checkpoint} was trained with: leave it out")
    check_pair(model, tokenizer, str(checkpoint))
    return dataclasses.replace(config, start_from=str(checkpoint.resolve())), model, tokenizer


def _tokenizer_place(checkpoint: Path) -> Path | None:
    """Where the tokenizer of `checkpoint` lies: beside the weights, or in the run that it belongs to."""
    places = [checkpoint, *([checkpoint.parent.parent] if checkpoint.parent.name == CHECKPOINTS else [])]
    return next((place for place in places if (place / TOKENIZER_FILE).is_file()), None)


def tokenizer_of(checkpoint: Path) -> Tokenizer:
    """The tokenizer that belongs to `checkpoint`. Raises UserError when there is none."""
    place = _tokenizer_place(checkpoint)
    if place is None:
        raise UserError(f"{checkpoint} has no {TOKENIZER_FILE} beside it")
    return Tokenizer.load(place)


def check_pair(model: ModelConfig, tokenizer: Tokenizer, where: str) -> None:
    """Raise UserError unless `tokenizer` can be the one that the model at `where` was trained with."""
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"tokenizer and checkpoint disagree: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the model of {where} only {model.vocab_size}"
        )
    for name, ours, theirs in (
        ("begins a text", tokenizer.bos_id, model.bos_token_id),
        ("ends a text", tokenizer.eos_id, model.eos_token_id),
    ):
        if ours is not None and theirs is not None and ours != theirs:
            raise UserError(
                f"tokenizer and checkpoint disagree: token {ours} {name} for the tokenizer, token {theirs} for the model of {where}"
            )


def check_memory(config: TrainConfig, model: ModelConfig) -> tuple[int, int]:
    """(bytes that training needs, bytes there are). Raises UserError, with each term and what to change, when it cannot fit."""
    compute, tokens = config.compute, config.data.tokens_per_batch
    room = memory.available() if compute.device == "cpu" else torch.cuda.mem_get_info(compute.device)[0]
    needed = _needed(config, model, tokens, compute.recompute)
    if sum(needed.values()) > room:
        memory.check_fits(needed, room, _advice(config, model, room))
    return sum(needed.values()), room


def _needed(config: TrainConfig, model: ModelConfig, tokens: int, recompute: Literal["none", "layer", "block"]) -> dict[str, int]:
    return accounting.training_bytes(
        model,
        tokens=tokens,
        sequence_length=min(config.data.sequence_length, tokens),
        recompute=recompute,
        precision="bf16-autocast" if config.compute.precision == "bf16-autocast" else "fp32",
        optimizer=config.optimizer.kind,
    )


def _advice(config: TrainConfig, model: ModelConfig, room: int) -> str:
    """The smallest change that makes it fit: recomputation, then smaller micro-batches, else another model."""
    tokens = config.data.tokens_per_batch
    recompute = "" if config.compute.recompute == "block" else "--compute.recompute block"
    while tokens >= 1:
        total = sum(_needed(config, model, tokens, "block").values())
        if total <= room:
            batch = "" if tokens == config.data.tokens_per_batch else f"--data.tokens-per-batch {tokens}"
            return f"with {' '.join(filter(None, (recompute, batch)))} it takes {memory.readable(total)}"
        tokens //= 2
    return "no batch is small enough for that, so take a smaller model"


def prepare(config: TrainConfig, model: ModelConfig, tokenizer: Tokenizer | None, run: RunDirectory, on_event: OnEvent) -> Prepared:
    """Read the texts into `run`: train the tokenizer if there is none, encode, divide; then commit the run.

    Raises UserError for texts that cannot be used or are too few.
    """
    report = CorpusReport()
    if tokenizer is None and config.data.kind == "conversations":
        raise UserError("fine-tuning on conversations starts from a trained model: give --from CHECKPOINT")
    if tokenizer is None:
        on_event(Notice(f"training a tokenizer of {config.data.vocab_size or model.vocab_size} tokens"))
        tokenizer = Tokenizer.train(_sample(config), config.data.vocab_size or model.vocab_size)
        model = fit_vocabulary(model, tokenizer, model.vocab_size)
    tokenizer.save(run.path)
    on_event(Notice("reading the texts"))
    run.tokens.mkdir(exist_ok=True)
    file = _encode(config, tokenizer, report, run.tokens / TOKEN_FILE)
    on_event(Notice(f"{report}: {len(file.tokens):,} tokens"))
    start = None if config.start_from is None else Path(config.start_from)
    prepared = Prepared(config, model, tokenizer, *_divide(file, config), start)
    prepared.batches()
    run.commit(config, model.to_json())
    return prepared


def _encode(config: TrainConfig, tokenizer: Tokenizer, report: CorpusReport, path: Path) -> TokenFile:
    if config.data.kind == "text":
        return encode_corpus(read_documents(config.data.paths, report), tokenizer, path)
    conversations = read_conversations(config.data.paths, report)
    return TokenFile.write_marked(path, (conversation.encode(tokenizer) for conversation in conversations), tokenizer)


def reopen(config: TrainConfig, run: RunDirectory) -> Prepared:
    """What `prepare` made of `run`, read again. Raises UserError when the parts do not belong together any more."""
    model = ModelConfig.from_json(run.path / "config.json")
    tokenizer = Tokenizer.load(run.path)
    check_pair(model, tokenizer, str(run.path))
    file = TokenFile.open(run.tokens / TOKEN_FILE, tokenizer)
    start = None if config.start_from is None else Path(config.start_from)
    return Prepared(config, model, tokenizer, *_divide(file, config), start)


def _sample(config: TrainConfig) -> Iterator[str]:
    size = 0
    for document in read_documents(config.data.paths):
        yield document.text
        size += len(document.text)
        if size >= TOKENIZER_SAMPLE:
            return


def _divide(file: TokenFile, config: TrainConfig) -> tuple[Part, Part | None]:
    if config.data.heldout == 0:
        return file.whole(), None
    return file.split(config.data.heldout)

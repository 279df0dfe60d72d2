"""How well a model predicts text it does not learn from: nats a token, bits a byte."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from openk3.model.decoder import Decoder
from openk3.text.corpus import read_documents
from openk3.text.token_file import Part, encode_corpus
from openk3.text.tokenizer import Tokenizer
from openk3.train.batches import Batch, heldout_batches


@dataclass(frozen=True)
class Evaluation:
    """The result over some text. Sums, so that results can be added up."""

    nats: float
    tokens: int
    """Tokens that were predicted: all of each document but its beginning-of-text token; the end-of-text token counts."""
    bytes: int
    """Of text, in UTF-8; control tokens stand for none."""
    documents: int = 0

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Independent of the tokenizer."""
        return self.nats / (math.log(2) * self.bytes) if self.bytes else math.nan

    def __add__(self, other: Evaluation) -> Evaluation:
        return Evaluation(
            self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes, self.documents + other.documents
        )


@torch.no_grad()
def evaluate(model: Decoder, batches: Iterable[Batch], precision: str = "fp32") -> Evaluation:
    """Sum up the loss of `batches`. Routing is free and observed by nobody; gradients, if any, stay as they are."""
    nats = 0.0
    tokens = size = 0
    training = model.training
    model.eval()
    try:
        for batch in batches:
            with autocast(model.device, precision):
                terms = model.loss(batch.tokens.to(model.device), batch.segments, batch.targets.to(model.device))
            # In float64: a long text has more digits than fp32 can add up.
            nats += float(terms.per_token.double().sum())
            tokens += int((batch.targets >= 0).sum())
            size += batch.text_bytes
    finally:
        model.train(training)
    return Evaluation(nats, tokens, size)


def evaluate_part(
    model: Decoder, part: Part, *, tokens_per_batch: int, sequence_length: int, max_tokens: int | None = None, precision: str = "fp32"
) -> Evaluation:
    """Over a part of a token file (its first `max_tokens` predictions), documents cut into pieces of `sequence_length`."""
    batches = heldout_batches(part, tokens_per_batch, sequence_length, max_tokens=max_tokens)
    return evaluate(model, batches, precision)


def evaluate_texts(
    model: Decoder, tokenizer: Tokenizer, paths: Sequence[str], *, context: int, precision: str = "fp32", tokens_per_batch: int = 4096
) -> Iterator[tuple[str, Evaluation]]:
    """(path, result) for each of `paths`, a file or a directory each. A token sees at most `context` tokens before it.

    Raises UserError for what is no text.
    """
    with tempfile.TemporaryDirectory(prefix="openk3-eval-") as scratch:
        for number, path in enumerate(paths):
            file = encode_corpus(read_documents([path]), tokenizer, Path(scratch) / f"{number}.bin")
            result = evaluate_part(
                model, file.whole(), tokens_per_batch=max(tokens_per_batch, context), sequence_length=context, precision=precision
            )
            yield path, Evaluation(result.nats, result.tokens, result.bytes, file.documents)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[object]:
    """The arithmetic of `precision`: bf16-autocast, or the weights' own."""
    if precision == "bf16-autocast":
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()

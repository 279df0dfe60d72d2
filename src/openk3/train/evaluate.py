"""How well a model predicts text it does not learn from: nats a token, bits a byte."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from openk3.model.decoder import Decoder
from openk3.ops.segments import Segments
from openk3.text.corpus import read_documents
from openk3.text.token_file import Part, TokenFile, encode_corpus
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
        return Evaluation(self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes, self.documents + other.documents)


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
    """(path, result) for each of `paths`, a file or a directory each. Longer documents are cut into pieces of `context` tokens.

    Raises UserError for what is no text.
    """
    with tempfile.TemporaryDirectory(prefix="openk3-eval-") as scratch:
        for number, path in enumerate(paths):
            file = encode_corpus(read_documents([path]), tokenizer, Path(scratch) / f"{number}.bin")
            result = evaluate(model, whole_pieces(file, tokens_per_batch, context), precision)
            yield path, dataclasses.replace(result, documents=file.documents)


def whole_pieces(file: TokenFile, tokens_per_batch: int, context: int) -> Iterator[Batch]:
    """Every prediction of `file` once, in order. No batch cuts a piece of `context` tokens, so each but a document's last is so long;
    a batch ends with the piece that fills it."""
    pieces: list[tuple[int, int, int]] = []
    held = 0
    for document in range(file.documents):
        first, last = int(file.offsets[document]), int(file.offsets[document + 1]) - 1
        for start in range(first, last, context):
            pieces.append((document, start, min(context, last - start)))
            held += pieces[-1][2]
            if held >= tokens_per_batch:
                yield _batch_of(file, pieces)
                pieces, held = [], 0
    if pieces:
        yield _batch_of(file, pieces)


def _batch_of(file: TokenFile, pieces: Sequence[tuple[int, int, int]]) -> Batch:
    tokens = np.concatenate([file.tokens[start : start + length] for _, start, length in pieces]).astype(np.int64)
    targets = np.concatenate([file.tokens[start + 1 : start + length + 1] for _, start, length in pieces]).astype(np.int64)
    return Batch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        segments=Segments.of([length for _, _, length in pieces]),
        positions=tuple(start for _, start, _ in pieces),
        documents=tuple(document for document, _, _ in pieces),
        text_bytes=int(file.text_lengths[targets].sum()),
        epoch=0,
    )


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[object]:
    """The arithmetic of `precision`: bf16-autocast, or the weights' own."""
    if precision == "bf16-autocast":
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()

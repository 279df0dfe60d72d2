"""Loss and bits per byte against the same numbers from plain logits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from openk3 import Decoder, ModelConfig, Segments
from openk3.text.corpus import read_documents
from openk3.text.token_file import TokenFile, encode_corpus
from openk3.text.tokenizer import Tokenizer
from openk3.train.evaluate import Evaluation, evaluate, evaluate_part, evaluate_texts, whole_pieces
from tests.train.runs import TINY, write_text


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer, TokenFile, Decoder]:
    root = tmp_path_factory.mktemp("evaluate")
    text = write_text(root / "text", documents=6)
    tokenizer = Tokenizer.train((document.text for document in read_documents([str(text)])), 300)
    model = Decoder(ModelConfig.named("debug13").replace(**TINY), generator=torch.Generator().manual_seed(0)).double().eval()
    return text, tokenizer, encode_corpus(read_documents([str(text)]), tokenizer, root / "texts.bin"), model


def by_hand(file: TokenFile, model: Decoder, context: int) -> float:
    """Nats over all documents, piece by piece, from the logits of one piece at a time."""
    total = 0.0
    for number in range(file.documents):
        ids = torch.from_numpy(file.document(number).astype("int64"))
        for start in range(0, len(ids) - 1, context):
            piece, targets = ids[start : start + context][: len(ids) - 1 - start], ids[start + 1 : start + 1 + context]
            with torch.no_grad():
                logits = model(piece, Segments.of([len(piece)])).logits
            total += float(F.cross_entropy(logits, targets, reduction="sum"))
    return total


@pytest.mark.parametrize(("context", "tokens_per_batch"), [(16, 50), (40, 1), (10_000, 100_000)])
def test_the_loss_is_that_of_the_logits(setting: tuple[Path, Tokenizer, TokenFile, Decoder], context: int, tokens_per_batch: int) -> None:
    _, _, file, model = setting
    result = evaluate(model, whole_pieces(file, tokens_per_batch, context))
    assert result.tokens == len(file.tokens) - file.documents
    assert result.nats == pytest.approx(by_hand(file, model, context), rel=1e-9)
    part = evaluate_part(model, file.whole(), tokens_per_batch=100_000, sequence_length=context)
    assert (part.nats, part.tokens, part.bytes) == (pytest.approx(result.nats, rel=1e-9), result.tokens, result.bytes)


def test_a_batch_ends_with_the_piece_that_fills_it(setting: tuple[Path, Tokenizer, TokenFile, Decoder]) -> None:
    file = setting[2]
    batches = list(whole_pieces(file, 50, 16))
    assert all(50 <= batch.segments.total < 50 + 16 for batch in batches[:-1])
    lengths = [length for batch in batches for length in batch.segments.lengths]
    assert max(lengths) == 16 and sum(length < 16 for length in lengths) <= file.documents
    assert sum(lengths) == len(file.tokens) - file.documents


def test_bytes_and_documents(setting: tuple[Path, Tokenizer, TokenFile, Decoder]) -> None:
    text, tokenizer, file, model = setting
    ((_, result),) = evaluate_texts(model, tokenizer, [str(text)], context=64)
    assert result.bytes == sum(len(document.read_bytes()) for document in text.iterdir())
    assert result.documents == 6 and result.tokens == len(file.tokens) - 6
    assert result.bits_per_byte == pytest.approx(result.nats / math.log(2) / result.bytes)
    assert result.loss == pytest.approx(result.nats / result.tokens)
    assert result.perplexity == pytest.approx(math.exp(result.loss))


def test_each_text_is_a_row_and_rows_add_up(setting: tuple[Path, Tokenizer, TokenFile, Decoder]) -> None:
    text, tokenizer, _, model = setting
    files = [str(file) for file in sorted(text.iterdir())]
    rows = list(evaluate_texts(model, tokenizer, files, context=64))
    assert [name for name, _ in rows] == files
    ((_, whole),) = evaluate_texts(model, tokenizer, [str(text)], context=64)
    total = sum((row for _, row in rows), Evaluation(0.0, 0, 0))
    assert total.nats == pytest.approx(whole.nats, rel=1e-9)
    assert (total.tokens, total.bytes, total.documents) == (whole.tokens, whole.bytes, whole.documents)


def test_a_part_of_the_tokens(setting: tuple[Path, Tokenizer, TokenFile, Decoder]) -> None:
    _, _, file, model = setting
    assert evaluate_part(model, file.whole(), tokens_per_batch=32, sequence_length=16, max_tokens=100).tokens == 100


def test_it_leaves_no_trace(setting: tuple[Path, Tokenizer, TokenFile, Decoder]) -> None:
    _, _, file, model = setting
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    evaluate_part(model, file.whole(), tokens_per_batch=32, sequence_length=16, max_tokens=64)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model.eval()


def test_nothing_is_not_a_number() -> None:
    empty = Evaluation(0.0, 0, 0)
    assert math.isnan(empty.loss) and math.isnan(empty.bits_per_byte)
    assert Evaluation(1e6, 1, 1).perplexity == math.inf

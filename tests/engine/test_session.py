"""A checkpoint and its tokenizer, opened together: what fits, what does not, and text out of text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from openk3.engine.sampler import SamplingParams
from openk3.engine.session import Prompt, Session
from openk3.errors import UserError
from openk3.ops.segments import Segments
from tests.engine import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def session(checkpoint: Path) -> Session:
    return Session.open(checkpoint, dtype=torch.float64)


def copy(checkpoint: Path, target: Path) -> Path:
    return Path(shutil.copytree(checkpoint, target))


def edit(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | changes))


def test_text_continues_a_prompt_as_the_model_says(session: Session) -> None:
    prompt = "def f(x):\n"
    done = session.complete([prompt], SamplingParams(temperature=0), max_tokens=8).completions[0]
    assert session.tokenizer.bos_id is not None
    text = [session.tokenizer.bos_id, *session.tokenizer.encode(prompt)]
    assert list(done.prompt_ids) == text
    start = len(text)
    for _ in range(8):
        with torch.no_grad():
            row = session.model(torch.tensor(text), Segments.of([len(text)])).logits[-1]
        text.append(int(row[: session.tokenizer.vocab_size].argmax()))
    expected = text[start:]
    if session.tokenizer.eos_id in expected:
        expected = expected[: expected.index(session.tokenizer.eos_id)]
    assert list(done.tokens.ids) == expected
    assert done.text == session.tokenizer.decode(expected)


def test_control_tokens_in_a_prompt_are_plain_text(session: Session) -> None:
    written = "".join(session.tokenizer.special_ids)
    ids = session.encode_prompt(written).ids
    assert ids[0] == session.tokenizer.bos_id
    assert not set(ids[1:]) & set(session.tokenizer.special_ids.values())
    assert session.tokenizer.decode(ids[1:]) == written


def test_space_at_the_end_belongs_to_the_first_new_token(session: Session) -> None:
    assert session.tokenizer.bos_id is not None
    prompt = session.encode_prompt("return ")
    assert prompt == Prompt((session.tokenizer.bos_id, *session.tokenizer.encode("return")), " ")
    for text in ("return", "if x:\n    ", "", "a\n"):
        whole = session.encode_prompt(text)
        assert (whole.held, list(whole.ids[1:])) == ("", session.tokenizer.encode(text))
    shown: list[str] = []
    done = session.complete(
        ["return "], SamplingParams(temperature=3.0), max_tokens=5, on_text=lambda n, piece: shown.append(piece)
    ).completions[0]
    first = session.tokenizer.bytes_of(done.tokens.ids[0])
    assert first.startswith(b" ")
    assert "return " + done.text == "return" + session.tokenizer.decode(done.tokens.ids)
    assert "".join(shown) == done.text


def test_empty_prompt_starts_from_the_beginning_of_text(session: Session) -> None:
    done = session.complete([""], SamplingParams(seed=3), max_tokens=4).completions[0]
    assert done.prompt_ids == (session.tokenizer.bos_id,)
    assert len(done.tokens.ids) <= 4


def test_streamed_pieces_make_up_the_text_and_stop_strings_are_left_out(session: Session) -> None:
    params = [SamplingParams(temperature=1.5, seed=n) for n in range(3)]
    plain = session.complete(["a", "b", "c"], params, max_tokens=40)
    stop = plain.completions[0].text[5:7]
    pieces: dict[int, list[str]] = {0: [], 1: [], 2: []}
    done = session.complete(["a", "b", "c"], params, max_tokens=40, stops=[stop], on_text=lambda n, piece: pieces[n].append(piece))
    for n, one in enumerate(done.completions):
        assert "".join(pieces[n]) == one.text
        assert stop not in one.text
        # A character that was still incomplete when the stop string came is not certain text; up to there both agree.
        assert plain.completions[n].text.startswith(one.text.rstrip("\ufffd"))
    assert done.completions[0].stop == stop and done.completions[0].tokens.finish_reason == "stop"


def test_all_end_tokens_stop(checkpoint: Path, tmp_path: Path) -> None:
    other = copy(checkpoint, tmp_path / "other")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    opened = Session.open(other)
    assert opened.ends.ids == {7, 8, opened.tokenizer.eos_id}
    assert opened.ends.disagreement is not None and "generation_config.json says 7 and 8" in opened.ends.disagreement


def test_the_tokenizer_of_the_run_serves_its_checkpoints(checkpoint: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    inner = copy(checkpoint, run / "checkpoints" / "step-00000010")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (inner / name).rename(run / name)
    assert Session.open(run).checkpoint == inner
    assert Session.open(inner).tokenizer.vocab_size == tiny.VOCABULARY
    (run / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="there is no tokenizer.json"):
        Session.open(run)


def test_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    settings = tiny.config().replace(vocab_size=200, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with pytest.raises(UserError, match="has 300 tokens, the model in .* only 200: they do not belong together"):
        Session.open(tiny.write(tmp_path, settings))


def test_other_beginning_of_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="begins a text with token .* with 5: they do not belong together"):
        Session.open(tiny.write(tmp_path, tiny.config().replace(bos_token_id=5)))


def test_padded_vocabulary_is_never_drawn(tmp_path: Path) -> None:
    session = Session.open(tiny.write(tmp_path, tiny.config(vocabulary=512)))
    done = session.complete(["x"], SamplingParams(temperature=50.0), max_tokens=60).completions[0]
    assert max(done.tokens.ids) < tiny.VOCABULARY


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "tokenizer.json").write_text("{"), "tokenizer.json"),
        (lambda path: edit(path / "tokenizer_config.json", eos_token="</s>"), "</s>"),
        (lambda path: (path / "config.json").unlink(), "config.json"),
        (lambda path: (path / "model.safetensors").unlink(), "safetensors"),
        (lambda path: (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-999]), "model.safetensors"),
    ],
)
def test_damaged_checkpoints_are_one_clear_line(checkpoint: Path, tmp_path: Path, damage: object, message: str) -> None:
    other = copy(checkpoint, tmp_path / "other")
    damage(other)  # type: ignore[operator]
    with pytest.raises(UserError, match=message) as caught:
        Session.open(other)
    assert "\n" not in str(caught.value)


def test_half_a_surrogate_pair_is_no_prompt(session: Session) -> None:
    with pytest.raises(UserError, match="not valid UTF-8"):
        session.encode_prompt("a\udcffb")

"""The tokenizer: exact round trips, control tokens only on request, equal files for equal texts, damage refused."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.errors import UserError
from openk3.text import tokenizer as module
from openk3.text.byte_level import BYTE_OF, CHARACTERS
from openk3.text.tokenizer import CONTROL_TOKENS, SPLIT, Tokenizer
from tests.text.samples import CODE, PROSE, small

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def visible(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([token]) for token in tokenizer.encode(text)]


def mergeless() -> Tokenizer:
    return Tokenizer.train(["ab"], 256 + len(CONTROL_TOKENS))


def pieces_of(text: str) -> list[str]:
    """What SPLIT makes of `text`, as the library sees it."""
    return [piece for piece, _ in tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated").pre_tokenize_str(text)]


# Round trips


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\0",
        "\0\0a\0",
        " ",
        "   ",
        "\n",
        "\r\n",
        "\t\t x",
        "\ufeff",
        "\ufffd",
        "\U0010ffff",
        "👩‍👩‍👧 ﷽",
        "e\u0301\u0301",
        "\u2028\x85\x0c",
        "[EOS]",
        "Ġ",
    ],
)
def test_texts_come_back(text: str) -> None:
    assert small().decode(small().encode(text)) == text
    assert mergeless().decode(mergeless().encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(UNICODE)
def test_any_text_comes_back(text: str) -> None:
    assert small().decode(small().encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(st.text("ab _.\n\r\t\x0c\u00a0'1-é", max_size=40))
def test_borders_lose_nothing(text: str) -> None:
    assert "".join(pieces_of(text)) == text
    assert small().decode(small().encode(text)) == text


def test_every_code_point_comes_back() -> None:
    text = "".join(chr(code) for code in [*range(0xD800), *range(0xE000, 0x110000, 13)])
    assert small().decode(small().encode(text)) == text


def test_half_a_surrogate_pair_is_refused_with_its_place() -> None:
    with pytest.raises(UserError, match=r"character 3 of the text is '\\ud83d', half of a surrogate pair"):
        small().encode("abc\ud83d")
    with pytest.raises(UserError, match="surrogate"):
        small().encode_batch(["fine", "\udc00"])
    with pytest.raises(UserError, match="surrogate"):
        Tokenizer.train(["abc\ud83d"], 300)


def test_byte_ids_are_the_bytes() -> None:
    assert [small().token_bytes[n] for n in range(256)] == [bytes([n]) for n in range(256)]
    assert mergeless().encode("aé\n") == [0x61, 0xC3, 0xA9, 0x0A]


def test_byte_characters_are_the_librarys() -> None:
    assert set(CHARACTERS) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert len(BYTE_OF) == 256 and BYTE_OF["Ġ"] == 0x20 and BYTE_OF["Ċ"] == 0x0A and BYTE_OF["a"] == 0x61


def test_decoding_agrees_with_the_library(tmp_path: Path) -> None:
    small().save(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in (CODE, PROSE, "é👩‍👧\0"):
        ids = small().encode(text)
        assert library.encode(text, add_special_tokens=False).ids == ids
        assert library.decode(ids) == small().decode(ids) == text


def test_invalid_bytes_become_replacement_characters() -> None:
    assert mergeless().decode([0x61, 0xC3, 0x62, 0xFF]) == "a\ufffdb\ufffd"


@pytest.mark.parametrize("wrong", [-1, 400, 10**9])
def test_decoding_an_id_outside_the_vocabulary(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"token id {wrong} is not in this vocabulary of 400"):
        small().decode([5, wrong])
    with pytest.raises(ValueError, match=f"token id {wrong} is not in this vocabulary of 400"):
        small().bytes_of(wrong)
    assert small().decode(iter([])) == "" and small().decode(iter([97, 399])) == "a<|end_of_msg|>"


# Borders


def test_pieces_of_code_and_prose() -> None:
    assert pieces_of("def f(self):\n        return self.x_one\n\n\nx") == [
        "def", " f", "(", "self", "):", "\n        ", "return", " self", ".x", "_one", "\n\n\n", "x",
    ]  # fmt: skip
    assert pieces_of("It doesn't cost 12345 €, 'tis 3.14!") == [
        "It", " doesn't", " cost", " ", "123", "45", " €,", " '", "tis", " ", "3", ".", "14", "!",
    ]  # fmt: skip
    assert pieces_of("a    b\r\n\tc  \nd") == ["a", "   ", " b", "\r\n\t", "c", "  \n", "d"]


def test_indentation_becomes_one_token() -> None:
    tokenizer = Tokenizer.train([CODE] * 2, 600)
    assert [token for token in visible(tokenizer, CODE) if token.startswith("\n")][:4] == ["\n    ", "\n    ", "\n    ", "\n        "]


def test_digits_go_in_groups_of_three() -> None:
    tokenizer = Tokenizer.train(["1234567 1234567 123123123 " * 50], 300)
    assert visible(tokenizer, "1231231237") == ["123", "123", "123", "7"]


@pytest.mark.timeout(60)
def test_time_is_linear_in_the_length() -> None:
    # Quadratic time would be hours.
    for text in ("a", " ", "\n", "!", "1", "\n \x0c", "\r", " \x0c", "é"):
        long = text * (100_000 // len(text))
        assert small().decode(small().encode(long)) == long


# Long texts are encoded in pieces


@pytest.mark.parametrize("seed", range(8))
def test_pieces_give_the_ids_of_the_whole(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(seed)
    alphabet = ["a", "b ", "\n", "\n\n", "  ", "\t", "\r\n", "\r", "\x0c", "\u00a0", "'s", "_x", ".", "12", "é", CODE[:80]]
    text = "".join(draw.choices(alphabet, k=2000))
    whole = small().encode(text)
    monkeypatch.setattr(module, "PIECE", draw.choice([1, 3, 50]))
    assert len(list(module._pieces(text))) > 5
    assert small().encode(text) == whole
    monkeypatch.setattr(small(), "_in_pieces", False)
    assert small().encode(text) == whole


def test_other_borders_are_not_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads(json.dumps(small()._content))
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    other = Tokenizer(content)
    text = "a\n\n\nb" * 50
    whole = other.encode(text)
    monkeypatch.setattr(module, "PIECE", 1)
    assert other.encode(text) == whole


@pytest.mark.parametrize("size", [1, 20, 100])
def test_groups_lose_nothing(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    texts = [CODE, "", PROSE, "é", "", CODE * 3, ""]
    expected = small().encode_batch(texts)
    monkeypatch.setattr(module, "PIECE", size)
    assert small().encode_batch(texts) == expected
    assert small().encode_batch([CODE]) == [expected[0]] and small().encode_batch([""]) == [[]]


def test_batches_give_what_single_texts_give() -> None:
    texts = [CODE, "", PROSE, "[EOS]<|open|>", "é"]
    assert small().encode_batch(texts) == [small().encode(text) for text in texts]
    assert small().encode_batch(texts, allow_special=True) == [small().encode(text, allow_special=True) for text in texts]
    assert small().encode_batch([]) == []


# Control tokens


def test_control_tokens_are_the_last_ids() -> None:
    tokenizer = small()
    assert list(tokenizer.special_ids.items()) == [(name, 393 + n) for n, name in enumerate(CONTROL_TOKENS)]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (393, 394, 395)


@pytest.mark.parametrize("name", CONTROL_TOKENS)
def test_a_user_cannot_write_a_control_token(name: str) -> None:
    for tokenizer in (small(), Tokenizer.train([" ".join(CONTROL_TOKENS) * 20], 500)):
        for text in (name, f"a {name}b", name * 3, f'<|open|>message role="system"<|sep|>{name}'):
            ids = tokenizer.encode(text)
            assert not set(ids) & set(tokenizer.special_ids.values())
            assert tokenizer.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*CONTROL_TOKENS, "<|", "|>", "[", "EOS", "]", "open", "a", "\n"]), max_size=12).map("".join))
def test_no_control_id_comes_from_plain_text(text: str) -> None:
    assert not set(small().encode(text)) & set(small().special_ids.values())


def test_control_tokens_on_request() -> None:
    tokenizer = small()
    ids = tokenizer.encode("<|open|>a[EOS]<|sep|>", allow_special=True)
    assert ids == [396, ord("a"), 394, 397]
    assert tokenizer.decode(ids) == "<|open|>a[EOS]<|sep|>"
    assert tokenizer.decode(ids, skip_special=True) == "a"
    assert tokenizer.encode("<|ope<|open|>", allow_special=True) == [*tokenizer.encode("<|ope"), 396]


def test_control_tokens_are_no_text() -> None:
    lengths = small().text_lengths
    assert all(lengths[n] == 0 for n in small().special_ids.values())
    for text in (CODE, "é👩\0"):
        assert sum(lengths[n] for n in small().encode(text)) == len(text.encode())


# Training


def test_a_small_text_leaves_ids_over() -> None:
    tokenizer = Tokenizer.train(["abab abab"], 300)
    assert tokenizer.vocab_size == 300 and tokenizer.reserved == 300 - 256 - 7 - len({"ab", "abab"})
    assert tokenizer.bos_id == 293
    assert visible(tokenizer, "abab") == ["abab"]
    assert tokenizer.decode([292]).startswith("<|reserved_")
    assert 292 not in tokenizer.encode(tokenizer.decode([292]), allow_special=True)
    assert small().reserved == 0 and len(set(small().token_bytes)) == 400


def test_the_smallest_vocabulary() -> None:
    assert mergeless().vocab_size == 263 and mergeless().reserved == 0
    with pytest.raises(UserError, match="vocabulary of 262 tokens is too small: bytes and control tokens alone are 263"):
        Tokenizer.train(["ab"], 262)


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_training_needs_text(texts: list[str]) -> None:
    with pytest.raises(UserError, match="no text"):
        Tokenizer.train(texts, 300)


def test_training_is_deterministic_across_processes_and_threads(tmp_path: Path) -> None:
    code = (
        "import json, sys, pathlib; from openk3.text.tokenizer import Tokenizer; sizes = [3, 1, 2]\n"
        "text = pathlib.Path(json.__file__).with_name('decoder.py').read_text()\n"
        "Tokenizer.train((text[n * 500 : (n + 1) * 500] for n in range(20)), 700).save(sys.argv[1])"
    )
    for name, threads, seed in (("a", "1", "1"), ("b", "2", "2")):
        environment = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=True, env=environment, timeout=60)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


# Files


def test_save_and_load(tmp_path: Path) -> None:
    small().save(tmp_path / "new" / "place")
    assert sorted(path.name for path in (tmp_path / "new" / "place").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    for path in (tmp_path / "new" / "place", tmp_path / "new" / "place" / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.fingerprint == small().fingerprint
        assert loaded.encode(CODE) == small().encode(CODE)
        assert dict(loaded.special_ids) == dict(small().special_ids)
        assert (loaded.bos_id, loaded.eos_id, loaded.pad_id, loaded.vocab_size) == (393, 394, 395, 400)


def test_what_other_tools_read(tmp_path: Path) -> None:
    small().save(tmp_path)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert library.get_vocab_size() == 400
    assert library.token_to_id("[EOS]") == 394
    stated = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (stated["bos_token"], stated["eos_token"], stated["pad_token"]) == ("[BOS]", "[EOS]", "[PAD]")


def test_reserved_survives_without_the_settings(tmp_path: Path) -> None:
    Tokenizer.train(["abab abab"], 300).save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path).reserved == 35


def test_fingerprints_tell_tokenizers_apart() -> None:
    same = Tokenizer.train([CODE, PROSE * 3, CODE.replace("value", "item")], 400)
    assert same.fingerprint == small().fingerprint and len(same.fingerprint) == 64
    others = [Tokenizer.train([CODE], 400), Tokenizer.train([CODE, PROSE * 3, CODE.replace("value", "item")], 401)]
    content = json.loads(json.dumps(small()._content))
    content["added_tokens"][0]["content"], content["added_tokens"][1]["content"] = "[EOS]", "[BOS]"
    others.append(Tokenizer(content))
    assert len({small().fingerprint, *(other.fingerprint for other in others)}) == 4


def test_older_files_write_a_merge_as_one_string() -> None:
    content = json.loads(json.dumps(small()._content))
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    older = Tokenizer(content)
    assert older.fingerprint == small().fingerprint and older.encode(CODE) == small().encode(CODE)


def test_roles_come_from_the_settings() -> None:
    tokenizer = Tokenizer(small()._content, {"eos_token": {"content": "<|end_of_msg|>"}, "pad_token": None})
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (393, 399, None)
    with pytest.raises(UserError, match="its eos_token is '</s>', which is not one of its control tokens"):
        Tokenizer(small()._content, {"eos_token": "</s>"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c.pop("model"), "no model"),
        (lambda c: c["model"].update(type="Unigram"), "'Unigram', not BPE"),
        (lambda c: c["model"].pop("merges"), "no vocab and merges"),
        (lambda c: c.pop("added_tokens"), "no list of added_tokens"),
        (lambda c: c.update(decoder=None), "does not decode bytes"),
        (lambda c: c.update(pre_tokenizer={"type": "Whitespace"}), "does not encode bytes"),
        (lambda c: c.update(normalizer={"type": "NFKC"}), "normalizer"),
        (lambda c: c["model"].update(dropout=0.1), "dropout"),
        (lambda c: c["model"]["vocab"].pop("a"), "ids are not 0 to"),
        (lambda c: c["model"]["vocab"].update(a="7"), "id of token 'a' is '7'"),
        (lambda c: c["model"]["vocab"].update(a=True), "id of token 'a' is True"),
        (lambda c: c["model"]["vocab"].update(a=98), "id of token"),
        (lambda c: c["model"]["vocab"].update({"ab 日": 400}), "not a string of bytes"),
        (lambda c: c["model"]["vocab"].update({"": 400}), "not a string of bytes"),
        (lambda c: c["model"]["merges"].append(["a", "zzz"]), "does not join two tokens"),
        (lambda c: c["model"]["merges"].append(["q", "z"]), "does not join two tokens"),
        (lambda c: c["model"]["merges"].append(["a"]), "does not join two tokens"),
        (lambda c: c["model"]["merges"].append(7), "does not join two tokens"),
        (lambda c: c["added_tokens"][0].pop("id"), "added token"),
        (lambda c: c["added_tokens"][0].update(id=395), "two tokens have the id 395"),
        (lambda c: c["added_tokens"][0].update(content="[EOS]"), "there twice"),
        (lambda c: c["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="((("), "damaged"),
    ],
)
def test_what_is_no_byte_level_tokenizer_is_refused(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    content = json.loads(json.dumps(small()._content))
    damage(content)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"^{re.escape(str(file))} is .*{re.escape(message)}"):
        Tokenizer.load(file)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged"):
        Tokenizer.load(tmp_path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read: No such file"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_that_is_not_the_one_written(tmp_path: Path) -> None:
    small().save(tmp_path / "a")
    mergeless().save(tmp_path / "b")
    (tmp_path / "b" / "tokenizer.json").write_bytes((tmp_path / "a" / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match=r"is damaged, or not the one that tokenizer_config\.json was written with"):
        Tokenizer.load(tmp_path / "b")


def test_a_flipped_bit_never_changes_ids_unseen(tmp_path: Path) -> None:
    small().save(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = file.read_bytes()
    draw = random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        try:
            loaded = Tokenizer.load(tmp_path)
        except UserError:
            refused += 1
        else:
            assert loaded.fingerprint == small().fingerprint and loaded.encode(CODE) == small().encode(CODE)
    assert refused > 75


def test_a_full_disk_leaves_the_old_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small().save(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be written: No space left on device"):
        mergeless().save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == small().fingerprint
    assert len(list(tmp_path.iterdir())) == 2

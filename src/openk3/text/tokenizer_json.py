"""What a tokenizer.json must hold to be a byte-level BPE tokenizer, checked before the library sees it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openk3.errors import UserError
from openk3.text.byte_level import BYTE_OF, CHARACTERS


def read(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises UserError when it is missing or is not one."""
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged: it is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} is damaged: it holds no JSON object")
    return content


def check(content: Mapping[str, Any], source: str) -> list[str]:
    """The tokens, by id. Raises UserError, naming `source`, unless `content` is a byte-level BPE tokenizer without gaps in its ids."""

    def need(condition: bool, problem: str) -> None:
        if not condition:
            raise UserError(f"{source} is damaged or of another kind: {problem}")

    model = content.get("model")
    need(isinstance(model, Mapping), "there is no model in it")
    assert isinstance(model, Mapping)
    need(model.get("type", "BPE") == "BPE", f"its model is {model.get('type')!r}, not BPE")
    vocab, merges, added = model.get("vocab"), model.get("merges"), content.get("added_tokens")
    need(isinstance(vocab, dict) and isinstance(merges, list), "its model has no vocab and merges")
    need(isinstance(added, list), "it has no list of added_tokens")
    assert isinstance(vocab, dict) and isinstance(merges, list) and isinstance(added, list)
    need(_is_byte_level(content.get("decoder")), "it does not decode bytes (no ByteLevel decoder)")
    need(_is_byte_level(content.get("pre_tokenizer")), "it does not encode bytes (no ByteLevel pre_tokenizer)")
    need(content.get("normalizer") is None, "its normalizer changes the text, which would not come back as it was")
    need(not model.get("dropout"), "it encodes at random (dropout)")
    names: dict[int, str] = {}
    for token, number in vocab.items():
        need(type(number) is int and number not in names, f"the id of token {token!r} is {number!r}")
        names[number] = token
    for token in added:
        need(isinstance(token, dict) and type(token.get("id")) is int and isinstance(token.get("content"), str), f"added token {token!r}")
        need(names.setdefault(token["id"], token["content"]) == token["content"], f"two tokens have the id {token['id']}")
    need(len({token["content"] for token in added}) == len(added), "an added token is there twice")
    need(sorted(names) == list(range(len(names))), f"its {len(names)} ids are not 0 to {len(names) - 1}")
    special = {token["id"] for token in added}
    for number, token in names.items():
        of_bytes = bool(token) and all(character in BYTE_OF for character in token)
        need(number in special or of_bytes, f"token {token!r} is not a string of bytes")
    absent = [BYTE_OF[character] for character in CHARACTERS if character not in vocab]
    need(not absent, f"there is no token for byte {absent[0] if absent else 0}")
    for merge in merges:
        pair = _halves(merge)
        good = isinstance(pair, list) and len(pair) == 2 and all(isinstance(half, str) and half in vocab for half in pair)
        need(good and pair[0] + pair[1] in vocab, f"merge {merge!r} does not join two tokens into a third")
    return [names[number] for number in range(len(names))]


def fingerprint(content: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of all that decides which ids a text gets: vocabulary, merges, borders, control tokens."""
    model = content["model"]
    added = sorted((token["id"], token["content"]) for token in content["added_tokens"])
    # Options that are off are left out: another version of the library may write more of them.
    options = {name: value for name, value in model.items() if name not in ("vocab", "merges") and value}
    vocab = sorted(model["vocab"].items(), key=lambda item: item[1])
    canonical = [vocab, [_halves(merge) for merge in model["merges"]], options, content.get("pre_tokenizer"), added]
    return hashlib.sha256(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def unused(content: Mapping[str, Any]) -> int:
    """How many tokens of the model no text can lead to: no byte, and no merge makes them."""
    model = content["model"]
    if model.get("ignore_merges"):
        return 0
    made = {"".join(_halves(merge)) for merge in model["merges"]}
    return sum(len(token) > 1 and token not in made for token in model["vocab"])


def _halves(merge: Any) -> Any:
    """The two tokens of a merge; older files write them as one string."""
    return merge.split(" ") if isinstance(merge, str) else merge


def _is_byte_level(part: object) -> bool:
    """Whether a pre_tokenizer or decoder is ByteLevel, or a sequence that holds one."""
    if not isinstance(part, Mapping):
        return False
    if part.get("type") == "ByteLevel":
        return True
    inner = part.get("pretokenizers", part.get("decoders"))
    return part.get("type") == "Sequence" and isinstance(inner, list) and any(_is_byte_level(one) for one in inner)

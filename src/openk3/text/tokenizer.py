"""Text <-> token ids: byte-level BPE, on the `tokenizers` library.

Every text comes back from its ids exactly, since the 256 bytes are tokens themselves. Control tokens (the end of a document, the marks of
the chat format) have no way into the ids of a text: the encoder does not know them. Only a caller that says `allow_special=True` gets them.

    tokenizer = Tokenizer.train(["def f(x):\\n    return x\\n"], vocab_size=300)
    tokenizer.decode(tokenizer.encode("déjà vu"))
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from openk3.errors import UserError
from openk3.text.byte_level import CHARACTERS, byte_string
from openk3.text.files import write_atomic
from openk3.text.tokenizer_json import check, fingerprint, read, unused

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"

BOS, EOS, PAD = "[BOS]", "[EOS]", "[PAD]"
CONTROL_TOKENS = (BOS, EOS, PAD, "<|open|>", "<|sep|>", "<|close|>", "<|end_of_msg|>")
"""The last ids of a vocabulary, in this order. The last four are the marks of the chat format (XTML, Kimi K3 report App. F)."""
_ROLES = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}

SPLIT = "|".join(
    (
        r"[ _.]?(?>[\p{L}\p{M}]{1,128})(?:'(?:s|t|re|ve|ll|d|m)(?!\p{L}))?",  # a word, a part of an identifier, an English contraction
        r"\p{N}{1,3}",
        r"[ ]?(?>[^\s\p{L}\p{M}\p{N}]{1,64})",  # operators and punctuation
        r"(?:[ \t]{0,128}\r?\n){1,16}[ \t]{0,128}",  # ends of lines with the indentation of the line that follows
        r"[^\S\n]{1,128}(?!\S)",  # other white space, but for the space that goes with the word behind it
        r"\s",
    )
)
"""Tokens never cross these borders. Repeats are bounded, so that time is linear in the length of any text."""

BORDERS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}
"""SPLIT, then bytes, as tokenizer.json has it."""

LONGEST_TOKEN = 32
"""In bytes. Longer ones would be rulers and the like, of no use outside the text they come from."""

PIECE = 1 << 18
"""Characters. A longer text is encoded in pieces, on several threads at once. Pieces end where a token of SPLIT always ends."""

_PIECE_END = re.compile(r"\n(?=\S)")


class Tokenizer:
    """A byte-level BPE vocabulary. In those that `train` makes, ids 0 to 255 are the bytes."""

    def __init__(self, content: Mapping[str, Any], settings: Mapping[str, Any] | None = None, *, source: str = "the tokenizer") -> None:
        """From the content of a tokenizer.json and of the tokenizer_config.json beside it.

        Raises UserError, naming `source`, when they do not describe a byte-level BPE tokenizer.
        """
        self._content = dict(content)
        self._tokens = check(self._content, source)
        self._special_ids: dict[str, int] = {token["content"]: token["id"] for token in self._content["added_tokens"]}
        self._controls = frozenset(self._special_ids.values())
        self._roles = {role: self._role(role, name, settings or {}, source) for role, name in _ROLES.items()}
        names = sorted(self._special_ids, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
        # The library looks for added tokens in every text; an encoder without them cannot be talked into one.
        plain = self._content | {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        try:
            self._encoder = tokenizers.Tokenizer.from_str(json.dumps(plain))
        except Exception as error:
            raise UserError(f"{source} is damaged: {error}") from error
        self._in_pieces = self._content["pre_tokenizer"] == BORDERS

    @staticmethod
    def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """A vocabulary of exactly `vocab_size` tokens for texts like `texts`, which is read once. Equal texts give an equal tokenizer.

        A text too small for that many merges leaves ids over that are never used; `reserved` tells how many.
        Raises UserError when `vocab_size` is too small to hold the bytes and the control tokens, or when there is no text.
        """
        least = len(CHARACTERS) + len(CONTROL_TOKENS)
        if vocab_size < least:
            raise UserError(f"a vocabulary of {vocab_size} tokens is too small: bytes and control tokens alone are {least}")
        trained = tokenizers.Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        trained.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(CONTROL_TOKENS),
            min_frequency=2,
            initial_alphabet=list(CHARACTERS),
            max_token_length=LONGEST_TOKEN,
            show_progress=False,
        )
        read_texts = _Texts(texts)
        trained.train_from_iterator(read_texts, trainer)
        if not read_texts.characters:
            raise UserError("there is no text to train a tokenizer on")
        content = json.loads(trained.to_str()) | {"pre_tokenizer": BORDERS}
        # Two merges may lead to the same token.
        tokens = list(dict.fromkeys([*CHARACTERS, *("".join(merge) for merge in content["model"]["merges"])]))
        tokens += [f"<|reserved_{n}|>" for n in range(vocab_size - len(CONTROL_TOKENS) - len(tokens))]
        content["model"]["vocab"] = {token: n for n, token in enumerate(tokens)}
        content["added_tokens"] = [_control(name, len(tokens) + n) for n, name in enumerate(CONTROL_TOKENS)]
        return Tokenizer(content)

    @staticmethod
    def load(path: str | Path) -> Tokenizer:
        """Read a tokenizer.json, or the one in the directory `path`, with the tokenizer_config.json beside it if there is one.

        Raises UserError when it is missing, damaged, or not what tokenizer_config.json says was written.
        """
        path = Path(path)
        file = path / TOKENIZER_FILE if path.is_dir() else path
        content = read(file)
        beside = file.with_name(SETTINGS_FILE)
        settings = read(beside) if beside.is_file() else {}
        tokenizer = Tokenizer(content, settings, source=str(file))
        stated = settings.get("fingerprint")
        if stated is not None and stated != tokenizer.fingerprint:
            raise UserError(f"{file} is damaged, or not the one that {beside.name} was written with: its fingerprint differs")
        return tokenizer

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json into `directory`, each whole or not at all. Other tools read them too.

        Raises UserError when the file system refuses.
        """
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{role: self._tokens[token] for role, token in self._roles.items() if token is not None},
            "clean_up_tokenization_spaces": False,
            "fingerprint": self.fingerprint,
        }
        write_atomic(Path(directory, TOKENIZER_FILE), _dump(self._content))
        write_atomic(Path(directory, SETTINGS_FILE), _dump(settings))

    @property
    def vocab_size(self) -> int:
        """The number of ids; they are 0 to `vocab_size` - 1."""
        return len(self._tokens)

    @property
    def bos_id(self) -> int | None:
        """Begins a document. None where a tokenizer from elsewhere has none."""
        return self._roles["bos_token"]

    @property
    def eos_id(self) -> int | None:
        """Ends a document. None where a tokenizer from elsewhere has none."""
        return self._roles["eos_token"]

    @property
    def pad_id(self) -> int | None:
        """Stands for nothing, and is there for other tools' sake: no batch of openk3 is padded."""
        return self._roles["pad_token"]

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The control tokens, name -> id."""
        return MappingProxyType(self._special_ids)

    @cached_property
    def reserved(self) -> int:
        """How many ids stand for nothing, because the text it was trained on had no more merges to offer."""
        return unused(self._content)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides which ids a text gets."""
        return fingerprint(self._content)

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """For each id its bytes. A control token's are its name, so that it can be seen."""
        return tuple(token.encode() if n in self._controls else byte_string(token) for n, token in enumerate(self._tokens))

    @cached_property
    def text_lengths(self) -> tuple[int, ...]:
        """For each id the number of bytes of text that it stands for; 0 for control tokens."""
        return tuple(0 if n in self._controls else len(token) for n, token in enumerate(self.token_bytes))

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """The ids of `text`. What looks like a control token in it is plain text, unless `allow_special`.

        Raises UserError for a string that holds half a surrogate pair, which is no text.
        """
        return self.encode_batch([text], allow_special)[0]

    def encode_batch(self, texts: Sequence[str], allow_special: bool = False) -> list[list[int]]:
        """`encode` of each text, on all threads (or on RAYON_NUM_THREADS)."""
        pieces: list[str] = []
        plans: list[list[int | range]] = []
        for text in texts:
            plan: list[int | range] = []
            for part in self._parts(text) if allow_special else (text,):
                if isinstance(part, int):
                    plan.append(part)
                else:
                    start = len(pieces)
                    pieces += _pieces(part) if self._in_pieces else (part,)
                    plan.append(range(start, len(pieces)))
            plans.append(plan)
        try:
            encoded = [
                encoding.ids for group in _groups(pieces) for encoding in self._encoder.encode_batch_fast(group, add_special_tokens=False)
            ]
        except TypeError:
            for text in texts:
                _check_text(text)
            raise
        result = []
        for plan in plans:
            ids: list[int] = []
            for item in plan:
                if isinstance(item, int):
                    ids.append(item)
                else:
                    for n in item:
                        ids += encoded[n]
            result.append(ids)
        return result

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. Control tokens show by name, or not at all if `skip_special`.

        Raises ValueError for an id outside the vocabulary.
        """
        ids = list(ids)
        for token in (min(ids, default=0), max(ids, default=0)):
            self._check_id(token)
        kept = [token for token in ids if token not in self._controls] if skip_special else ids
        return b"".join([self.token_bytes[token] for token in kept]).decode("utf-8", "replace")

    def bytes_of(self, token: int, skip_special: bool = False) -> bytes:
        """The bytes of one id. Raises ValueError for an id outside the vocabulary."""
        self._check_id(token)
        return b"" if skip_special and token in self._controls else self.token_bytes[token]

    def _check_id(self, token: int) -> None:
        if not 0 <= token < len(self._tokens):
            raise ValueError(f"token id {token} is not in this vocabulary of {len(self._tokens)}")

    def _parts(self, text: str) -> Iterator[str | int]:
        """`text` with its control tokens as ids."""
        start = 0
        for found in self._special_pattern.finditer(text):
            if found.start() > start:
                yield text[start : found.start()]
            yield self._special_ids[found.group()]
            start = found.end()
        if start < len(text):
            yield text[start:]

    def _role(self, role: str, name: str, settings: Mapping[str, Any], source: str) -> int | None:
        stated = settings.get(role, name if name in self._special_ids else None)
        if isinstance(stated, Mapping):
            stated = stated.get("content")
        if stated is None:
            return None
        if not isinstance(stated, str) or stated not in self._special_ids:
            raise UserError(f"{source}: its {role} is {stated!r}, which is not one of its control tokens")
        return self._special_ids[stated]


class _Texts:
    """Passes texts on to be trained on, and counts what came by."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            _check_text(text)
            self.characters += len(text)
            yield from _pieces(text)


def _control(name: str, number: int) -> dict[str, Any]:
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, **options, "special": True}


def _pieces(text: str) -> Iterator[str]:
    """`text` in pieces of about PIECE characters, whose tokens under SPLIT are those of the whole text."""
    start = 0
    while len(text) - start > PIECE and (end := _PIECE_END.search(text, start + PIECE)):
        yield text[start : end.end()]
        start = end.end()
    yield text[start:]


def _groups(pieces: Sequence[str]) -> Iterator[Sequence[str]]:
    """Some pieces at a time: what the library holds of a text while it encodes it is fifty times the text."""
    start = size = 0
    for n, piece in enumerate(pieces):
        size += len(piece)
        if size >= 4 * PIECE:
            yield pieces[start : n + 1]
            start, size = n + 1, 0
    yield pieces[start:]


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise UserError(f"character {error.start:,} of the text is {half}, half of a surrogate pair: that is no Unicode text") from None


def _dump(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()

"""A checkpoint and its tokenizer, opened together and checked against each other: text in, text out.

session = Session.open("runs/demo")
out = session.complete(["def main("], SamplingParams(temperature=0.8), max_tokens=100, on_text=lambda n, piece: print(piece, end=""))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from openk3.checkpoint.load import load, locate
from openk3.engine.end_tokens import EndTokens, check_special_ids, end_tokens
from openk3.engine.generate import Completion, Timing, generate
from openk3.engine.sampler import SamplingParams
from openk3.engine.text_stream import TextStream
from openk3.errors import UserError
from openk3.model.decoder import Decoder
from openk3.text.tokenizer import Tokenizer
from openk3.text.xtml import CLOSE, CONTROL_TOKENS, END_OF_MESSAGE, pieces

OnText = Callable[[int, str], None]
"""Called as (prompt index, piece) with text that may be shown at once."""


@dataclass(frozen=True)
class Prompt:
    """A text to be continued, as the model gets it."""

    ids: tuple[int, ...]
    held: str
    """The end of the text that is not among `ids`: the first new token begins with it. A space, or nothing."""


@dataclass(frozen=True)
class TextCompletion:
    """What one prompt led to."""

    prompt: str
    prompt_ids: tuple[int, ...]
    """Without a space at the prompt's end, with which the first new token begins."""
    text: str
    """Without the prompt; ends before the stop string, if one was found."""
    tokens: Completion
    """`ids` holds also the tokens that made up the stop string."""
    stop: str | None
    """The stop string that ended it, if one did."""


@dataclass(frozen=True)
class TextGeneration:
    """One completion for each prompt, in order."""

    completions: tuple[TextCompletion, ...]
    timing: Timing
    state_bytes: int


@dataclass(frozen=True)
class Session:
    """A model that is ready to write."""

    model: Decoder
    tokenizer: Tokenizer
    ends: EndTokens
    checkpoint: Path

    @staticmethod
    def open(path: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Session:
        """The checkpoint at `path`, or the newest one of the run at `path`, with its tokenizer.

        Raises UserError when either is missing or damaged, or when the two do not belong together.
        """
        checkpoint = locate(path)
        home = tokenizer_directory(checkpoint)
        tokenizer = Tokenizer.load(home)
        check_special_ids(home, tokenizer.special_ids)
        model = load(checkpoint, dtype=dtype, device=device)
        _check_pair(model, tokenizer, checkpoint, home)
        return Session(model, tokenizer, end_tokens(checkpoint, home, tokenizer.special_ids), checkpoint)

    def encode_prompt(self, text: str) -> Prompt:
        """The tokens of a prompt: the beginning-of-text token, then the text. What looks like a control token in it is plain text.

        A space at its end is left to the first new token, which then must begin with one: tokenizers make a word and the space before it
        one token, so that a lone space is something a model has hardly seen.
        Raises UserError for text that is not valid Unicode, or for an empty prompt where there is no beginning-of-text token.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError("the prompt is not valid UTF-8 text") from None
        start = [] if self.tokenizer.bos_id is None else [self.tokenizer.bos_id]
        ids = self.tokenizer.encode(text)
        held = ""
        if ids and not self.tokenizer.bytes_of(ids[-1]).strip(b" "):
            ids, held = self.tokenizer.encode(text[:-1]), " "
        if not start + ids:
            raise UserError("the prompt is empty, and the tokenizer has no beginning-of-text token to start from")
        return Prompt(tuple(start + ids), held)

    @cached_property
    def _begin_with_space(self) -> torch.Tensor:
        """Which tokens begin with a space, bool `[tokenizer's vocabulary]`."""
        special = set(self.tokenizer.special_ids.values())
        begins = [token.startswith(b" ") and n not in special for n, token in enumerate(self.tokenizer.token_bytes)]
        return torch.tensor(begins)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The tokens of a conversation in the release's chat format, up to where the assistant's response begins (no think channel).

        Raises UserError for messages of the wrong shape, and for a tokenizer without the format's control tokens.
        """
        self._chat_ends()
        rendered = pieces(messages, thinking=False)
        return [token for piece in rendered for token in self.tokenizer.encode(piece.text, allow_special=piece.special)]

    def _chat_ends(self) -> frozenset[int]:
        """What ends a response: its channel or the message is closed."""
        special = self.tokenizer.special_ids
        missing = [name for name in CONTROL_TOKENS if name not in special]
        if missing:
            raise UserError(f"the tokenizer has no control token {missing[0]}: this model cannot chat")
        return frozenset((special[CLOSE], special[END_OF_MESSAGE]))

    def complete(
        self,
        prompts: Sequence[str],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        max_tokens: int,
        stops: Sequence[str] = (),
        chat: bool = False,
        on_text: OnText | None = None,
        cancelled: Callable[[], bool] | None = None,
        prefill_chunk: int = 512,
    ) -> TextGeneration:
        """Continue each prompt until an end token, a stop string or `max_tokens`; with `chat`, answer each as a user's message.

        Raises UserError for whatever is wrong with a prompt, a stop string or a limit, or for logits that hold no token.
        """
        if chat:
            encoded = [Prompt(tuple(self.encode_chat([{"role": "user", "content": prompt}])), "") for prompt in prompts]
        else:
            encoded = [self.encode_prompt(prompt) for prompt in prompts]
        streams = [TextStream(self.tokenizer, stops, one.held) for one in encoded]
        show = on_text or (lambda sequence, piece: None)

        def take(sequence: int, token: int, logprob: float) -> bool:
            piece = streams[sequence].push(token)
            if piece:
                show(sequence, piece)
            return streams[sequence].matched is not None

        made = generate(
            self.model,
            [one.ids for one in encoded],
            params,
            max_tokens=max_tokens,
            stop_ids=self.ends.ids | self._chat_ends() if chat else self.ends.ids,
            on_token=take,
            prefill_chunk=prefill_chunk,
            vocabulary=self.tokenizer.vocab_size,
            first_tokens=[self._begin_with_space if one.held else None for one in encoded],
            cancelled=cancelled,
        )
        completions = []
        for n, (prompt, stream, tokens) in enumerate(zip(prompts, streams, made.completions, strict=True)):
            rest = stream.finish()
            if rest:
                show(n, rest)
            completions.append(TextCompletion(prompt, encoded[n].ids, stream.text, tokens, stream.matched))
        return TextGeneration(tuple(completions), made.timing, made.state_bytes)


def tokenizer_directory(checkpoint: Path) -> Path:
    """Where a checkpoint's tokenizer lies: beside the weights, or in the run that the checkpoint belongs to.

    Raises UserError when it is in neither place.
    """
    places = [checkpoint] + ([checkpoint.parent.parent] if checkpoint.parent.name == "checkpoints" else [])
    for place in places:
        if (place / "tokenizer.json").is_file():
            return place
    raise UserError(
        f"there is no tokenizer.json in {' or '.join(map(str, places))}: text needs the tokenizer that the model was trained with"
    )


def _check_pair(model: Decoder, tokenizer: Tokenizer, checkpoint: Path, home: Path) -> None:
    config = model.config
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"the tokenizer in {home} has {tokenizer.vocab_size} tokens, the model in {checkpoint} only {config.vocab_size}: "
            "they do not belong together"
        )
    if None not in (tokenizer.bos_id, config.bos_token_id) and tokenizer.bos_id != config.bos_token_id:
        raise UserError(
            f"the tokenizer in {home} begins a text with token {tokenizer.bos_id}, the model in {checkpoint} with {config.bos_token_id}: "
            "they do not belong together"
        )

"""Generation over token ids: sequences of any lengths in one ragged batch, prefill in chunks, then decode, each leaving when it is done.

    out = generate(model, [[5, 6, 7], [9]], SamplingParams(temperature=0), max_tokens=20, stop_ids={2})
    out.completions[1].ids, out.completions[1].finish_reason

Text, stop strings and streaming are `openk3.engine.session`'s, on top of this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from openk3.engine.sampler import LogitsError, SamplingParams, sample
from openk3.errors import UserError
from openk3.model.decoder import Decoder
from openk3.model.state import DecoderState
from openk3.ops.segments import Segments

FinishReason = Literal["stop", "length", "cancelled"]
OnToken = Callable[[int, int, float], bool | None]
"""Called as (sequence, token, log-probability) for each new token but a stop token; True ends the sequence with `stop`."""


@dataclass(frozen=True)
class Completion:
    """What one sequence produced."""

    ids: tuple[int, ...]
    """New tokens, without the prompt and without the token that stopped it."""
    logprobs: tuple[float, ...]
    """Of each new token, nats, under the model's own distribution (`Sampled.logprobs`)."""
    finish_reason: FinishReason
    """`stop`: a stop token, or `on_token` said so. `length`: max_tokens. `cancelled`: the caller gave up."""
    stop_id: int | None = None
    """The stop token that ended it, if one did."""


@dataclass(frozen=True)
class Timing:
    """How long the two phases took."""

    prompt_tokens: int
    prefill_seconds: float
    decode_tokens: int
    """Tokens fed back through the model one a step; each sequence's first token comes out of the prefill."""
    decode_seconds: float

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def decode_rate(self) -> float:
        """New tokens a second, all sequences together."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass(frozen=True)
class Generation:
    """One completion for each prompt, in order, and the time they took."""

    completions: tuple[Completion, ...]
    timing: Timing
    state_bytes: int
    """What the sequences that were still running at the end remembered."""


@dataclass
class _Sequence:
    index: int
    prompt: Sequence[int]
    params: SamplingParams
    max_tokens: int
    generator: torch.Generator
    first: Tensor | None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_id: int | None = None

    def completion(self) -> Completion:
        return Completion(tuple(self.ids), tuple(self.logprobs), self.finish_reason or "cancelled", self.stop_id)


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    max_tokens: int | Sequence[int],
    stop_ids: Collection[int] = (),
    on_token: OnToken | None = None,
    prefill_chunk: int = 512,
    vocabulary: int | None = None,
    first_tokens: Sequence[Tensor | None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Generation:
    """Continue each prompt.

    `params` and `max_tokens`: one for all, or one a prompt. `prefill_chunk`: prompt tokens in one call, over the whole batch.
    `vocabulary`: only ids below it are drawn (a model's vocabulary may be padded beyond its tokenizer's). `first_tokens`: for each prompt
    a bool mask `[vocabulary]` of the tokens that its first new one may be, or None for any. `cancelled` is asked between calls. What a
    sequence gets is what it would get alone.

    Raises UserError for an empty prompt, an id outside the vocabulary, a limit that makes no sense, or logits that hold no token.
    """
    sequences = _sequences(model, prompts, params, max_tokens, first_tokens)
    if prefill_chunk < 1:
        raise UserError(f"prefill_chunk is {prefill_chunk}; it must be 1 or more")
    limit = model.config.vocab_size if vocabulary is None else min(vocabulary, model.config.vocab_size)
    stops = frozenset(stop_ids)
    gives_up = cancelled or (lambda: False)

    active = [one for one in sequences if one.max_tokens > 0]
    for one in sequences:
        if one.max_tokens == 0:
            one.finish_reason = "length"
    state = DecoderState.empty(model.config, sequences=len(active), dtype=model.dtype, device=model.device)
    started = time.perf_counter()
    logits_NV = _prefill(model, active, state, prefill_chunk, gives_up)
    prefilled = time.perf_counter()
    fed = sum(state.lengths)
    decode_tokens = 0
    while logits_NV is not None:
        _choose(active, logits_NV[:, :limit], stops, on_token)
        running = [n for n, one in enumerate(active) if one.finish_reason is None]
        if len(running) < len(active):
            active = [active[n] for n in running]
            state = state.select(running)
        if not active or gives_up():
            break
        tokens = torch.tensor([one.ids[-1] for one in active], device=model.device)
        logits_NV = model(tokens, Segments.of([1] * len(active)), state, logits="last").logits
        decode_tokens += len(active)
    timing = Timing(fed, prefilled - started, decode_tokens, time.perf_counter() - prefilled)
    return Generation(tuple(one.completion() for one in sequences), timing, state.nbytes)


def _sequences(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    max_tokens: int | Sequence[int],
    first_tokens: Sequence[Tensor | None] | None,
) -> list[_Sequence]:
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    masks = [None] * len(prompts) if first_tokens is None else list(first_tokens)
    if not len(each) == len(limits) == len(masks) == len(prompts):
        raise ValueError(f"{len(prompts)} prompts came with {len(each)} sampling parameters, {len(limits)} limits and {len(masks)} masks")
    made = []
    for index, (prompt, one, limit, mask) in enumerate(zip(prompts, each, limits, masks, strict=True)):
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise UserError(f"max_tokens is {limit!r}; it must be a whole number, 0 or more")
        if not prompt:
            raise UserError(f"prompt {index} holds no token; start from the beginning-of-text token to write freely")
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= model.config.vocab_size:
            raise UserError(
                f"prompt {index} holds token {low if low < 0 else high}, outside the model's vocabulary of {model.config.vocab_size}: "
                "the tokenizer is not this model's"
            )
        made.append(_Sequence(index, prompt, one, limit, one.generator(), mask))
    return made


def _prefill(model: Decoder, active: Sequence[_Sequence], state: DecoderState, chunk: int, gives_up: Callable[[], bool]) -> Tensor | None:
    """Feed all prompts, at most `chunk` tokens a call; each sequence's last logits `[N, V]`, or None if there are none."""
    if not active:
        return None
    position = [0] * len(active)
    last: list[Tensor | None] = [None] * len(active)
    while any(row is None for row in last):
        if gives_up():
            return None
        room = chunk
        taken: list[int] = []
        tokens: list[int] = []
        for n, one in enumerate(active):
            take = min(room, len(one.prompt) - position[n])
            tokens.extend(one.prompt[position[n] : position[n] + take])
            taken.append(take)
            room -= take
        out = model(torch.tensor(tokens, dtype=torch.int64, device=model.device), Segments.of(taken), state, logits="last")
        for n, one in enumerate(active):
            position[n] += taken[n]
            if taken[n] and position[n] == len(one.prompt):
                last[n] = out.logits[n]
    return torch.stack([row for row in last if row is not None])


def _choose(active: Sequence[_Sequence], logits_NV: Tensor, stops: frozenset[int], on_token: OnToken | None) -> None:
    """Draw each sequence's next token and note which sequences are done."""
    restricted = [n for n, one in enumerate(active) if one.first is not None and not one.ids]
    if restricted:
        logits_NV = logits_NV.clone()
        for n in restricted:
            allowed = active[n].first
            assert allowed is not None
            logits_NV[n].masked_fill_(~allowed.to(logits_NV.device), -torch.inf)
    try:
        chosen = sample(logits_NV, [one.params for one in active], [one.generator for one in active])
    except LogitsError as error:
        raise error.renumbered([one.index for one in active]) from None
    for one, token, logprob in zip(active, chosen.ids.tolist(), chosen.logprobs.tolist(), strict=True):
        if token in stops:
            one.finish_reason, one.stop_id = "stop", token
            continue
        one.ids.append(token)
        one.logprobs.append(logprob)
        if on_token is not None and on_token(one.index, token, logprob):
            one.finish_reason = "stop"
        elif len(one.ids) == one.max_tokens:
            one.finish_reason = "length"

"""Generation over ids: against the plain way (the whole text again for each token), and against a model that follows a script."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from openk3.config import ModelConfig
from openk3.engine.generate import Generation, generate
from openk3.engine.sampler import LogitsError, SamplingParams
from openk3.errors import UserError
from openk3.model.decoder import Decoder, DecoderOutput
from openk3.model.state import DecoderState
from openk3.ops.segments import Segments

GREEDY = SamplingParams(temperature=0)
PROMPTS = [[5, 6, 7, 8, 9], [100], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [42, 43]]


@pytest.fixture(scope="module")
def model() -> Decoder:
    """A few layers of every kind, in float64: batches of different shapes then agree far below any gap between logits."""
    config = ModelConfig.named("debug13").replace(num_layers=5, mla_layers=(3, 4), attn_res_block_size=2, vocab_size=128, bos_token_id=None,
                                                  eos_token_id=None, pad_token_id=None)  # fmt: skip
    return Decoder(config, generator=torch.Generator().manual_seed(0)).to(torch.float64).eval()


class Scripted:
    """Stands in for a Decoder: after a text of length n, the token `script(text)` has the greatest logit."""

    def __init__(self, script: Any, vocabulary: int = 32) -> None:
        self.config = ModelConfig.named("debug13").replace(vocab_size=vocabulary, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.script = script
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, tokens: torch.Tensor, segments: Segments, state: DecoderState, *, logits: str) -> DecoderOutput:
        assert logits == "last"
        self.calls.append(segments.lengths)
        state.advance(segments)
        rows = torch.zeros(segments.count, self.config.vocab_size)
        for n, length in enumerate(segments.lengths):
            if length:
                value = self.script(int(tokens[segments.starts[n] + length - 1]), state.lengths[n])
                if isinstance(value, int):
                    rows[n, value] = 10.0
                else:
                    rows[n] = value
        return DecoderOutput(rows, torch.empty(0))


def run_script(model: Scripted, prompts: list[list[int]], **settings: Any) -> Generation:
    return generate(model, prompts, settings.pop("params", GREEDY), **settings)  # type: ignore[arg-type]


def count_up(token: int, length: int) -> int:
    return (token + 1) % 32


def greedy_the_plain_way(model: Decoder, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    text, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(tokens):
            row = model(torch.tensor(text), Segments.of([len(text)])).logits[-1]
            text.append(int(row.argmax()))
            logprobs.append(float(torch.log_softmax(row, 0)[text[-1]]))
    return text[len(prompt) :], logprobs


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_greedy_batch_of_different_lengths_equals_each_recomputed_whole(model: Decoder, chunk: int) -> None:
    out = generate(model, PROMPTS, GREEDY, max_tokens=12, prefill_chunk=chunk)
    for prompt, done in zip(PROMPTS, out.completions, strict=True):
        ids, logprobs = greedy_the_plain_way(model, prompt, 12)
        assert list(done.ids) == ids
        assert done.logprobs == pytest.approx(logprobs, abs=1e-9)
        assert done.finish_reason == "length"


def test_sequence_is_undisturbed_when_others_come_and_go(model: Decoder) -> None:
    params = [SamplingParams(seed=n, temperature=0.9, top_k=20) for n in range(4)]
    together = generate(model, PROMPTS, params, max_tokens=[3, 15, 1, 9], prefill_chunk=4)
    for n, limit in enumerate([3, 15, 1, 9]):
        alone = generate(model, [PROMPTS[n]], params[n], max_tokens=limit)
        assert alone.completions[0].ids == together.completions[n].ids
        assert len(together.completions[n].ids) == limit


def test_stop_token_ends_its_sequence_only_and_is_left_out() -> None:
    out = run_script(Scripted(count_up), [[3], [20], [8, 9]], max_tokens=6, stop_ids={23, 5})
    first, second, third = out.completions
    assert (first.ids, first.finish_reason, first.stop_id) == ((4,), "stop", 5)
    assert (second.ids, second.finish_reason, second.stop_id) == ((21, 22), "stop", 23)
    assert (third.ids, third.finish_reason, third.stop_id) == ((10, 11, 12, 13, 14, 15), "length", None)
    assert all(len(one.ids) == len(one.logprobs) for one in out.completions)


def test_finished_sequences_leave_the_batch() -> None:
    model = Scripted(count_up)
    out = run_script(model, [[1, 2, 3], [4], [5, 6]], max_tokens=[1, 4, 2], prefill_chunk=4)
    assert model.calls == [(3, 1, 0), (0, 0, 2), (1, 1), (1,), (1,)]
    assert out.timing.prompt_tokens == 6
    assert out.timing.decode_tokens == 4


def test_limit_of_zero_runs_nothing() -> None:
    model = Scripted(count_up)
    out = run_script(model, [[1], [2]], max_tokens=0)
    assert [(one.ids, one.finish_reason) for one in out.completions] == [((), "length")] * 2
    assert model.calls == []
    assert run_script(model, [], max_tokens=5).completions == ()


def test_on_token_sees_each_token_and_can_stop() -> None:
    seen: list[tuple[int, int]] = []

    def watch(sequence: int, token: int, logprob: float) -> bool:
        seen.append((sequence, token))
        return token == 12

    out = run_script(Scripted(count_up), [[1], [10]], max_tokens=3, on_token=watch)
    assert seen == [(0, 2), (1, 11), (0, 3), (1, 12), (0, 4)]
    assert [one.finish_reason for one in out.completions] == ["length", "stop"]
    assert out.completions[1].ids == (11, 12)


def test_cancelling_keeps_what_was_produced() -> None:
    seen: list[int] = []
    out = run_script(
        Scripted(count_up), [[1], [10]], max_tokens=100, on_token=lambda n, t, _: seen.append(t), cancelled=lambda: len(seen) >= 6
    )
    assert [(one.ids, one.finish_reason) for one in out.completions] == [((2, 3, 4), "cancelled"), ((11, 12, 13), "cancelled")]
    early = run_script(Scripted(count_up), [[1]], max_tokens=5, cancelled=lambda: True)
    assert early.completions[0].ids == () and early.completions[0].finish_reason == "cancelled"


def test_ids_beyond_the_tokenizer_are_never_drawn() -> None:
    row = torch.zeros(32)
    row[[30, 31]] = 50.0
    row[7] = 1.0
    out = run_script(Scripted(lambda token, length: row), [[1]], max_tokens=3, vocabulary=30)
    assert out.completions[0].ids == (7, 7, 7)


def test_first_token_may_be_restricted() -> None:
    allowed = torch.zeros(32, dtype=torch.bool)
    allowed[[20, 25]] = True
    out = run_script(Scripted(count_up), [[1], [1]], max_tokens=3, first_tokens=[allowed, None])
    assert [one.ids for one in out.completions] == [(20, 21, 22), (2, 3, 4)]


def test_logits_that_hold_no_token_name_the_sequence() -> None:
    bad = torch.full((32,), float("nan"))
    with pytest.raises(LogitsError, match="sequence 1 NaN") as caught:
        run_script(Scripted(lambda token, length: bad if token == 11 else count_up(token, length)), [[1], [10]], max_tokens=[1, 9])
    assert caught.value.rows == (1,)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[1], []], {"max_tokens": 1}, "prompt 1 holds no token"),
        ([[1, 32]], {"max_tokens": 1}, "token 32, outside the model's vocabulary of 32"),
        ([[-1]], {"max_tokens": 1}, "token -1"),
        ([[1]], {"max_tokens": -1}, "max_tokens is -1"),
        ([[1]], {"max_tokens": 1, "prefill_chunk": 0}, "prefill_chunk is 0"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(prompts: list[list[int]], settings: dict[str, Any], message: str) -> None:
    model = Scripted(count_up)
    with pytest.raises(UserError, match=message):
        run_script(model, prompts, **settings)
    assert model.calls == []

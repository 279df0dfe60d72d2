"""A checkpoint with a tokenizer, small enough to be made for each test module."""

from __future__ import annotations

from pathlib import Path

import torch

from openk3.checkpoint.save import save_release
from openk3.config import ModelConfig
from openk3.model.decoder import Decoder
from openk3.text.tokenizer import Tokenizer

TEXT = "def f(x):\n    return x + 1\n\n\nclass Größe:\n    '''日本語 — naïve'''\n" * 8
VOCABULARY = 300


def tokenizer() -> Tokenizer:
    """300 tokens: the bytes, the control tokens, a few merges."""
    return Tokenizer.train([TEXT], VOCABULARY)


def config(vocabulary: int = VOCABULARY) -> ModelConfig:
    """Four layers, every system, the tokenizer's control tokens."""
    own = tokenizer()
    return ModelConfig.named("debug13").replace(
        num_layers=4,
        mla_layers=(3,),
        attn_res_block_size=2,
        vocab_size=vocabulary,
        bos_token_id=own.bos_id,
        eos_token_id=own.eos_id,
        pad_token_id=own.pad_id,
    )


def write(directory: Path, settings: ModelConfig | None = None) -> Path:
    """A checkpoint directory with random weights, and the tokenizer beside them."""
    model = Decoder(settings or config(), generator=torch.Generator().manual_seed(1))
    save_release(model, directory)
    tokenizer().save(directory)
    return directory

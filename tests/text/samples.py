"""Texts and a small tokenizer that the tests of text and batches share."""

from __future__ import annotations

from functools import cache

from openk3.text.tokenizer import Tokenizer

CODE = '''def scale(values, factor=2):
    """Multiply each value."""
    total = 0
    for value in values:
        if value:
            total += value * factor
    return total


class Counter:
    def __init__(self, start=0):
        self.count = start

    def step(self, size=1):
        self.count += size
        return self.count
'''
PROSE = "The model reads the text, and it doesn't forget what the text has said: that is what the memory is for. Ceci n'est pas une pipe. "


@cache
def small() -> Tokenizer:
    """A tokenizer of 400 tokens."""
    return Tokenizer.train([CODE, PROSE * 3, CODE.replace("value", "item")], 400)

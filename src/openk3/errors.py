"""The one exception that is meant for people: bad input, said in one line."""

from __future__ import annotations


class UserError(ValueError):
    """Something a user gave is wrong. The message says what, where and what to do; commands print it as one line and exit with 2."""

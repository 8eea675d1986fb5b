"""Digests of values by their meaning: equal values have equal digests, however their numbers are written."""

from __future__ import annotations

import hashlib
import json
from typing import cast

import msgspec


def content_digest(value: object) -> str:
    """Return the SHA-256, in hexadecimal, of what ``msgspec`` encodes; 1, 1.0 and true are the same number."""
    return hashlib.sha256(json.dumps(_plain(msgspec.to_builtins(value))).encode()).hexdigest()


def _plain(value: object) -> object:
    """Return a value with whole numbers as integers, as those that are equal must be written alike."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in cast("dict[str, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast("list[object]", value)]
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return value

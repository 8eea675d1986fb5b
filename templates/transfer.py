"""Who sends which bytes of which layer state to whom."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Bytes ``first_byte .. end_byte - 1`` of a state's flat buffer go from one rank to another."""

    state: str
    source: int
    target: int
    first_byte: int
    end_byte: int

"""What agents and coordinators say to each other, as a digest: two that differ would misunderstand each other.

An agent tells its own in a header of the request that opens its connection, before anything is said that only one
dialect has; a coordinator with another one answers why it is refused in such a header, too. Versions of all else are
compared later, where some may differ (:mod:`resilient.protocol.alike`). Must not import torch.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import msgspec

from resilient.agent.network.conversation import Attached, Heard, Hello
from resilient.agent.network.introductions import Introduce, Introduced
from resilient.protocol.alike import installed, short
from resilient.protocol.generation_packing import Common, PackedCopies
from resilient.protocol.messages import FromAgentMessage, ToAgentMessage

SPOKEN = "Resilient-Dialect"
"""Header of a request: what who asks says and hears."""
REFUSED = "Resilient-Refused"
"""Header of an answer: why who asks is to have no part in the job."""

_MESSAGES = (Hello, Attached, Heard, Introduce, Introduced, FromAgentMessage, ToAgentMessage, Common, PackedCopies)
_IN_WORDS = ("description", "title")
_MOST_TOLD = 64


@cache
def dialect() -> str:
    """Return this installation's: its version, for people, and the digest of all messages."""
    told = _without_words(msgspec.json.schema_components(_MESSAGES, ref_template="{name}"))
    digest = hashlib.sha256(msgspec.json.encode(told, order="sorted")).hexdigest()
    return f"{installed()['versions']['resilient']}/{short(digest)}"


def why_misunderstood(spoken: str) -> str:
    """Return why nothing can be said to who speaks another dialect, "" if its messages are this one's."""
    if spoken.rpartition("/")[2] == dialect().rpartition("/")[2]:
        return ""
    got = ascii(spoken[:_MOST_TOLD])[1:-1] or "those of an old version"
    return (
        f"an agent must exchange the messages of its coordinator, {dialect()}, got {got}; install the same versions of "
        f"resilient and msgspec on all nodes"
    )


def _without_words(told: Any) -> Any:
    """Return a schema without what is only told to people."""
    if isinstance(told, dict):
        return {name: _without_words(each) for name, each in told.items() if name not in _IN_WORDS}
    return [_without_words(each) for each in told] if isinstance(told, (list, tuple)) else told

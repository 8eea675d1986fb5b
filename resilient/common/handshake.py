"""How the two ends of a connection between workers show each other that they know the job's secret, without saying it.

Each end says a number that nobody has seen before, and answers the other's with what only the secret makes of both. So
neither end takes a stranger for a worker, and nothing that is overheard is of use on another connection. Where the
proofs are of an address, too, nobody who listens at one can pass on what comes there to another. What follows on the
connection is not encrypted.

Source: the symmetric mutual authentication of ISO/IEC 9798-4, with HMAC-SHA256.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

NONCE_BYTES = 32
PROOF_BYTES = 32


def nonce() -> bytes:
    """Return a number that nobody has seen before. ``NONCE_BYTES``"""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, role: bytes, *said: bytes) -> bytes:
    """Return what shows that one end knows a secret. ``PROOF_BYTES``

    Args:
        secret: What both ends know.
        role: Who shows it: what one end has shown is nothing that the other could.
        said: What both ends have said, and know; each of a fixed length, but for the last.
    """
    return hmac.digest(secret, b"|".join((role, *said)), hashlib.sha256)


def is_proof(shown: bytes, secret: bytes, role: bytes, *said: bytes) -> bool:
    """Return whether something shown is the :func:`proof`; that takes as long whatever is wrong with it."""
    return hmac.compare_digest(shown, proof(secret, role, *said))


def secret_for(token: str, purpose: str) -> bytes:
    """Return a secret for one purpose, of which nobody learns the token."""
    return hmac.digest(token.encode(), purpose.encode(), hashlib.sha256)

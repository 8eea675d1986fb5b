"""The certificate with which a job's coordinator shows that it is the job's, and TLS that takes no other.

Key and certificate are made of the job's token: everybody who has the token makes the same ones, and no files need to
be handed out. So a coordinator shows that it has the token, on whatever machine it is, before anybody tells it
anything; who reads along learns neither the token nor what is said. As good as the token: one that can be guessed can
be guessed from the certificate, too, which the coordinator shows to everybody.

Source: Ed25519 (RFC 8032; signatures need no random numbers, so certificates are equal), TLS 1.3 (RFC 8446). Must not
import torch.
"""

from __future__ import annotations

import datetime
import os
import ssl
from functools import lru_cache

from resilient.common.handshake import secret_for

SERVER_NAME = "resilient-coordinator"
"""What the certificate calls whoever shows it, wherever it listens."""

_SERIAL_NUMBER = 1
_BEGINS = datetime.datetime(2020, 1, 1)
_ENDS = datetime.datetime(9999, 12, 31, 23, 59, 59)  # the last there is: the token is what has an end


@lru_cache(maxsize=8)
def _made_of(token: str) -> tuple[str, str]:
    """Return the certificate and its key, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import NameOID

    key = Ed25519PrivateKey.from_private_bytes(secret_for(token, "coordinator"))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(_SERIAL_NUMBER)
        .not_valid_before(_BEGINS)
        .not_valid_after(_ENDS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .sign(key, algorithm=None)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode()


def certificate_of(token: str) -> str:
    """Return the certificate of a job, as PEM; it tells nobody the token."""
    return _made_of(token)[0]


def server_context(token: str) -> ssl.SSLContext:
    """Return the TLS of the job's coordinator."""
    context = _newest(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # nobody resumes a session of TLS: they would cost each connection a packet and two keys
    with os.fdopen(os.memfd_create("certificate"), "w") as file:  # the standard library reads keys from files alone
        file.write("".join(_made_of(token)))
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def client_context(token: str) -> ssl.SSLContext:
    """Return the TLS of whoever speaks to the job's coordinator: it takes that one's certificate and no other."""
    context = _newest(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate is the job's: it has no place
    context.load_verify_locations(cadata=certificate_of(token))
    return context


def _newest(side: int) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context

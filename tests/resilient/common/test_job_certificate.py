"""The certificate of a job: equal wherever it is made, and no other one is taken for it."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from resilient.common.job_certificate import SERVER_NAME, certificate_of, client_context, server_context

TOKEN = "0123456789abcdef"


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, name: str | None = None) -> bytes:
    """Return what a client hears that trusts the server, over a real connection."""

    def serve() -> None:
        with listener.accept()[0] as connection:
            connection.settimeout(60)
            try:
                with server.wrap_socket(connection, server_side=True) as secured:
                    secured.sendall(b"heard")
            except ssl.SSLError:
                pass  # the client says why

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(60)
        serving = pool.submit(serve)
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=60) as connection,
                client.wrap_socket(connection, server_hostname=name) as secured,
            ):
                assert secured.version() == "TLSv1.3"
                return secured.recv(5)
        finally:
            serving.result()


def test_those_who_have_the_token_understand_each_other() -> None:
    assert shake_hands(server_context(TOKEN), client_context(TOKEN)) == b"heard"


def test_others_are_not_told_anything() -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server_context("another token"), client_context(TOKEN))


def test_certificate_of_the_same_name_with_another_key_is_not_taken() -> None:
    """It says the same of itself, so what it is signed with is what counts."""
    ours, theirs = certificate_of(TOKEN), certificate_of(TOKEN + "x")
    assert ours != theirs
    both = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    both.load_verify_locations(cadata=ours + theirs)
    first, second = both.get_ca_certs()
    assert {**first} == {**second}
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server_context(TOKEN + "x"), client_context(TOKEN))


def test_other_programs_know_the_coordinator_by_its_certificate() -> None:
    """As Prometheus and curl do: the file and the name, checked by the rules of the web."""
    web = ssl.create_default_context(cadata=certificate_of(TOKEN))
    assert shake_hands(server_context(TOKEN), web, SERVER_NAME) == b"heard"
    with pytest.raises(ssl.SSLCertVerificationError, match="another-name"):
        shake_hands(server_context(TOKEN), web, "another-name")


def test_every_process_makes_the_same() -> None:
    code = f"from resilient.common.job_certificate import certificate_of; print(certificate_of({TOKEN!r}), end='')"
    made = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout
    assert made == certificate_of(TOKEN)
    assert "PRIVATE" not in made

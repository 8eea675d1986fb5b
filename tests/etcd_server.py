"""A real etcd server for tests: started, killed, stopped and woken like any process."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAM = shutil.which("etcd") or shutil.which("etcd", path="/usr/bin:/usr/local/bin")

needs_etcd = pytest.mark.skipif(PROGRAM is None, reason="no etcd server on this machine: apt-get install etcd-server")


def _free_port() -> int:
    """Return a port that nobody listens at, below those that systems hand out themselves to connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port


class EtcdServer:
    """One server, whose data outlive its process."""

    def __init__(self, folder: Path, address: str, on: Callable[[list[str]], list[str]]) -> None:
        """Choose ports; :meth:`start` it."""
        self._folder = folder
        self._address = address
        self._on = on
        self._client_port, self._peer_port = _free_port(), _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Where clients find it."""
        return f"{self._address}:{self._client_port}"

    def start(self) -> None:
        """Start it, or start it again on the same data, and wait until it answers."""
        assert PROGRAM is not None
        client, peer = f"http://{self.endpoint}", f"http://127.0.0.1:{self._peer_port}"
        urls = ["--listen-client-urls", client, "--advertise-client-urls", client]
        peers = [
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            f"default={peer}",
        ]
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._on([PROGRAM, "--data-dir", str(self._folder / "data"), *urls, *peers]), stdout=log, stderr=log
            )
        import pyetcd
        from pyetcd.exceptions import Etcd3Exception

        host, port = self.endpoint.split(":")
        deadline = time.monotonic() + 30
        while True:
            with pyetcd.client(host, int(port), timeout=1) as client:
                try:
                    client.get("ready")
                    return
                except Etcd3Exception:
                    if self._process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError((self._folder / "log").read_text(errors="replace")[-2000:]) from None
                    time.sleep(0.1)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; after SIGKILL it is gone when this returns."""
        assert self._process is not None
        self._process.send_signal(number)
        if number is signal.SIGKILL:
            self._process.wait()


@contextmanager
def etcd_server(
    folder: Path, address: str = "127.0.0.1", on: Callable[[list[str]], list[str]] = lambda line: line
) -> Iterator[EtcdServer]:
    """Run a server with its data in a folder of this test, at an address; ``on`` has a command line run there."""
    server = EtcdServer(folder, address, on)
    server.start()
    try:
        yield server
    finally:
        server.send(signal.SIGKILL)

"""Warm start: a process that has imported torch and the script's modules once, and forks nodes and workers.

Owns how a worker process begins and ends. Single-threaded for its whole life: forking with threads running copies
locks nobody will ever release. Importing torch takes seconds, a fork milliseconds.

``python -m resilient.protocol.forkserver --fd N --preload SCRIPT`` serves one socket (``SOCK_SEQPACKET``, one JSON
message a packet) until it closes; without ``--parent``, until the last child has ended. It answers every :class:`Spawn`
in order with :class:`Started` and reports :class:`Exited` on its own. A node is a new session: a module's ``main`` (the
node agent) and a spawner forked for it, which runs this same loop for the node's workers. Everybody dies with its
parent, but for a forkserver that is told of none.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import time
import traceback
from typing import Literal

import msgspec

from resilient.common.processes import command_for, die_with_parent, open_files_anew
from resilient.common.sources import keep_sources

# What torch, numpy and nodes import on first use would otherwise be in every worker's first step, or in a recovery:
# autograd's with the gradient of another stage takes 0.4 s.
PRELOADED = (
    "torch",
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils._device",
    "numpy.random",
    "numpy.ma",
    "numpy.ctypeslib",
    "cryptography.hazmat.primitives.serialization",
    "cryptography.x509",
    "resilient.trainer",
)
# Imported by the first model that is built, which would otherwise be in every worker's start (0.35 s of a core).
PRELOADED_WITH = {"transformers": "transformers.modeling_utils"}
MAX_PACKET_BYTES = 128 << 10
_SCRIPT_SEED = 0


class Spawn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a process.

    Args:
        kind: "worker" runs the script ``argv[0]``; "node" calls ``main(argv[1:])`` of the module ``argv[0]`` with
            ``--spawner-fd N`` appended, in a new session.
        env: The whole environment.
        directory: Working directory.
        log: File that stdout and stderr are appended to.
        stdout_log: File that stdout is appended to instead; "" for none.
    """

    kind: Literal["node", "worker"]
    argv: tuple[str, ...]
    env: dict[str, str]
    directory: str
    log: str
    stdout_log: str = ""


class Signal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send a signal to a child; nothing happens when it has ended (its number may be another's by now)."""

    pid: int
    number: int


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The process runs, or (pid 0) could not be started."""

    pid: int
    error: str = ""


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A child ended; ``exit_code`` is negative for a signal."""

    pid: int
    exit_code: int


_decode_request = msgspec.json.Decoder(Spawn | Signal).decode
decode_reply = msgspec.json.Decoder(Started | Exited).decode


class Forkserver:
    """Forks on request until its socket closes."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._children: dict[int, int] = {}  # pid -> pidfd
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def serve(self, *, to_the_last: bool = False) -> None:
        """Answer requests; return when the other end is gone, or then when no child is left."""
        is_asked = True
        while is_asked or self._children:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.data)
                elif not self._answer():
                    if not to_the_last:
                        return
                    is_asked = False
                    self._selector.unregister(self._connection)

    def _answer(self) -> bool:
        packet = self._connection.recv(MAX_PACKET_BYTES)
        if not packet:
            return False
        request = _decode_request(packet)
        if isinstance(request, Signal):
            if request.pid in self._children:
                signal.pidfd_send_signal(self._children[request.pid], request.number)
            return True
        try:
            self._reply(Started(pid=self._fork(request)))
        except OSError as error:
            self._reply(Started(pid=0, error=str(error)))
        return True

    def _fork(self, request: Spawn) -> int:
        if request.kind == "node":
            _import_if_possible(request.argv[0])  # once for all nodes
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run_child(request, parent, [self._connection.fileno(), *self._children.values(), self._selector_fd()])
        self._children[pid] = os.pidfd_open(pid)
        self._selector.register(self._children[pid], selectors.EVENT_READ, data=pid)
        return pid

    def _selector_fd(self) -> int:
        return self._selector.fileno() if isinstance(self._selector, selectors.EpollSelector) else -1

    def _reap(self, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        pidfd = self._children.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._reply(Exited(pid=pid, exit_code=os.waitstatus_to_exitcode(status)))

    def _reply(self, message: Started | Exited) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # noticed by the next recv
            self._connection.send(msgspec.json.encode(message))


def _run_child(request: Spawn, parent: int, inherited: list[int]) -> None:
    """Become the requested process; never returns."""
    exit_code = 1
    try:
        die_with_parent(parent)
        for fd in inherited:
            if fd >= 0:
                os.close(fd)
        open_files_anew()  # a module that was imported before may keep some
        gc.unfreeze()
        _enter(request)
        exit_code = _run_node(request) if request.kind == "node" else _run_worker(request)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code)


def _enter(request: Spawn) -> None:
    """Take over environment, directory and log."""
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.directory)
    os.makedirs(os.path.dirname(request.log), exist_ok=True)
    for stream, path in ((1, request.stdout_log or request.log), (2, request.log)):
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, stream)
        os.close(log)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


def _run_node(request: Spawn) -> int:
    os.setsid()
    agent_end, spawner_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent = os.getpid()
    if os.fork() == 0:
        try:
            die_with_parent(agent)
            agent_end.close()
            Forkserver(spawner_end).serve()
        finally:
            os._exit(0)
    spawner_end.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = importlib.import_module(request.argv[0]).main
    return main([*request.argv[1:], "--spawner-fd", str(agent_end.detach())])


def _run_worker(request: Spawn) -> int:
    script = request.argv[0]
    sys.argv = list(request.argv)
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    faulthandler.enable()  # a crash shows in the log where it was
    faulthandler.register(signal.SIGUSR1)  # the agent's question where a worker that does not answer hangs
    _set_num_threads(int(request.env.get("OMP_NUM_THREADS", "1")))
    seed_script()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return _exit_code(end)
    except BaseException as error:
        traceback.print_exc()
        _write_error_file(request.env.get("TORCHELASTIC_ERROR_FILE"), error)
        return 1
    return 0


def _set_num_threads(num_threads: int) -> None:
    """Ask torch itself: it read OMP_NUM_THREADS when it was imported, in the forkserver."""
    torch = sys.modules.get("torch")
    if torch is not None and num_threads > 1:
        torch.set_num_threads(num_threads)


def seed_script() -> None:
    """Seed Python's, numpy's and torch's generators for a script: modules it makes have equal values on all workers."""
    numpy, torch = importlib.import_module("numpy"), importlib.import_module("torch")
    random.seed(_SCRIPT_SEED)
    numpy.random.seed(_SCRIPT_SEED)
    torch.manual_seed(_SCRIPT_SEED)


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1


def _write_error_file(path: str | None, error: BaseException) -> None:
    """Write what torch.distributed.elastic's tools expect to find."""
    if not path:
        return
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)


def script_imports(source: str) -> list[str]:
    """Return the modules that a script's top-level import statements name, in order."""
    modules: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules.append(node.module)
    return list(dict.fromkeys(modules))


def preload(script: str) -> None:
    """Import what the workers will need. Failures are left for the script to meet: there they make sense."""
    modules = list(PRELOADED)
    with contextlib.suppress(OSError, SyntaxError, ValueError), open(script, encoding="utf-8") as file:
        modules += script_imports(file.read())
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    for module in modules:
        _import_if_possible(module)
    for module, needed in PRELOADED_WITH.items():
        if module in sys.modules:
            _import_if_possible(needed)
    keep_sources()


def _import_if_possible(module: str) -> None:
    with contextlib.suppress(Exception, SystemExit):
        importlib.import_module(module)


def main() -> None:
    """Serve the socket given by ``--fd``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, help="dies with it; without, it lives as long as its children")
    parser.add_argument("--preload", metavar="SCRIPT")
    options = parser.parse_args()
    if options.parent is not None:
        die_with_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches whole groups; the agent decides who ends
    if options.preload is not None:
        preload(options.preload)
    if options.preload is not None and len(os.listdir("/proc/self/task")) > 1:
        # Something imported has started threads: begin again without it, cold but safe.
        cold = command_for("resilient.protocol.forkserver", "--fd", str(options.fd))
        cold += [] if options.parent is None else ["--parent", str(options.parent)]
        os.set_inheritable(options.fd, True)
        os.execv(sys.executable, cold)
    gc.collect()
    gc.freeze()  # collections in the children leave the shared pages alone
    os.set_inheritable(options.fd, False)
    Forkserver(socket.socket(fileno=options.fd)).serve(to_the_last=options.parent is None)
    os._exit(0)  # nothing of what was imported needs to be taken down, which takes as long as a quarter of the import


if __name__ == "__main__":
    main()

"""Writes checkpoints, and is killed at every moment of that: ``python -m tests.resilient.state.cut_writer FOLDER``.

In each folder ``FOLDER/<cut>`` is a run with a checkpoint of step 1. A process of its own then writes that of step 2,
and is killed before its n-th call that changes files, ``call-<n>``, or by the kernel as a file would grow beyond n
bytes, ``byte-<n>``. Calls are cut until there is none left.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

from resilient.state import checkpoint
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.state.manifest import Manifest, folder, write_manifest
from tests.resilient.small import CPU, TiedModel, all_of, make_job

CHANGES = ("os.rename", "os.remove", "os.mkdir")
"""Calls that change folders, as audit hooks name them."""


def states_at(step: int) -> dict[str, LayerState]:
    """Return states that are those of one step: no two steps have a value in common."""
    specs = TiedModel(num_blocks=2).layers
    states = {spec.name: LayerState(spec, BufferLayout.of(spec), ("m",), torch.float32, CPU) for spec in specs}
    for number, state in enumerate(states.values()):
        state.buffer.copy_(torch.arange(state.buffer.numel()) + 1000.0 * number + 1e5 * step)
    return states


def write(run: Path, step: int) -> None:
    """Write a checkpoint, in two parts, as two workers do, and its manifest."""
    states = list(states_at(step).values())
    path = folder(run, step)
    saved = checkpoint.save(path, all_of(states[:1])) | checkpoint.save(path, all_of(states[1:]))
    write_manifest(path, Manifest(step=step, recipe=make_job().recipe(), states=saved))


def cut_before_call(number: int) -> None:
    """Have this process killed before its n-th call that changes files, or that waits for them to be on the disk."""
    calls = count(1)

    def note() -> None:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            note()

    fsync = os.fsync

    def noted_fsync(descriptor: int) -> None:
        note()
        fsync(descriptor)

    os.fsync = noted_fsync
    sys.addaudithook(hear)


def cut_at_byte(number: int) -> None:
    """Have this process killed as a file would get more bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))


def write_cut(run: Path, cut: Callable[[int], None], number: int) -> bool:
    """Write a checkpoint, and begin a second one; return whether that was finished."""
    write(run, 1)
    pid = os.fork()
    if pid == 0:
        try:
            cut(number)
            write(run, 2)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"{cut.__name__}({number}) failed otherwise"
    return not os.WIFSIGNALED(status)


def main() -> None:
    """Write, and be cut, everywhere."""
    root = Path(sys.argv[1])
    for number in count(1):
        if write_cut(root / f"call-{number}", cut_before_call, number):
            break
    sizes = sorted({file.stat().st_size for file in folder(root / "call-1", 1).iterdir()})
    for number in sorted({0, *(part for size in sizes for part in (1, size // 2, size - 1))}):
        assert not write_cut(root / f"byte-{number}", cut_at_byte, number)


if __name__ == "__main__":
    main()

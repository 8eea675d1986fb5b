"""Data processes give and raise what reading here would; they do not outlive their worker, nor die unheard."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from resilient.data.processes import DataProcesses, Load
from resilient.data.read_ahead import data_processes
from resilient.data.reader import Cell, Microbatch, Reading, Reads
from resilient.errors import DataProcessError, SampleError


def microbatch(batch: dict[str, torch.Tensor], sample_ms: float = 0.0) -> Microbatch:
    reading = Reading(indices=(3,), samples=({"input": 2**64 - 1},), batch={"input": 7}, sample_ms=sample_ms)
    return Microbatch(batch=batch, reading=reading)


def at(position: int) -> Cell:
    """Return a microbatch of one sample."""
    return Cell.of_chain(position, 1)


def which(step: int, cell: Cell, reads: Reads) -> Microbatch:
    return microbatch({"which": torch.tensor([step, *cell.samples, os.getpid()])})


@contextmanager
def started(load: Load, num_processes: int = 1) -> Iterator[DataProcesses]:
    processes = DataProcesses(load, num_processes)
    try:
        yield processes
    finally:
        processes.close()


def test_a_microbatch_comes_as_it_was_read() -> None:
    values = {
        "floats": torch.randn(3, 5).T,
        "words": torch.randn(7).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "number": torch.tensor(2**62),
        "none": torch.empty(0, 4),
        "left_out": torch.empty(2, 3, dtype=torch.int32, device="meta"),
    }
    with started(lambda step, cell, reads: microbatch(values)) as processes:
        read = processes.take(processes.ask(1, at(0), None))
    assert read.reading == microbatch({}).reading
    assert list(read.batch) == list(values)
    for name, value in values.items():
        found = read.batch[name]
        assert (found.dtype, found.shape, found.device) == (value.dtype, value.shape, value.device)
        assert value.is_meta or torch.equal(found, value)
    read.batch["floats"] += 1.0  # nobody else's


def test_processes_take_turns_and_answers_are_taken_in_any_order() -> None:
    with started(which, 2) as processes:
        tickets = [processes.ask(5, at(position), None) for position in range(4)]
        read = {position: processes.take(tickets[position]).batch["which"].tolist() for position in (3, 0, 2, 1)}
    assert [read[position][:2] for position in range(4)] == [[5, position] for position in range(4)]
    pids = [read[position][2] for position in range(4)]
    assert pids[:2] == pids[2:]
    assert len({*pids, os.getpid()}) == 3


def test_a_file_that_a_data_set_keeps_open_is_read_by_each_process_at_its_own_place(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"abcdef")
    with (tmp_path / "data").open("rb", buffering=0) as file:
        file.seek(1)
        with started(lambda step, cell, reads: microbatch({"read": torch.tensor(ord(file.read(1)))}), 2) as both:
            tickets = [both.ask(1, at(position), None) for position in range(4)]
            read = [chr(int(both.take(ticket).batch["read"])) for ticket in tickets]
        assert (read, file.tell()) == (["b", "b", "c", "c"], 1)


def test_a_low_limit_of_descriptors_leaves_room_for_answers_that_wait() -> None:
    """The kernel counts them against it, for all processes of a user: with 40, four processes would block here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with started(
            lambda step, cell, reads: microbatch({"most": torch.tensor(resource.getrlimit(resource.RLIMIT_NOFILE))})
        ) as processes:
            found = processes.take(processes.ask(1, at(0), None)).batch["most"].tolist()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == [min(hard, 1 << 16), hard]


def test_what_is_forgotten_is_not_read_any_more(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (begun, tell_begun), (gate, open_gate) = os.pipe(), os.pipe()

    def read(step: int, cell: Cell, reads: Reads) -> Microbatch:
        if cell == at(0):
            os.write(tell_begun, b".")
            os.read(gate, 1)
        with log.open("a") as file:
            file.write(f"{cell.samples[0]}\n")
        return which(step, cell, reads)

    with started(read) as processes:
        for position in range(20):
            processes.ask(1, at(position), None)
        os.read(begun, 1)
        processes.forget()
        ticket = processes.ask(1, at(99), None)
        os.write(open_gate, b".")
        assert processes.take(ticket).batch["which"][1] == 99
    assert log.read_text().split() == ["0", "99"]
    for end in (begun, tell_begun, gate, open_gate):
        os.close(end)


def test_the_entries_to_read_are_handed_on() -> None:
    def read(step: int, cell: Cell, reads: Reads) -> Microbatch:
        return microbatch({entry: torch.ones(()) for entry in sorted(reads or {"all"})})

    with started(read) as processes:
        wanted: list[Reads] = [frozenset({"b", "a"}), None]
        tickets = [processes.ask(1, at(0), reads) for reads in wanted]
        assert [list(processes.take(ticket).batch) for ticket in tickets] == [["a", "b"], ["all"]]


class OddError(Exception):
    """One that pickle cannot make again."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (SampleError("sample 3 of D: too long"), SampleError, "sample 3 of D: too long"),
        (KeyError("pixels"), KeyError, "'pixels'"),
        (OddError(1, 2), RuntimeError, "OddError: 1 and 2"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_raised_here_and_tells_where_it_came_from(
    error: Exception, kind: type[Exception], message: str
) -> None:
    def read_in_vain(step: int, cell: Cell, reads: Reads) -> Microbatch:
        if cell == at(0):
            raise error
        return which(step, cell, reads)

    with started(read_in_vain) as processes:
        ticket, other = processes.ask(1, at(0), None), processes.ask(1, at(1), None)
        with pytest.raises(kind, match=f"^{re.escape(message)}$") as raised:
            processes.take(ticket)
        assert "in read_in_vain\n    raise error" in "".join(traceback.format_exception(raised.value))
        assert processes.take(other).batch["which"][1] == 1, "the process lives on"


@pytest.mark.parametrize(
    ("end", "how"),
    [(lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"), (lambda: os._exit(3), "exit code 3")],
    ids=["killed", "exited"],
)
def test_a_process_that_dies_is_named(end: Callable[[], None], how: str) -> None:
    def read(step: int, cell: Cell, reads: Reads) -> Microbatch:
        if cell == at(1):
            end()
        return which(step, cell, reads)

    others = {child.pid for child in psutil.Process().children()}  # such as the forkserver of tests before this one
    with started(read, 2) as processes:
        first, second = processes.ask(1, at(0), None), processes.ask(1, at(1), None)
        pid = int(processes.take(first).batch["which"][2])
        (dead,) = {child.pid for child in psutil.Process().children()} - others - {pid}
        message = (
            f"data process 2 (pid {dead}), which reads samples, must live as long as its worker, got {how}; if memory "
            "ran out, lower num_workers or the microbatch, else see the worker's log"
        )
        with pytest.raises(DataProcessError, match=f"^{re.escape(message)}$"):
            processes.take(second)
    assert not psutil.pid_exists(pid), "closing ends the other"


def test_processes_end_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    """Even in the middle of reading, and deaf to what ends others."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, signal, sys\n"
        "from resilient.data.processes import DataProcesses\n"
        "from resilient.data.reader import Cell\n"
        "def read(step, cell, reads):\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"  # whole: unbuffered, `print` writes the number and the end apart
        "    while True: signal.pause()\n"
        "processes = DataProcesses(read, 2)\n"
        "processes.ask(1, Cell('', (0,)), None), processes.ask(1, Cell('', (1,)), None)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        children = [psutil.Process(int(worker.stdout.readline())) for _ in range(2)]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            for child in children:
                child.send_signal(number)
        assert all(child.is_running() for child in children)
        worker.kill()
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert (len(gone), alive) == (2, [])


@pytest.mark.parametrize(
    ("wanted", "sample_ms", "expected"), [(0, 9.0, None), (None, 0.5, None), (None, 5.0, 2), (3, 0.5, 3), (1, 5.0, 1)]
)
def test_how_many_there_are_follows_from_the_time_a_sample_takes(
    wanted: int | None, sample_ms: float, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # those that tests before this one have left aside
    before = len(psutil.Process().children())
    with data_processes(lambda step, cell, reads: microbatch({}, sample_ms), wanted, at(0)) as processes:
        assert (None if processes is None else len(processes)) == expected
        assert len(psutil.Process().children()) - before == (expected or 0)
    assert len(psutil.Process().children()) == before


def test_a_script_with_threads_is_not_forked_unless_it_says_so() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        for wanted, expected in ((None, None), (1, 1)):
            with data_processes(lambda step, cell, reads: microbatch({}, 5.0), wanted, at(0)) as processes:
                assert (None if processes is None else len(processes)) == expected
    finally:
        ended.set()
        thread.join()


def test_what_is_asked_of_a_process_fits_its_socket_even_if_it_is_busy() -> None:
    """Nobody would read here what is too much: the worker would wait for the process, which waits for the worker."""
    begun, tell_begun = os.pipe()
    gate, open_gate = os.pipe()

    def read(step: int, cell: Cell, reads: Reads) -> Microbatch:
        if step == 1:
            os.write(tell_begun, b".")
            os.read(gate, 1)
        return microbatch({"samples": torch.tensor(cell.samples), "lane": torch.tensor(cell.lane)})

    apart = Cell("vision", tuple(range(1 << 16, (1 << 16) + 2 * 4096, 2)), 3)
    reads = frozenset(f"vision.entry.{number}" for number in range(20))
    with started(read) as processes:
        processes.ask(1, at(0), None)
        os.read(begun, 1)
        numbers: list[int] = []
        last = -1
        for cell in (at(1), Cell.of_chain(1, 1 << 16), apart):
            processes.forget()
            numbers.append(0)
            while processes.has_room:
                last = processes.ask(2, cell, reads)
                numbers[-1] += 1
        assert numbers == [32, 32, 2], "one after the other is told as the first and how many they are"
        os.write(open_gate, b".")
        read_batch = processes.take(last).batch
        assert (tuple(read_batch["samples"].tolist()), int(read_batch["lane"])) == apart[1:]
    for end in (begun, tell_begun, gate, open_gate):
        os.close(end)

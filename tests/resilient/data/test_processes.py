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
from resilient.data.read_ahead import ReadAhead, data_processes
from resilient.data.reader import Microbatch, Reading, Reads
from resilient.errors import DataProcessError, SampleError


def microbatch(batch: dict[str, torch.Tensor], sample_ms: float = 0.0) -> Microbatch:
    reading = Reading(indices=(3,), samples=({"input": 2**64 - 1},), batch={"input": 7}, sample_ms=sample_ms)
    return Microbatch(batch=batch, reading=reading)


def which(step: int, position: int, reads: Reads) -> Microbatch:
    return microbatch({"which": torch.tensor([step, position, os.getpid()])})


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
    with started(lambda step, position, reads: microbatch(values)) as processes:
        read = processes.take(processes.ask(1, 0, None))
    assert read.reading == microbatch({}).reading
    assert list(read.batch) == list(values)
    for name, value in values.items():
        found = read.batch[name]
        assert (found.dtype, found.shape, found.device) == (value.dtype, value.shape, value.device)
        assert value.is_meta or torch.equal(found, value)
    read.batch["floats"] += 1.0  # nobody else's


def test_processes_take_turns_and_answers_are_taken_in_any_order() -> None:
    with started(which, 2) as processes:
        tickets = [processes.ask(5, position, None) for position in range(4)]
        read = {position: processes.take(tickets[position]).batch["which"].tolist() for position in (3, 0, 2, 1)}
    assert [read[position][:2] for position in range(4)] == [[5, position] for position in range(4)]
    pids = [read[position][2] for position in range(4)]
    assert pids[:2] == pids[2:]
    assert len({*pids, os.getpid()}) == 3


def test_a_file_that_a_data_set_keeps_open_is_read_by_each_process_at_its_own_place(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"abcdef")
    with (tmp_path / "data").open("rb", buffering=0) as file:
        file.seek(1)
        with started(lambda step, position, reads: microbatch({"read": torch.tensor(ord(file.read(1)))}), 2) as both:
            tickets = [both.ask(1, position, None) for position in range(4)]
            read = [chr(int(both.take(ticket).batch["read"])) for ticket in tickets]
        assert (read, file.tell()) == (["b", "b", "c", "c"], 1)


def test_a_low_limit_of_descriptors_leaves_room_for_answers_that_wait() -> None:
    """The kernel counts them against it, for all processes of a user: with 40, four processes would block here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with started(
            lambda step, position, reads: microbatch({"most": torch.tensor(resource.getrlimit(resource.RLIMIT_NOFILE))})
        ) as processes:
            found = processes.take(processes.ask(1, 0, None)).batch["most"].tolist()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == [min(hard, 1 << 16), hard]


def test_what_is_forgotten_is_not_read_any_more(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (begun, tell_begun), (gate, open_gate) = os.pipe(), os.pipe()

    def read(step: int, position: int, reads: Reads) -> Microbatch:
        if position == 0:
            os.write(tell_begun, b".")
            os.read(gate, 1)
        with log.open("a") as file:
            file.write(f"{position}\n")
        return which(step, position, reads)

    with started(read) as processes:
        for position in range(20):
            processes.ask(1, position, None)
        os.read(begun, 1)
        processes.forget()
        ticket = processes.ask(1, 99, None)
        os.write(open_gate, b".")
        assert processes.take(ticket).batch["which"][1] == 99
    assert log.read_text().split() == ["0", "99"]
    for end in (begun, tell_begun, gate, open_gate):
        os.close(end)


def test_the_entries_to_read_are_handed_on() -> None:
    def read(step: int, position: int, reads: Reads) -> Microbatch:
        return microbatch({entry: torch.ones(()) for entry in sorted(reads or {"all"})})

    with started(read) as processes:
        wanted: list[Reads] = [frozenset({"b", "a"}), None]
        tickets = [processes.ask(1, 0, reads) for reads in wanted]
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
    def read_in_vain(step: int, position: int, reads: Reads) -> Microbatch:
        if position == 0:
            raise error
        return which(step, position, reads)

    with started(read_in_vain) as processes:
        ticket, other = processes.ask(1, 0, None), processes.ask(1, 1, None)
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
    def read(step: int, position: int, reads: Reads) -> Microbatch:
        if position == 1:
            end()
        return which(step, position, reads)

    others = {child.pid for child in psutil.Process().children()}  # such as the forkserver of tests before this one
    with started(read, 2) as processes:
        first, second = processes.ask(1, 0, None), processes.ask(1, 1, None)
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
        "def read(step, position, reads):\n"
        "    print(os.getpid(), flush=True)\n"
        "    while True: signal.pause()\n"
        "processes = DataProcesses(read, 2)\n"
        "processes.ask(1, 0, None), processes.ask(1, 1, None)\n"
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
    with data_processes(lambda step, position, reads: microbatch({}, sample_ms), wanted) as processes:
        assert (None if processes is None else len(processes)) == expected
        assert len(psutil.Process().children()) - before == (expected or 0)
    assert len(psutil.Process().children()) == before


def test_a_script_with_threads_is_not_forked_unless_it_says_so() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        for wanted, expected in ((None, None), (1, 1)):
            with data_processes(lambda step, position, reads: microbatch({}, 5.0), wanted) as processes:
                assert (None if processes is None else len(processes)) == expected
    finally:
        ended.set()
        thread.join()


class Asked:
    """Takes down what is asked of processes."""

    def __init__(self, num_processes: int) -> None:
        self.asked: list[tuple[int, int]] = []
        self._num_processes = num_processes

    def __len__(self) -> int:
        return self._num_processes

    def ask(self, step: int, position: int, reads: Reads) -> int:
        self.asked.append((step, position))
        return len(self.asked) - 1

    def take(self, ticket: int) -> tuple[int, int]:
        return self.asked[ticket]

    def forget(self) -> None:
        self.asked.append((0, 0))


def test_a_whole_step_is_asked_for_ahead_of_time() -> None:
    asked = Asked(2)
    positions = (2, 3, 9, 4, 7)
    ahead = ReadAhead(asked, num_steps=3)  # pyright: ignore[reportArgumentType]
    ahead.enter(positions, None)
    asked.asked.clear()
    steps = [(step, position) for step in (1, 2, 3) for position in positions]
    for number, key in enumerate(steps):
        assert ahead.take(*key) == key
        assert asked.asked == steps[: number + 6], "this one and five more, up to the end of the job"
    ahead.enter(positions, None)
    assert ahead.take(3, 2) == (3, 2), "again, after a failure"
    ahead.enter((0, 1), frozenset({"input"}))
    assert asked.asked[-1] == (0, 0), "of another place, nothing is wanted any more"


def test_not_more_is_asked_for_than_fits() -> None:
    asked = Asked(1)
    ahead = ReadAhead(asked, num_steps=2)  # pyright: ignore[reportArgumentType]
    ahead.enter(tuple(range(1000)), None)
    asked.asked.clear()
    ahead.take(1, 0)
    assert len(asked.asked) == 33


def test_not_more_is_asked_for_than_fits_when_a_step_is_read_once_more() -> None:
    asked = Asked(1)
    ahead = ReadAhead(asked, num_steps=2)  # pyright: ignore[reportArgumentType]
    ahead.enter(tuple(range(1000)), None)
    for position in range(400):
        ahead.take(1, position)
    ahead.enter(tuple(range(1000)), None)
    assert ahead.take(1, 0) == (1, 0)
    forgotten = len(asked.asked) - 1 - asked.asked[::-1].index((0, 0))
    assert asked.asked[forgotten + 1 :] == [(1, position) for position in range(33)]

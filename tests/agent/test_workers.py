"""A node's workers as their agent sees them; with real processes, see ``test_node.py``."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from unittest.mock import Mock

from resilient.agent.workers import WorkerPool
from resilient.control import Attach, frame
from resilient.messages import FromWorker, Note, Welcome, encode

NOTE = Note(name="pid", value=4711)


def test_worker_that_speaks_before_its_start_is_confirmed_is_running(tmp_path: Path) -> None:
    async def play(folder: str) -> None:
        heard: asyncio.Queue[FromWorker] = asyncio.Queue()
        confirmed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        address = str(Path(folder) / "agent.sock")
        pool = WorkerPool(address=address, token="t", num_workers=1, send=heard.put_nowait, on_exit=Mock())
        await pool.listen()
        welcome = Welcome(
            node=0, fresh=True, script="job.py", arguments=(), directory=folder, run_directory=str(tmp_path),
            heartbeat_s=5.0,
        )  # fmt: skip
        starting = asyncio.create_task(pool.start(Mock(spawn=lambda _: confirmed), welcome))
        _, worker = await asyncio.open_unix_connection(address)
        assert not pool.is_running
        worker.write(frame(encode(Attach(token="t", local_rank=0))) + frame(encode(NOTE)))
        assert (await heard.get()).message == NOTE
        assert pool.is_running
        confirmed.set_result(4711)
        await starting
        assert pool.is_running
        worker.close()
        await pool.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(folder))

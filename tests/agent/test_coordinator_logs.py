"""What the coordinator leaves of what it was told, and that no fault of it keeps the job from ending or going on."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import msgspec
import pytest

from resilient.agent.journal.replay import difference, replay_run
from resilient.agent.journal.term import DeposedError, Term
from resilient.agent.membership.parts.events import Tick
from resilient.protocol.messages import Leaving, encode
from tests.agent.membership.simulated import settings
from tests.agent.served import HELLO, TOKEN, Served, make_ready, with_coordinator


def test_stimuli_are_in_the_log_before_what_follows_from_them_and_without_the_token(tmp_path: Path) -> None:
    """What would be read if the process were killed now, replays the events there are."""

    async def scenario(served: Served) -> None:
        await make_ready(served, min_pipeline_nodes=1)
        await served.event("generation")
        assert difference(tmp_path, replay_run(tmp_path)) == ""
        assert TOKEN not in (tmp_path / "stimuli.jsonl").read_text()

    with_coordinator(tmp_path, scenario)


def test_time_that_passes_without_consequence_is_not_in_the_log(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await make_ready(served, min_pipeline_nodes=1)
        await served.event("generation")
        before = len((tmp_path / "stimuli.jsonl").read_text().splitlines())
        for _ in range(10):
            served.coordinator.feed(Tick())
        added = (tmp_path / "stimuli.jsonl").read_text().splitlines()[before:]
        assert [line for line in added if "Tick" in line] == []

    with_coordinator(tmp_path, scenario)


def test_joiner_that_is_refused_is_no_node_that_was_lost(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        await make_ready(served, min_pipeline_nodes=1)
        await served.event("generation")
        refused = await served.connect(num_workers=2)
        event = await served.event("not_joined")
        assert (event["node"], event["cause"]) == (
            2,
            "workers per node must be 1 in this job, got 2; start this agent with --workers 1",
        )
        await refused.close()
        await served.connect()  # the coordinator has seen the other one go
        async with served.session.get(served.url("/metrics")) as answer:
            assert "resilient_lost_nodes_total 0.0\n" in await answer.text()

    with_coordinator(tmp_path, scenario)


def test_stimuli_that_cannot_be_written_do_not_keep_the_job_from_going_on(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        (tmp_path / "stimuli.jsonl").mkdir()
        await make_ready(served, min_pipeline_nodes=1)
        assert (await served.event("generation"))["generation"] == 1

    with_coordinator(tmp_path, scenario)


def test_deposed_coordinator_does_not_say_that_it_heard_what_is_in_no_log(tmp_path: Path) -> None:
    """Else the agent would keep nothing of it, and the coordinator in office could not go on with it."""

    async def scenario(served: Served) -> None:
        agent = await served.connect()
        successor = Term.claim(tmp_path)
        leaving = encode(Leaving(reason="told to"))
        await agent.send_bytes(leaving)  # what makes it look, and is lost
        with pytest.raises(DeposedError):
            await served.coordinator.wait()
        await agent.send_bytes(leaving)
        again = await served.open()
        await again.send_bytes(encode(msgspec.structs.replace(HELLO, node=0, num_heard=1)))
        assert (await again.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)
        assert "Leaving" not in (tmp_path / "stimuli.jsonl").read_text()
        successor.close()

    with_coordinator(tmp_path, scenario)


def test_inconsistent_membership_ends_the_job_if_it_is_checked(tmp_path: Path) -> None:
    async def scenario(served: Served) -> None:
        served.coordinator._settings = settings(run_directory=str(tmp_path), validate=True)
        served.coordinator._machine.parts.ending.note_failure("of nobody")
        await served.open()
        served.coordinator.feed(Tick())
        stopped = await served.event("stopped")
        assert stopped["exit_code"] == 1
        reason = "the coordinator failed: the membership is inconsistent: the job has failed and is starting"
        assert stopped["reason"] == reason

    with_coordinator(tmp_path, scenario)

from __future__ import annotations

import msgspec
import pytest

from resilient.protocol.messages import FromAgentMessage, FromWorker, Health, Output, Ready, encode
from resilient.protocol.repeated_jobs import JobReader
from tests.agent.membership.simulated import job_spec
from tests.templates.jobs import profile

LARGE = profile([1.0] * 200)


def said(node: int, num_steps: int = 10) -> FromWorker:
    job = job_spec(profile=LARGE, num_steps=num_steps)
    return FromWorker(local_rank=node % 2, message=Ready(job=job, store_address=f"h:{node}", pid=node, device="cpu"))


def read_job(reader: JobReader, message: FromWorker) -> object:
    return reader.decode(encode(message)).message.job


def test_messages_are_read_as_they_were_said() -> None:
    reader, output = JobReader(FromAgentMessage), Output(text="x" * 10_000)
    messages = [*map(said, range(3)), Health(cpu_percent=1.0, memory_bytes=2), FromWorker(local_rank=0, message=output)]
    assert len(encode(messages[0])) > 10_000
    for message in messages * 2:
        assert reader.decode(encode(message)) == message


def test_equal_jobs_are_one_object_and_others_are_not() -> None:
    reader = JobReader(FromAgentMessage)
    first, again, other = (read_job(reader, each) for each in (said(0), said(1), said(2, num_steps=77)))
    assert again is first
    assert other != first
    assert read_job(reader, said(3)) is first


def test_jobs_without_end_are_not_kept() -> None:
    reader = JobReader(FromAgentMessage)
    first = read_job(reader, said(0))
    for num_steps in range(100, 120):
        read_job(reader, said(1, num_steps=num_steps))
    assert read_job(reader, said(2)) == first
    assert read_job(reader, said(2)) is not first


@pytest.mark.parametrize("wrong", ["short", "no layers", "negative"])
def test_nonsense_is_told_whether_or_not_a_job_was_read_before(wrong: str) -> None:
    data = encode(said(0))
    if wrong == "short":
        data = data[:-1]
    else:
        plain = msgspec.msgpack.decode(data)
        layers = plain["message"]["job"]["profile"]["layers"]
        plain["message"]["job"]["profile"]["layers"] = (
            [] if wrong == "no layers" else [{**layer, "parameter_bytes": -1} for layer in layers]
        )
        plain["message"]["job"]["alike"] = {"job": {"padding": "x" * 10_000}}
        data = encode(plain)
    reader = JobReader(FromAgentMessage)
    for _ in range(2):
        with pytest.raises(msgspec.DecodeError):
            reader.decode(data)
        reader.decode(encode(said(0)))

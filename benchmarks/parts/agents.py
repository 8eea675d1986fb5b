"""Agents that are connections alone: they answer as their workers would, at once, but for a moment to install."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from resilient.agent.network.conversation import GOODBYE, Conversation, Hello, decode_attached
from resilient.agent.network.dialect import SPOKEN, dialect
from resilient.protocol.generation_packing import GenerationUnpacker
from resilient.protocol.messages import (
    MAX_MESSAGE_BYTES,
    FromWorker,
    FromWorkerMessage,
    Generation,
    Installed,
    JobSpec,
    PackedGeneration,
    Ready,
    Regroup,
    Report,
    Shutdown,
    ToAgentMessage,
    ToWorkers,
    Welcome,
    WorkerProgress,
    encode,
)
from resilient.state.recipe import Recipe
from resilient.templates.inputs.derive import derive_profile

MIN_PIPELINE_NODES = 6
BATCH = 4096
_INSTALL_S = 0.1
"""Workers connect and copy for longer: who has its place does not keep this process from giving others theirs."""
_AT_ONCE = 16
"""Agents that introduce themselves: one process plays all of them, and the coordinator waits for none for long."""


def job() -> JobSpec:
    """Return a job of the blocks of Llama 3 70B, with at least one failure to survive."""
    profile = derive_profile("llama3-70b", "a100-80gb")
    recipe = Recipe(
        model="llama3-70b",
        num_layers=len(profile.layers),
        num_parameters=1,
        dataset="data",
        num_samples=BATCH,
        global_batch=BATCH,
        optimizer="AdamW",
        seed=0,
        precision="fp32",
        clip_grad_norm=None,
    )
    return JobSpec(
        profile=profile,
        recipe=recipe,
        num_steps=1000,
        global_batch=BATCH,
        microbatch=1,
        max_failures=1,
        min_pipeline_nodes=MIN_PIPELINE_NODES,
        comm_timeout_s=600.0,
    )


class _Agent:
    def __init__(self, fleet: Fleet, ready: bytes) -> None:
        self.conversation = Conversation[ToAgentMessage](ToAgentMessage)
        self.generation = 0
        self._fleet = fleet
        self._ready = ready
        self._held: tuple[str, ...] = ()
        self._version = -1
        self.socket: aiohttp.ClientWebSocketResponse[bool] | None = None

    async def talk(self, session: aiohttp.ClientSession, address: str) -> None:
        hello = Hello(host="h", pid=1, num_workers=1)
        async with self._fleet.entrance:
            socket = await session.ws_connect(
                f"https://{address}/agent", headers={SPOKEN: dialect()}, max_msg_size=MAX_MESSAGE_BYTES
            )
            await socket.send_bytes(encode(hello))
            decode_attached(await socket.receive_bytes())
        async with socket:
            self.socket = socket
            counted: Any = _Counted(socket, self._fleet.count)
            self.conversation.connect(counted)
            await self.conversation.carry(counted, 0, self._hear)

    async def leave(self) -> None:
        assert self.socket is not None
        await self.socket.close(code=GOODBYE)

    async def _hear(self, message: ToAgentMessage) -> None:
        match message:
            case Welcome():
                self.conversation.say(self._ready)
            case ToWorkers(message=Regroup(generation=generation)):
                begun = self._version >= 0
                progress = WorkerProgress(version=self._version, complete=False, begun=begun, current=self._held)
                self._say(Report(generation=generation, progress=progress))
            case ToWorkers(message=PackedGeneration() as packed):
                self._enter(packed)
            case Shutdown(reason=reason):
                raise RuntimeError(f"the job ended: {reason}")
            case _:
                pass

    def _enter(self, packed: PackedGeneration) -> None:
        assert packed.base in (0, self.generation)
        told = self._fleet.unpacked(packed)
        self.generation, self._version = told.generation, told.version
        self._held = self._fleet.states(told, packed.rank)
        self._fleet.note_placed(told.generation)
        if packed.rank is not None:
            now = time.time()
            done = Installed(
                generation=told.generation, started_at=now, regrouped_at=now, installed_at=now, bytes_copied=0
            )
            asyncio.get_running_loop().call_later(_INSTALL_S, self._say, done)

    def _say(self, message: FromWorkerMessage) -> None:
        self.conversation.say(encode(FromWorker(local_rank=0, message=message)))


class _Counted:
    """A connection, and how many bytes came over it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[bool], count: Callable[[int], None]) -> None:
        self._socket = socket
        self._count = count
        self.send_bytes = socket.send_bytes
        self.close = socket.close

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for packet in self._socket:
            self._count(len(packet.data))
            yield packet


class Fleet:
    """Many of them.

    Args:
        session: Knows the token.
        address: Of the coordinator.

    Attributes:
        entrance: Passed by those who introduce themselves.
        last_placed_at: When an agent was last given its place, as :func:`time.perf_counter`.
        received_bytes: What all have ever been sent.
    """

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session = session
        self._address = address
        self._agents: list[_Agent] = []
        self._talks: set[asyncio.Task[None]] = set()
        spec = job()
        self._profile = spec.profile
        ready = Ready(job=spec, store_address="h:1", pid=5, device="cpu")
        self._ready = encode(FromWorker(local_rank=0, message=ready))
        self._held: tuple[int, list[tuple[str, ...]]] = (0, [])
        self._unpacker = GenerationUnpacker()
        self._unpacked: dict[bytes, Generation] = {}
        self._newest = 0
        self._before = 0
        self.entrance = asyncio.Semaphore(_AT_ONCE)
        self.last_placed_at = 0.0
        self.received_bytes = 0

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self._agents)

    @property
    def generation(self) -> int:
        """The newest that an agent was told of."""
        return self._newest

    async def join(self, count: int) -> None:
        """Connect so many."""
        self._before = self._newest
        for _ in range(count):
            agent = _Agent(self, self._ready)
            self._agents.append(agent)
            self._talks.add(asyncio.create_task(agent.talk(self._session, self._address)))

    async def leave(self, count: int) -> None:
        """Have so many say goodbye."""
        self._before = self._newest
        gone, self._agents = self._agents[:count], self._agents[count:]
        await asyncio.gather(*(agent.leave() for agent in gone))

    async def until_running(self) -> None:
        """Wait until all have a place in one generation, and the coordinator has heard that they have begun it."""
        while True:
            for talk in [talk for talk in self._talks if talk.done()]:
                self._talks.discard(talk)
                talk.result()
            if self._newest > self._before and all(agent.generation == self._newest for agent in self._agents):
                async with self._session.get(f"https://{self._address}/status") as answer:
                    status = await answer.json()
                if status["phase"] == "running" and len(status["nodes"]) == self.size:
                    self._before = 0
                    return
            await asyncio.sleep(0.02)

    async def look(self) -> int:
        """Read the status page; return its bytes."""
        async with self._session.get(f"https://{self._address}/status") as answer:
            return len(await answer.read())

    async def close(self) -> None:
        """Go."""
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)

    def count(self, num_bytes: int) -> None:
        """Take in that an agent was sent so many."""
        self.received_bytes += num_bytes

    def note_placed(self, generation: int) -> None:
        """Take in that an agent has its place."""
        self._newest = max(self._newest, generation)
        self.last_placed_at = time.perf_counter()

    def unpacked(self, packed: PackedGeneration) -> Generation:
        """Return a generation's announcement to some worker: the plans of all are one."""
        if packed.common not in self._unpacked:
            unpacker = self._unpacker if packed.base or not self._unpacked else GenerationUnpacker()
            told = unpacker.unpack(packed)
            known = {common: each for common, each in self._unpacked.items() if each.generation == told.generation}
            self._unpacked = {**known, packed.common: told}
        return self._unpacked[packed.common]

    def states(self, told: Generation, rank: int | None) -> tuple[str, ...]:
        """Return what a worker holds in a generation."""
        if self._held[0] != told.generation:
            self._held = told.generation, [tuple(slot.intervals(self._profile)) for slot in told.plan.slots]
        held = self._held[1]
        return () if rank is None or rank >= len(held) else held[rank]

"""What a job is started with: the options of ``resilient run``, checked."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from resilient.agent.leadership.leader_store import check_store
from resilient.common.network.ports import port_range
from resilient.errors import ArgumentError
from resilient.observability.step_trace import parse_steps
from resilient.protocol.alike import ALLOWABLE
from resilient.protocol.job_config import AUTO_SCHEDULE, training_schedule
from resilient.protocol.messages import Injection
from resilient.protocol.shown_streams import ShownStreams
from resilient.templates.plan import AUTO_DEGREE, Sharding, check_beside_planner, check_methods, tensor_degree
from resilient.templates.schedules.kind import ScheduleKind

_LEAST_TOKEN = 16
_REPEATED = (
    "workers_per_node",
    "host",
    "port",
    "network_gbit_s",
    "failure_interval_s",
    "shard",
    "tp",
    "tp_chunks",
    "heartbeat_s",
    "orphan_s",
    "grace_s",
    "wait_for_nodes_s",
    "allow_different",
    "planner",
    "schedule",
    "store",
    "port_range",
    "token_file",
    "tee",
    "redirects",
    "local_ranks_filter",
)
"""Options that a job keeps when it is resumed, as they are; a test asks of each new one whether it is such."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What to run.

    Args:
        script: The job's script.
        arguments: The script's own arguments.
        num_nodes: Simulated nodes to start.
        most_nodes: Nodes that train at once, however many join: others stand by. None for all.
        local_nodes: Start the nodes here; False for a coordinator alone, which waits for agents of other machines.
        workers_per_node: Workers of each.
        run_directory: Folder of the run; made if it is not there.
        resume: Checkpoint folder to begin from, or folder of a run for its newest sound one.
        host: Address to listen on.
        port: Port to listen on; 0 for any that is free.
        network_gbit_s: Between two nodes, for each worker; None where it is too fast to matter.
        failure_interval_s: Expected time between two failures, over which a reconfiguration must pay.
        shard: Whether workers of a node divide the states of their stage, each with microbatches of its own:
            a :class:`resilient.templates.plan.Sharding`.
        tp: How many workers of a node share each microbatch, tensor parallel: a number, or "auto" for whatever makes
            steps shortest. Beside a number other than 1, ``shard`` is off; with "auto" it may be on or auto, and
            pipelines of both kinds stand side by side where that is fastest.
        tp_chunks: In how many chunks these exchange tokens, instead of what the script asks for; None for that.
        heartbeat_s: Silence after which a connection to a node counts as broken.
        orphan_s: How long nodes train on without a coordinator, and it waits for all of them when none is heard of.
        grace_s: From the first SIGINT, SIGTERM or SIGHUP to the end; a checkpoint is written meanwhile.
        wait_for_nodes_s: How long a job of which too few nodes are left, after some went away, waits for others to
            connect, before it stops with a checkpoint; 0 for not at all. One that begins with too few does not wait.
        injections: Failures to cause.
        domains: What the simulated nodes fail together with (zones, racks), in turn; empty for each by itself.
        trace_steps: Steps of which workers write down when they did what, as in "10" or "10-12"; "" for none.
        planner: What places the samples of units, instead of what the script asks for; "" for that.
        schedule: What pipelines run, instead of what the script asks for; "" for that.
        allow_different: What may differ between nodes: of :data:`resilient.protocol.alike.ALLOWABLE`.
        validate: Check after everything that happens that the membership is consistent; a job of a thousand nodes
            feels it.
        store: etcd and a prefix, ``etcd://HOST[:PORT],.../PREFIX[?ca=FILE&certificate=FILE&key=FILE]``: when the
            coordinator is gone, one of the nodes is elected there to lead the job; "" for none.
        port_range: Ports that the job's sockets listen at, ``FIRST:LAST``, but for what gloo and NCCL open; "" for any.
        token: That agents have to show; "" for one that nobody can guess, left in the run's ``job.json``.
        token_file: Where it was read from, which is told to who starts the job again; "" for nowhere.
        tee: Streams of the workers that are shown, too; this and the next two as in
            :class:`resilient.protocol.shown_streams.ShownStreams`.
        redirects: Streams that go to the logs alone.
        local_ranks_filter: Workers of which anything is shown.
        environment: Further environment variables for nodes and workers.
    """

    script: str
    arguments: tuple[str, ...] = ()
    num_nodes: int = 1
    most_nodes: int | None = None
    local_nodes: bool = True
    workers_per_node: int = 1
    run_directory: str
    resume: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    network_gbit_s: float | None = None
    failure_interval_s: float = 3600.0
    shard: str = "off"
    tp: str = "1"
    tp_chunks: int | None = None
    heartbeat_s: float = 5.0
    orphan_s: float = 600.0
    grace_s: float = 120.0
    wait_for_nodes_s: float = 10.0
    injections: tuple[Injection, ...] = ()
    domains: tuple[str, ...] = ()
    trace_steps: str = ""
    planner: str = ""
    schedule: str = ""
    allow_different: tuple[str, ...] = ()
    validate: bool = False
    store: str = ""
    port_range: str = ""
    token: str = ""
    token_file: str = ""
    tee: str = "0"
    redirects: str = "3"
    local_ranks_filter: str = ""
    environment: dict[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        for name in ("num_nodes", "workers_per_node"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, "be >= 1", getattr(self, name), "a job has one at least")
        if self.most_nodes is not None and self.most_nodes < self.num_nodes:
            raise ArgumentError("most_nodes", f"be >= {self.num_nodes}, the least", self.most_nodes, "give it no less")
        if self.host in ("0.0.0.0", "::"):
            raise ArgumentError(
                "host",
                "be the address by which the job's machines reach this one",
                repr(self.host),
                "give one of this machine's own addresses",
            )
        if self.token and len(self.token) < _LEAST_TOKEN:
            given = f"one of {len(self.token)} characters"
            raise ArgumentError("token", f"be {_LEAST_TOKEN} characters or more", given, "give a random one")
        if not Path(self.script).is_file():
            raise ArgumentError("script", "be a file", repr(self.script), "give the path of the job's script")
        if self.shard not in tuple(Sharding):
            choices = ", ".join(Sharding)
            raise ArgumentError("shard", f"be one of {choices}", repr(self.shard), "leave it out for off")
        if self.planner:
            check_beside_planner(Sharding(self.shard))
        degree = tensor_degree(self.tp)
        schedule = training_schedule(self.schedule or AUTO_SCHEDULE)
        check_methods(None if schedule == AUTO_SCHEDULE else ScheduleKind(schedule), degree, Sharding(self.shard))
        if degree is not None and self.workers_per_node % degree:
            constraint = f"divide {{workers_per_node}} {self.workers_per_node}"
            raise ArgumentError("tp", constraint, self.tp, f"give another, or {AUTO_DEGREE} for any in each stage")
        if self.tp_chunks is not None and self.tp_chunks < 1:
            fix = "1 exchanges tokens before or after they are computed with"
            raise ArgumentError("tp_chunks", "be >= 1", self.tp_chunks, fix)
        for name in ("network_gbit_s", "failure_interval_s", "heartbeat_s", "orphan_s", "grace_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ArgumentError(name, "be > 0", f"{value:g}", "leave it out for the default")
        if not self.wait_for_nodes_s >= 0:
            fix = "give 0 for not waiting at all"
            raise ArgumentError("wait_for_nodes_s", "be >= 0", f"{self.wait_for_nodes_s:g}", fix)
        parse_steps(self.trace_steps)
        port_range(self.port_range)
        _ = self.shown
        if self.store:
            check_store(self.store)
        for kind in self.allow_different:
            if kind not in ALLOWABLE:
                fix = "what else differs trains another job"
                raise ArgumentError("allow_different", f"be one of {', '.join(ALLOWABLE)}", repr(kind), fix)

    @property
    def shown(self) -> ShownStreams:
        """What of the workers' output is shown."""
        return ShownStreams(tee=self.tee, redirects=self.redirects, local_ranks=self.local_ranks_filter)

    def repeated(self) -> tuple[str, ...]:
        """Return the options of ``resilient run`` that start the job again as it was, but for nodes and checkpoint."""
        words: list[str] = []
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name in _REPEATED and value != option.default:
                for each in value if isinstance(value, tuple) else (value,):
                    words += [f"--{_dashed(option.name)}", f"{each:g}" if isinstance(each, float) else str(each)]
        words += [] if self.local_nodes else ["--no-local-nodes"]
        return (*words, "--domains", ",".join(self.domains)) if self.domains else tuple(words)


def _dashed(name: str) -> str:
    return name.replace("_", "-")

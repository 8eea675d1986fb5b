"""The user's API: a model, a data set and an optimizer become a job that outlives its machines."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TextIO

import torch

from resilient.common.arguments import described
from resilient.common.handshake import nonce
from resilient.common.memory import keep_freed_memory
from resilient.data.dataset import Dataset
from resilient.data.processes import DataProcesses
from resilient.data.read_ahead import data_processes
from resilient.data.reader import Cell
from resilient.errors import ArgumentError
from resilient.models.layer import Model, WholeModel
from resilient.observability.step_trace import parse_steps
from resilient.optim import Optimizer
from resilient.profiling.cache import job_profile
from resilient.profiling.planned_job import planned_job
from resilient.profiling.profiler import draw_samples
from resilient.profiling.script import leave_description
from resilient.protocol.agent_client import AgentClient, cluster_from_environment
from resilient.protocol.foreign_launchers import check_started_once
from resilient.protocol.messages import Note, Output
from resilient.runtime.alike import alike
from resilient.runtime.batches import reader_of
from resilient.runtime.job import Job
from resilient.runtime.preflight import check_trainable
from resilient.runtime.single_process import SingleProcessClient
from resilient.runtime.worker import Worker
from resilient.state import checkpoint, manifest
from resilient.state.binding import bind
from resilient.state.layer_state import LayerState


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """How training ended, on every worker.

    Args:
        step: Committed steps.
        checkpoint: Folder of the final checkpoint.
        is_main: True on exactly one worker, the one that speaks for the job.
    """

    step: int
    checkpoint: Path
    is_main: bool


class Trainer:
    """Trains a model on machines that come and go.

    Every worker of the job runs the same script and makes the same trainer. Without ``resilient run`` the script
    trains in its own process.

    Args:
        model: A :class:`resilient.MultimodalModule`, a :class:`resilient.Chain`, or any
            :class:`resilient.models.layer.Model`.
        dataset: A map from index to sample (see :class:`resilient.data.dataset.Dataset`).
        optimizer: :class:`resilient.AdamW` or :class:`resilient.SGD`.
        global_batch: Samples of one step, whatever the number of machines.
        microbatch: Samples that go through a pipeline together; divides ``global_batch``.
        max_failures: Node failures that must be survivable at the same time; there are always more pipelines.
        min_pipeline_nodes: Fewest nodes whose memory holds one pipeline.
        seed: Of initial values, order of samples, and dropout.
        precision: "fp32", "bf16" (matrix products in bfloat16, everything else in float32) or "fp64".
        clip_grad_norm: Largest norm of the whole gradient; None for no limit.
        on_nonfinite: What to do when a step's loss or gradient is not finite: "stop" the job, with a checkpoint of the
            step before and a message that names the layer; or "skip" the step, which then updates nothing. It stops
            all the same after many such steps in a row.
        checkpoint_every: Steps between checkpoints; 0 for one at the end; "auto" for as many as lose least time, by
            what one is measured to cost and how often losses that need one are seen and expected.
        compare_replicas_every: Steps between comparisons of the copies of each layer's parameters and optimizer state,
            which nodes hold for each other; 0 for the first step after each change of membership only. Before a
            checkpoint they are always compared. A comparison reads the state once, which takes about as long as the
            optimizer's step: that is less than half of a step, and mostly far less, so that in every 100th step a
            comparison costs under 0.5 %. 1 finds damage before any step is committed on it.
        schedule: Order of the work in a pipeline: "1f1b"; "eager-1f1b" (hides messages); "interleaved-1f1b" (several
            stages on each worker shorten the waiting, for more messages; not on CUDA devices); "split-1f1b", "zb-h1" or
            "zb-h2" (split the backward to shorten the waiting; "zb-h2" hides messages, no more); "interleaved-zb" or
            "zb-v" (both; not on CUDA devices); "gpipe". Results are the same. Memory is planned for what each keeps in
            flight; "1f1b" and "split-1f1b" need the least, "eager-1f1b" no more than that, and takes what is left.
            "auto" is the one of them whose steps are the shortest in simulation, for the layers' measured times, the
            memory and the nodes that the job begins with. ``resilient run --schedule`` goes before it.
        num_chunks: Stages of each worker, under "interleaved-1f1b" and "interleaved-zb"; "zb-v" has two. Under "auto"
            the most stages of each worker.
        tp_chunks: Where workers of a node share each microbatch (``resilient run --tp``): in how many chunks they
            exchange its tokens while the matrix products are computed that these feed or follow. 1 exchanges all at
            once, before or after. ``resilient run --tp-chunks`` goes before it.
        planner: What places the samples of a multimodal model, by its name in ``resilient compare``: encoders and the
            language model then run cells of their own, packed, in lanes of their own. By default all layers are a chain
            of padded microbatches. ``resilient run --planner`` goes before it; a script run by itself has no planner.
        num_workers: Processes of each worker that read samples ahead of time, while it computes; 0 for none. By default
            none where a sample takes under a millisecond to read, otherwise two.
        read_ahead: Steps whose samples they read ahead of time: more, where some steps take much longer to read than
            others, for memory that holds so many. A planner's assignments are then made as much earlier.
        device: Where to train; by default "cuda", which is a device of this worker's own, if there is one, else "cpu".
        comm_timeout_s: Last resort against a peer that hangs without its connection breaking. When no step is done for
            15 times as long, or 15 times as long as one is planned to take, workers that do not answer are given up.

    Raises:
        ValueError: An argument cannot be; the message names it, its value and the fix.
    """

    def __init__(
        self,
        model: Model,
        dataset: Dataset,
        *,
        optimizer: Optimizer,
        global_batch: int,
        microbatch: int,
        max_failures: int = 1,
        min_pipeline_nodes: int = 1,
        seed: int = 0,
        precision: str = "fp32",
        clip_grad_norm: float | None = None,
        on_nonfinite: str = "stop",
        checkpoint_every: int | Literal["auto"] = 0,
        compare_replicas_every: int = 100,
        schedule: str = "1f1b",
        num_chunks: int = 2,
        tp_chunks: int = 1,
        planner: str | None = None,
        num_workers: int | None = None,
        read_ahead: int = 1,
        device: str | torch.device | None = None,
        comm_timeout_s: float = 120.0,
    ) -> None:
        self._job = Job(
            model=model,
            dataset=dataset,
            optimizer=optimizer,
            global_batch=global_batch,
            microbatch=microbatch,
            max_failures=max_failures,
            min_pipeline_nodes=min_pipeline_nodes,
            seed=seed,
            precision=precision,
            clip_grad_norm=clip_grad_norm,
            on_nonfinite=on_nonfinite,
            checkpoint_every=checkpoint_every,
            compare_replicas_every=compare_replicas_every,
            schedule=os.environ.get("RESILIENT_SCHEDULE") or schedule,
            num_chunks=num_chunks,
            tp_chunks=int(os.environ.get("RESILIENT_TP_CHUNKS") or 0) or tp_chunks,
            planner=os.environ.get("RESILIENT_PLANNER") or planner or "",
            num_workers=num_workers,
            read_ahead=read_ahead,
            device=_device(device),
            comm_timeout_s=comm_timeout_s,
        )
        self._client: AgentClient | SingleProcessClient | None = None
        self._worker: Worker | None = None
        self._final: Path | None = None

    def fit(self, num_steps: int, *, resume: str | Path | None = None) -> FitResult:
        """Train up to step ``num_steps``; called once, on every worker.

        Args:
            num_steps: Steps of the whole job, those before a resumed checkpoint included.
            resume: A checkpoint folder to begin from, or that of a run for its newest sound one, for a script run by
                itself; under ``resilient run`` its ``--resume`` says so for all workers.

        Returns:
            The result, after the last step is committed and the final checkpoint is written.

        Raises:
            ValueError: ``num_steps`` or ``resume`` cannot be, or another launcher has started several copies.
            CheckpointError: ``resume`` cannot be read, or is another model's.
            NonFiniteError: A step's loss or gradient was not finite, on the worker that found where that began.
            Exception: What the model or the data set raised, on the worker where it did; from Python 3.11 on with a
                note of the action at which it came.
            SystemExit: The script runs under ``resilient profile``, which wants the job described and not trained.
        """
        job = self._job.until(num_steps)
        check_trainable(job)
        keep_freed_memory()  # whoever wants the job described measures it, and is to do so as it trains
        if leave_description(job):
            raise SystemExit(0)
        if self._worker is not None:
            raise ValueError("fit must be called once per Trainer, got a second call; make another Trainer")
        if not isinstance(resume, str | Path | None):
            raise ArgumentError("resume", "be a checkpoint folder or None", described(resume), "give its path")
        if not AgentClient.is_wanted():
            check_started_once(os.environ, sys.argv, is_script=True)
        _log_to_stderr()
        # forked before there are connections, threads of communication or CUDA, of which they are to have nothing
        first = Cell.of_chain(0, job.microbatch)
        with data_processes(reader_of(job).read, job.num_workers, first) as processes:
            return self._train(job, resume, processes)

    def _train(self, job: Job, resume: str | Path | None, processes: DataProcesses | None) -> FitResult:
        num_steps, agent = job.num_steps, AgentClient.from_environment()
        if agent is not None and resume is not None:
            raise ValueError(f"resume must be None under `resilient run`, got {resume}; use `resilient run --resume`")
        resume = None if resume is None else manifest.resumed_folder(resume)
        if resume is not None and manifest.read_resumed(resume).step > num_steps:
            raise ValueError(
                f"num_steps must be >= the resumed checkpoint's step, got {num_steps} for {resume}; train longer"
            )
        client = self._client = agent or SingleProcessClient(
            _single_process_directory(), str(resume) if resume else None
        )
        samples = draw_samples(job)
        told = alike(job, [read for each in samples for read in each.samples]) if agent is not None else {}
        planning = None
        if agent is not None and job.planner:
            cluster, num_nodes, degree = cluster_from_environment()
            known = bool(os.environ.get("RESILIENT_PLANNED"))
            told_of = partial(_say, client)
            profile, planning = planned_job(job, cluster, num_nodes, told_of, tp_degree=degree, is_planned=known)
        else:
            profile = job_profile(job, samples, partial(_say, client))
        del samples  # they may be large
        host, traced_steps = os.environ.get("RESILIENT_HOST", "127.0.0.1"), os.environ.get("RESILIENT_TRACE", "")
        secret = bytes.fromhex(os.environ.get("RESILIENT_SECRET", "")) or nonce()
        ports = os.environ.get("RESILIENT_PORT_RANGE", "")
        steps = parse_steps(traced_steps)
        self._worker = Worker(job, profile, client, host, secret, steps, processes, told, planning, ports)
        if isinstance(client, AgentClient):
            sys.stdout = _ForwardedOutput(sys.stdout, client, self._worker)
            self._worker.run()
        else:
            with client.interruptible():
                self._worker.run()
        self._final = manifest.folder(self._client.run_directory, num_steps)
        return FitResult(step=num_steps, checkpoint=self._final, is_main=self._worker.is_main)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Full names, ``<layer>.<parameter>``, of what is trained: what the patterns of parameter groups are of."""
        return self._job.parameter_names()

    @property
    def losses(self) -> dict[int, float]:
        """Step -> loss, of a script run by itself; under ``resilient run`` empty, ``events.jsonl`` has them there."""
        return dict(self._client.losses) if isinstance(self._client, SingleProcessClient) else {}

    def note(self, name: str, value: float | int | str) -> None:
        """Add a named value (an accuracy, say) to the job's report; only the main worker's counts."""
        if self._client is None or self._worker is None:
            raise ValueError(f"note must be called after fit, got {name!r} before it; call fit first")
        if self._worker.is_main:
            self._client.send(Note(name=name, value=value))

    def whole_model(self) -> WholeModel:
        """Return the trained model in this process, from the final checkpoint, ready for evaluation.

        Raises:
            ValueError: ``fit`` has not ended.
            CheckpointError: The final checkpoint cannot be read from here.
        """
        if self._final is None:
            raise ValueError("whole_model must be called after fit, got an untrained Trainer; call fit first")
        job, layouts = self._job, self._job.layouts()
        states = {
            spec.name: LayerState(spec, layouts[spec.name], job.optimizer.slots, job.dtype, job.device)
            for spec in job.model.layers
        }
        checkpoint.load(self._final, states.values())
        whole = WholeModel(job.model, {spec.name: bind(spec, states, job.device) for spec in job.model.layers})
        return whole.eval()


class _ForwardedOutput:
    """Standard output that is also shown to the person who started the job, when this worker speaks for it."""

    def __init__(self, stream: TextIO, client: AgentClient, worker: Worker) -> None:
        self._stream = stream
        self._client = client
        self._worker = worker
        self._line = ""

    def write(self, text: str) -> int:
        if self._worker.is_main:
            *lines, self._line = (self._line + text).split("\n")
            for line in lines:
                self._client.send(Output(text=line, is_logged=True))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _device(wanted: str | torch.device | None) -> torch.device:
    """Return where this worker trains; a GPU without a number is one of its own, as far as there are enough."""
    usable = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(usable if wanted is None else wanted)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", usable):
        fix = "leave it out to train on the CPU" if usable == "cpu" else "leave it out to train on a GPU"
        here = "cpu" if usable == "cpu" else "cpu or cuda"
        raise ArgumentError("device", f"be one that can train here ({here})", repr(wanted), fix)
    if device == torch.device("cuda"):
        # not the local rank: nodes that are simulated on one machine share its GPUs out, too
        return torch.device("cuda", int(os.environ.get("RANK", "0")) % torch.cuda.device_count())
    return device


def _say(client: AgentClient | SingleProcessClient, text: str) -> None:
    client.send(Output(text=text))


def _single_process_directory() -> str:
    return os.environ.get("RESILIENT_RUN_DIR", f"runs/{time.strftime('%Y%m%d-%H%M%S')}-one-process-{os.getpid()}")


def _log_to_stderr() -> None:
    """Show the runtime's log, unless the script has set up logging itself."""
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
        logging.getLogger("resilient").setLevel(logging.INFO)

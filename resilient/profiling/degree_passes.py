"""Takes microbatches through one device's part of each layer, to see what a tensor-parallel device needs.

Its peers are not there (:class:`resilient.comm.LastOfSeveral`): sizes are those of a stage, values are not. There are
as many chunks of tokens as the job's devices exchange. To the time that it computes for, that of its messages is
added, one after the other, as a link takes it. Of what devices divide unevenly the one that is looked at has the
most.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from resilient.comm import LastOfSeveral
from resilient.models.layer import Activations, Batch, LayerSpec, Model
from resilient.models.tensor_parallel.devices import TensorDevices
from resilient.profiling.layer_passes import (
    LayerPass,
    PassSeen,
    PassTimes,
    Run,
    Timed,
    Workspace,
    layout_bytes,
    take_times,
)
from resilient.runtime.job import Job
from resilient.state.binding import bind
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.templates.common.byte_intervals import ByteIntervals
from resilient.templates.inputs.cluster import Link
from resilient.templates.inputs.derive import TP_DEGREES
from resilient.templates.inputs.profile import LayerProfile


def tensor_degrees(model: Model, layouts: Mapping[str, BufferLayout]) -> tuple[tuple[int, ...], str]:
    """Return the tensor-parallel degrees that a model can be run at, and why there are no more.

    Args:
        model: The model.
        layouts: Of all its layers.
    """
    degrees: list[int] = []
    undivided = ""
    for degree in TP_DEGREES:
        reasons = (_why_not(spec, layouts[spec.name], degree) for spec in model.layers)
        reason = next(filter(None, reasons), "") if degree > 1 else ""
        undivided = undivided or reason
        degrees += [] if reason else [degree]
    return tuple(degrees), undivided


def _why_not(spec: LayerSpec, layout: BufferLayout, degree: int) -> str:
    few = next((entry for entry in layout.entries if entry.is_cut and entry.shape[entry.cut] < degree), None)
    if few is not None:
        return f"there is not a row for each of {degree} devices in {few.name!r} of layer {spec.name!r}"
    return spec.why_not(degree)


@dataclass(frozen=True, kw_only=True)
class DeviceCosts:
    """What a layer takes of a device beside its state and its gradients.

    Args:
        seen: What its inspection has shown, of each microbatch.
        workspaces: Of each, what is in use at a time beside what is kept.
        times: Of each microbatch, with the exchanges.
    """

    seen: Sequence[PassSeen]
    workspaces: Sequence[Workspace]
    times: Sequence[PassTimes]


class DegreePasses:
    """Microbatches on their way through a model's layers at one tensor-parallel degree.

    Args:
        job: The job.
        layouts: Of all its layers.
        batches: The microbatches.
        degree: One that all layers can be run at.
        timed: The clock.
        link: Between two of the devices.
        entering: What enters the first layer that they go through, of each; nothing by default.
    """

    def __init__(
        self,
        job: Job,
        layouts: Mapping[str, BufferLayout],
        batches: Sequence[Batch],
        degree: int,
        timed: Timed,
        link: Link,
        entering: Sequence[Activations] = (),
    ) -> None:
        self._job = job
        self._layouts = layouts
        self._degree = degree
        self._timed = timed
        self._link = link
        self._batches = batches
        self._entering = list(entering) or [Activations() for _ in batches]
        self._known: dict[Hashable, DeviceCosts] = {}

    def advance(self, index: int, kind: Hashable) -> DeviceCosts:
        """Go through one more layer; return what it takes.

        Args:
            index: The layer's in the model.
            kind: Layers of one kind take the same.
        """
        job, spec = self._job, self._job.model.layers[index]
        peers = LastOfSeveral(self._degree)
        devices = TensorDevices(peers, tuple(range(self._degree)), job.tp_chunks)
        names = dict.fromkeys((spec.name, *(owner for owner, _ in spec.tied.values())))
        module = bind(spec, {name: self._state(name) for name in names}, job.device, devices)
        pairs = zip(self._batches, self._entering, strict=True)
        passes = [LayerPass(job, index, module, batch, entering) for batch, entering in pairs]
        if kind not in self._known:
            self._known[kind] = self._costs(module, passes, peers)
        self._entering = [one.sent() for one in passes]
        return self._known[kind]

    def _costs(self, module: nn.Module, passes: Sequence[LayerPass], peers: LastOfSeveral) -> DeviceCosts:
        def with_exchanges(run: Run) -> float:
            peers.received.clear()
            computing_ms = self._timed(run)
            return computing_ms + sum(map(self._link.transfer_ms, peers.received))

        seen, times = [one.inspect() for one in passes], [PassTimes() for _ in passes]
        workspaces = [one.workspace(each) for one, each in zip(passes, seen, strict=True)]
        trainable = any(parameter.requires_grad for parameter in module.parameters())
        take_times(passes, seen, times, with_exchanges, trainable=trainable)
        return DeviceCosts(seen=seen, workspaces=workspaces, times=times)

    def _state(self, name: str) -> LayerState:
        job, layout = self._job, self._layouts[name]
        rows = layout.rows(0, job.dtype.itemsize)
        whole = LayerProfile(name=name, costs=(), parameter_bytes=layout_bytes(job, layout)[0], rows=rows)
        held: ByteIntervals = whole.part(self._degree - 1, self._degree)
        return LayerState(job.layer(name), layout, (), job.dtype, job.device, held)

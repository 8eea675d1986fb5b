"""What the devices of one worker's stage divide, if there are several: made anew with each generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from resilient.comm import Communicator
from resilient.models.layer import Shapes
from resilient.models.tensor_parallel.devices import TensorDevices
from resilient.pipeline.p2p import Channel, Downstream, Upstream
from resilient.pipeline.sharded_stage import ShardedLayer
from resilient.pipeline.token_borders import SplitDownstream, SplitUpstream, TokenCuts
from resilient.state.gathered.gathered_state import GatheredState
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.templates.inputs.profile import LayerProfile, ModelProfile
from resilient.templates.plan import Plan, Slot

Tokens = Callable[[Shapes], Mapping[str, int]]


class StageSharding:
    """The states of a worker's stage, and who has the rest of them.

    Args:
        profile: Of the model.
        layouts: Of all its layers, by name.
        comm: The generation's groups.
        plan: Of the generation.
        slot: The worker's place in it.
        states: What it holds.
        tp_chunks: In how many chunks tensor-parallel devices exchange tokens.
        on_exchange: Called before each of their exchanges.

    Attributes:
        tensor_devices: Those of a tensor-parallel stage; None where there is one device, or each has microbatches of
            its own.
        gathered: The states by name; none where the stage is not sharded.
        arrivals: By index of each that is trained, in how many layers a backward adds to its gradient.
    """

    def __init__(
        self,
        profile: ModelProfile,
        layouts: Mapping[str, BufferLayout],
        comm: Communicator,
        plan: Plan,
        slot: Slot,
        states: Mapping[str, LayerState],
        tp_chunks: int = 1,
        on_exchange: Callable[[], None] = lambda: None,
    ) -> None:
        self._profile = profile
        self._layouts = layouts
        self._comm = comm
        self._slot = slot
        self.gathered: dict[str, GatheredState] = {}
        self.arrivals: dict[int, int] = {}
        devices = plan.rows_of(slot.pipeline_index)[slot.row_index]
        group = tuple(device.rank for device in devices)
        is_sharded, is_divided = slot.stages[0].shard > 1, len(devices) > 1
        is_shared = is_divided and not is_sharded
        self.tensor_devices = TensorDevices(comm, group, tp_chunks, on_exchange) if is_shared else None
        if not is_sharded:
            return
        held = [device.intervals(profile) for device in devices]
        self.gathered = {
            name: GatheredState(comm, group, [each[name] for each in held], state) for name, state in states.items()
        }
        numbers = (number for stage in slot.stages for number in range(stage.first_layer, stage.end_layer))
        self.arrivals = dict(Counter(index for number in numbers for index in self._trained(number)))

    def layer(self, number: int) -> ShardedLayer:
        """Return what is divided of a layer, by its number in the model."""
        return ShardedLayer(
            gathered=[self.gathered[name] for name in self._used(self._profile.layers[number])],
            trained={index: self.gathered[self._profile.layers[index].name] for index in self._trained(number)},
            has_backward=any(self._trained(before) for before in range(number + 1)),
        )

    def upstream(
        self, ranks: Sequence[int], device: torch.device, channel: Channel, tokens: Tokens
    ) -> Upstream | SplitUpstream:
        """Return the border to a stage before.

        Args:
            ranks: Of that stage's devices.
            device: Where received tensors go.
            channel: The border.
            tokens: As for :class:`TokenCuts`.
        """
        if len(ranks) == self._num_devices:
            return Upstream(self._comm, ranks[self._slot.shard_index], device, channel)
        parts = [Upstream(self._comm, rank, device, channel) for rank in ranks]
        return SplitUpstream(parts, self._cuts(len(ranks), tokens))

    def downstream(self, ranks: Sequence[int], channel: Channel, tokens: Tokens) -> Downstream | SplitDownstream:
        """Return the border to a stage after; see :meth:`upstream`."""
        if len(ranks) == self._num_devices:
            return Downstream(self._comm, ranks[self._slot.shard_index], channel)
        parts = [Downstream(self._comm, rank, channel) for rank in ranks]
        return SplitDownstream(parts, self._cuts(len(ranks), tokens))

    @property
    def _num_devices(self) -> int:
        return self._slot.stages[0].num_devices

    def _cuts(self, other_degree: int, tokens: Tokens) -> TokenCuts:
        return TokenCuts(
            index=self._slot.shard_index,
            degree=self._num_devices,
            other_degree=other_degree,
            tokens=tokens,
        )

    def _used(self, layer: LayerProfile) -> list[str]:
        """Return the states with parameters that a layer uses."""
        return [name for name in dict.fromkeys((layer.name, *layer.shares)) if self._layouts[name].entries]

    def _trained(self, number: int) -> list[int]:
        """Return the indices of the states that a layer uses and that are trained, the last layer's first."""
        used = self._used(self._profile.layers[number])
        indices = (self._profile.index(name) for name in used if self._layouts[name].num_trainable)
        return sorted(indices, reverse=True)

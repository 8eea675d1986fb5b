"""What the devices of one worker's stage divide, if they do: made anew with each generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from resilient.comm import Communicator
from resilient.pipeline.sharded_stage import ShardedLayer
from resilient.state.gathered.gathered_state import GatheredState
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.templates.inputs.profile import LayerProfile, ModelProfile
from resilient.templates.plan import Plan, Slot


class StageSharding:
    """The states of a worker's stage, and who has the rest of them.

    Args:
        profile: Of the model.
        layouts: Of all its layers, by name.
        comm: The generation's groups.
        plan: Of the generation.
        slot: The worker's place in it.
        states: What it holds.

    Attributes:
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
    ) -> None:
        self._profile = profile
        self._layouts = layouts
        self.gathered: dict[str, GatheredState] = {}
        self.arrivals: dict[int, int] = {}
        if slot.stages[0].shard == 1:
            return
        row = slot.pipeline_index, slot.row_index
        devices = [other for other in plan.slots if (other.pipeline_index, other.row_index) == row]
        held = [device.intervals(profile) for device in devices]
        group = tuple(device.rank for device in devices)
        self.gathered = {
            name: GatheredState(comm, group, [each[name] for each in held], state) for name, state in states.items()
        }
        numbers = range(slot.stages[0].first_layer, slot.stages[0].end_layer)
        self.arrivals = dict(Counter(index for number in numbers for index in self._trained(number)))

    def layer(self, number: int) -> ShardedLayer:
        """Return what is divided of a layer, by its number in the model."""
        return ShardedLayer(
            gathered=[self.gathered[name] for name in self._used(self._profile.layers[number])],
            trained={index: self.gathered[self._profile.layers[index].name] for index in self._trained(number)},
            has_backward=any(self._trained(before) for before in range(number + 1)),
        )

    def _used(self, layer: LayerProfile) -> list[str]:
        """Return the states with parameters that a layer uses."""
        return [name for name in dict.fromkeys((layer.name, *layer.shares)) if self._layouts[name].entries]

    def _trained(self, number: int) -> list[int]:
        """Return the indices of the states that a layer uses and that are trained, the last layer's first."""
        used = self._used(self._profile.layers[number])
        indices = (self._profile.index(name) for name in used if self._layouts[name].num_trainable)
        return sorted(indices, reverse=True)

"""OrchMLLM: every phase (each encoder, the language model) is balanced for itself, over all instances.

Source: OrchMLLM, batch post-balancing (:mod:`resilient.planners.post_balance`), node-wise rearrangement
(:mod:`resilient.planners.nodewise`) and its orchestrator: samples lie differently in each phase, and encoder outputs go
straight to where the language model needs them (:func:`resilient.planners.permutations.handover`). Once per job it
decides nothing: the configuration is the uniform planner's.

Instances are the microbatches of all replicas, each with its part of the replica's speed: the paper balances one
microbatch for each. Who reads a sample from disk is free here, so what is rearranged is the language model's batches
between replicas of equal speed, such that little encoder output crosses; replicas take the place of the paper's nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from resilient.planners.balance import Floats, longest_first
from resilient.planners.nodewise import rearrange
from resilient.planners.planner import LLM, Assignment, Configuration, Place, Replica, Setting
from resilient.planners.post_balance import balance_padded, balance_quadratic
from resilient.planners.samples import Ints, SampleTable
from resilient.planners.slots import slots
from resilient.planners.uniform import Uniform

_ATTENTION = 0.1
"""Part of a unit's time from which on attention counts."""


@dataclass(frozen=True)
class OrchMLLM:
    """The planner.

    Args:
        padded: Units whose batches are padded to their longest sample, with the cost of a squared length relative to a
            length (0 without convolutional attention); the others are packed.
    """

    name: str = "orchmllm"
    source: str = "OrchMLLM (arXiv 2503.23830), batch post-balancing and global orchestrator"
    padded: Mapping[str, float] = field(default_factory=dict)

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the uniform configuration.

        Args:
            setting: The job.
            samples: A sample of the data set.

        Raises:
            ValueError: It does not fit.
        """
        return Uniform().configure(setting, samples)

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Balance each phase for itself, then rearrange the language model's.

        Args:
            setting: The job.
            configuration: As decided.
            batch: The global batch.
            replicas: The language model's replicas as they are now.
        """
        replica, microbatch, speeds = slots(replicas)
        slot = {name: self._balance(setting, configuration, batch, name, speeds) for name in configuration.units}
        moved = _rearrange(setting, batch, {name: replica[each] for name, each in slot.items()}, replicas)
        units: dict[str, Place] = {}
        for name, each in slot.items():
            where = replica[each]
            units[name] = Place(replica=moved[where] if name == LLM else where, microbatch=microbatch[each])
        return Assignment(units=units)

    def _balance(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, name: str, speeds: Floats
    ) -> Ints:
        lengths = batch.units[name]
        if name in self.padded:
            return balance_padded(lengths.tokens, speeds, squared=self.padded[name])
        curve = setting.costs.by_name[name].work(configuration.units[name].tp)
        attention = curve.attention * float(lengths.squares.sum())
        if attention > _ATTENTION * (attention + curve.linear * float(lengths.tokens.sum())):
            # Speeds are relative: so is what a slot holds per speed, and with it the tolerance.
            tolerance = float(lengths.tokens.mean()) / float(speeds.mean())
            return balance_quadratic(lengths.tokens, speeds, tolerance)
        return longest_first(lengths.tokens, speeds)


def _rearrange(setting: Setting, batch: SampleTable, replica: Mapping[str, Ints], replicas: Sequence[Replica]) -> Ints:
    """Return, for each replica, which one takes the language model's samples that were balanced for it."""
    count = len(replicas)
    crossing = np.zeros(count * count)
    for name, where in replica.items():
        if name != LLM:
            output = batch.units[name].tokens * setting.costs.by_name[name].output_bytes
            crossing += np.bincount(replica[LLM] * count + where, weights=output, minlength=count * count)
    kinds = np.unique([(each.num_microbatches, each.speed) for each in replicas], axis=0, return_inverse=True)[1]
    return rearrange(crossing.reshape(count, count), np.arange(count, dtype=np.int64), kinds.reshape(-1)).instance

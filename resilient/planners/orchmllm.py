"""OrchMLLM: every phase (each encoder, the language model) is balanced for itself, over all instances.

Source: OrchMLLM, batch post-balancing (:mod:`resilient.planners.post_balance`), node-wise rearrangement
(:mod:`resilient.planners.nodewise`) and its orchestrator: samples lie differently in each phase, and encoder outputs go
straight to where the language model needs them (:func:`resilient.planners.permutations.handover`). Once per job it
decides nothing: the configuration is the uniform planner's.

The paper's step has one microbatch per instance. Here a replica has several, and those of one turn, the first of each
replica, the second and so on, are balanced as the paper's step is: a sample has the same turn in all units, so that
pipelines do not wait for encoders. Samples are dealt to turns by their work in all units. Who reads a sample from disk
is free, so what is rearranged is the language model's batches of a turn, between equal replicas, such that little
encoder output crosses; replicas take the place of the paper's nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from resilient.planners.balance import Floats, loads, longest_first
from resilient.planners.nodewise import rearrange
from resilient.planners.planner import LLM, Assignment, Configuration, Place, Replica, Setting
from resilient.planners.post_balance import balance_padded, balance_quadratic
from resilient.planners.samples import Ints, SampleTable
from resilient.planners.slots import slots
from resilient.planners.uniform import Uniform

_ATTENTION = 0.1
"""Part of a unit's time from which on attention counts."""

_ALIKE = 0.1
"""By what part of their tokens batches may differ that are exchanged."""


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
        """Balance each phase of each turn for itself, then rearrange the language model's.

        Args:
            setting: The job.
            configuration: As decided.
            batch: The global batch.
            replicas: The language model's replicas as they are now.
        """
        replica, microbatch, speeds = slots(replicas)
        rates = np.array([each.speed for each in replicas])
        turn = _turns(setting, configuration, batch, loads(speeds, microbatch, int(microbatch.max()) + 1))
        units = {name: np.empty(len(batch), dtype=np.int64) for name in configuration.units}
        done = {name: np.zeros(len(replicas)) for name in configuration.units}
        for number in range(int(microbatch.max()) + 1):
            chosen, here = np.flatnonzero(turn == number), np.flatnonzero(microbatch == number)
            samples = batch[chosen]
            instances: dict[str, Ints] = {}
            for name in units:
                # The first instances get the longest samples: they are those that had least before.
                order = np.argsort(done[name][replica[here]], kind="stable")
                instances[name] = order[self._balance(setting, configuration, samples, name, speeds[here[order]])]
            instances[LLM] = _rearrange(setting, samples, instances, speeds[here])[instances[LLM]]
            for name, instance in instances.items():
                units[name][chosen] = replica[here[instance]]
                done[name] += loads(samples.units[name].tokens, units[name][chosen], len(replicas)) / rates
        return Assignment(units={name: Place(replica=each, microbatch=turn) for name, each in units.items()})

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
            tolerance = max(float(lengths.tokens.mean()), 1.0) / float(speeds.mean())
            return balance_quadratic(lengths.tokens, speeds, tolerance)
        return longest_first(lengths.tokens, speeds)


def _turns(setting: Setting, configuration: Configuration, batch: SampleTable, speeds: Floats) -> Ints:
    """Return each sample's turn: longest first by the work in all units, to turns of the speed of their instances."""
    work = np.zeros(len(batch))
    for name, spread in configuration.units.items():
        work += setting.sample_ms(name, batch.units[name], spread.tp)
    return longest_first(work, speeds)


def _rearrange(setting: Setting, samples: SampleTable, instances: Mapping[str, Ints], speeds: Floats) -> Ints:
    """Return, for each instance, which one takes the language model's samples that were balanced for it."""
    count = len(speeds)
    crossing = np.zeros(count * count)
    for name, where in instances.items():
        if name != LLM:
            output = samples.units[name].tokens * setting.costs.by_name[name].output_bytes
            crossing += np.bincount(instances[LLM] * count + where, weights=output, minlength=count * count)
    held = loads(samples.units[LLM].tokens, instances[LLM], count)
    alike = np.stack([speeds, np.floor(np.log(np.maximum(held, 1)) / np.log1p(_ALIKE))], axis=1)
    kinds = np.unique(alike, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    # Not solved: that would take longer for all turns than the step.
    return rearrange(crossing.reshape(count, count), np.arange(count, dtype=np.int64), kinds, solver_size=0).instance

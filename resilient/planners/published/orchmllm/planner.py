"""OrchMLLM: every phase (each encoder, the language model) is balanced for itself, over all instances.

Source: OrchMLLM, batch post-balancing (:mod:`resilient.planners.published.orchmllm.post_balance`), node-wise
rearrangement (:mod:`resilient.planners.published.orchmllm.nodewise`) and its orchestrator: samples lie differently in
each phase, and encoder outputs go straight to where the language model needs them.

The paper's phases follow each other on the same devices. Where an encoder has stages of its own, the slowest stage
decides how long a step takes, and no balance over replicas helps the others. So of the configurations of those planners
that only spread units evenly, the one is taken that is fastest in simulation; mostly one with all units on the same
devices.

The paper's step has one microbatch per instance. Where there are no stages, so has this one if the memory holds it.
Else a replica has several, and those of one turn, which run at the same time on different replicas, are balanced as the
paper's step is: a sample has the same turn in all units, so that pipelines do not wait for encoders. Replicas with
fewer microbatches are left out of some turns, evenly. Samples are dealt to turns by their work in all units. Who reads
a sample from disk is free, so what is rearranged is the language model's batches of a turn, between equal replicas,
such that little encoder output crosses; replicas take the place of the paper's nodes.

An encoder may have more or fewer replicas than the language model has: what a replica of that has of it counts as its
speed. Batches of units that pad are balanced by what they take when padded.

Where encoders have stages of their own and replicas are unequal, as failures leave them, all units place a sample as
the language model does: to wait for another replica's encoder, which is at another microbatch, costs more than the
encoders' balance brings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.evaluation.known_batches import known_batches, timed
from resilient.planners.packing.balance import loads, longest_first
from resilient.planners.packing.slots import slots
from resilient.planners.planner import Assignment, Configuration, Encoders, Place, Replica, Setting
from resilient.planners.published.baselines.balanced import EncoderFirst, FullySharded
from resilient.planners.published.baselines.mean_microbatch import fastest
from resilient.planners.published.baselines.uniform import Uniform
from resilient.planners.published.orchmllm.nodewise import rearrange
from resilient.planners.published.orchmllm.post_balance import balance_padded, balance_quadratic
from resilient.planners.stages.device_layout import lanes_of_pipelines
from resilient.planners.stages.memory_shares import kept_shares
from resilient.templates.common.arrays import Floats, Ints

_ATTENTION = 0.1
"""Part of a unit's time from which on attention counts."""

_ALIKE = 0.1
"""By what part of their tokens batches may differ that are exchanged."""

_ALIKE_SPEEDS = 0.2
"""By what part speeds may differ that count as equal."""


@dataclass(frozen=True)
class OrchMLLM:
    """The planner."""

    name: str = "orchmllm"
    source: str = "OrchMLLM (arXiv 2503.23830), batch post-balancing and global orchestrator"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the fastest of the configurations of DIP, fully sharded data parallelism and the uniform planner.

        Args:
            setting: The job.
            samples: A sample of the data set; the first batch of them is simulated.

        Raises:
            ValueError: It does not fit.
        """
        batches = known_batches(setting, samples, 1)
        found: list[Configuration] = []
        for each in (EncoderFirst(), FullySharded(), Uniform()):
            with contextlib.suppress(ValueError):  # the last of them says why none fits
                plans = list(_with_fewer_microbatches(each.configure(setting, samples)))
                found.extend(timed(self, setting, plans, batches))
        return fastest(found, self.name, setting) if found else Uniform(name=self.name).configure(setting, samples)

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Balance each phase of each turn for itself, then rearrange the language model's.

        Without stages, replicas that are given more microbatches than configured, as after losses, have them only where
        fewer do not fit.

        Args:
            setting: The job.
            configuration: As decided.
            batch: The global batch.
            replicas: The language model's replicas as they are now.
        """
        number = configuration.num_microbatches
        fewer = [replace(each, num_microbatches=min(each.num_microbatches, number)) for each in replicas]
        if configuration.units[LLM].pp == 1 and fewer != list(replicas):
            found = self._balanced(setting, configuration, batch, fewer)
            if _fits(setting, configuration, batch, fewer, found):
                return found
        return self._balanced(setting, configuration, batch, replicas)

    @staticmethod
    def _balanced(
        setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        replica, microbatch, speeds = slots(replicas)
        speeds = _classes(speeds)
        counts = np.array([each.num_microbatches for each in replicas])
        turn_of = (2 * microbatch + 1) * int(counts.max()) // (2 * counts[replica])
        rates = np.array([each.speed for each in replicas])
        work = {
            name: setting.sample_ms(name, batch.units[name], spread.tp, spread.cp)
            for name, spread in configuration.units.items()
        }
        # Samples are dealt to turns, which are as fast as their instances together, by their work in all units.
        rate = loads(speeds, turn_of, int(counts.max()))
        turn = longest_first(sum(work.values()), rate)
        units: dict[str, Place] = {}
        together = not configuration.colocated and len(set(replicas)) > 1
        for name in [LLM] if together else sorted(work, key=lambda each: each == LLM):
            lengths, balance = _phase(setting, configuration, batch, name)
            lanes = _lanes(configuration, name, len(replicas))
            own, pace = speeds * lanes[replica], rates * lanes
            where, done = np.empty(len(batch), dtype=np.int64), np.zeros(len(replicas))
            for number in range(len(rate)):
                chosen, here = np.flatnonzero(turn == number), np.flatnonzero(turn_of == number)
                # The first instances get the longest samples: they are those that would be done with one first.
                longest = work[name][chosen].max(initial=0.0)
                here = here[np.argsort((done + longest / pace)[replica[here]], kind="stable")]
                instance = balance(lengths[chosen], own[here])
                if name == LLM and units:
                    before = {each: place.replica[chosen] for each, place in units.items()}
                    taken_by = _rearrange(setting, batch[chosen], instance, before, replica[here], speeds[here])
                    instance = taken_by[instance]
                where[chosen] = here[instance]
                done += loads(work[name][chosen], replica[where[chosen]], len(replicas)) / pace
            units[name] = Place(replica=replica[where], microbatch=microbatch[where])
        return Assignment(units={name: units[LLM] if together else units[name] for name in configuration.units})


def _with_fewer_microbatches(configuration: Configuration) -> Iterator[Configuration]:
    """Yield a configuration, and if it has one stage, it with half of the microbatches, a quarter, ... and one."""
    yield configuration
    number = configuration.num_microbatches if configuration.units[LLM].pp == 1 else 1
    while number > 1:
        number = -(-number // 2)
        yield replace(configuration, num_microbatches=number)


def _fits(
    setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica], found: Assignment
) -> bool:
    """Return whether what samples keep surely fits into the memory."""
    try:
        shares = kept_shares(setting, configuration, batch, replicas)
    except ValueError:
        return False
    number = configuration.num_microbatches
    return all(
        loads(shares, place.replica * number + place.microbatch, 1).max(initial=0) <= configuration.units[name].cp
        for name, place in found.units.items()
    )


def _phase(
    setting: Setting, configuration: Configuration, batch: SampleTable, name: str
) -> tuple[Floats, Callable[[Floats, Floats], Ints]]:
    """Return what counts as a unit's lengths, and what gives such lengths out to instances of such speeds."""
    lengths, spread = batch.units[name], configuration.units[name]
    # What takes longer than predicted counts as so much longer.
    factor = setting.correction.factor(name, spread.tp, lengths.longest)
    curve = setting.costs.by_name[name].work(spread.tp, spread.cp)
    tokens = lengths.tokens * factor
    if setting.costs.by_name[name].padded:
        return tokens, partial(balance_padded, squared=curve.attention / curve.linear if curve.linear else 0.0)
    attention = curve.attention * float((lengths.squares * factor).sum())
    if attention > _ATTENTION * (attention + curve.linear * float(tokens.sum())):
        return tokens, _by_squares
    return tokens, longest_first


def _by_squares(lengths: Floats, speeds: Floats) -> Ints:
    # Speeds are relative: so is what an instance holds per speed, and with it the tolerance.
    mean = max(float(lengths.mean()), 1.0) if len(lengths) else 1.0
    return balance_quadratic(lengths, speeds, mean / float(speeds.mean()))


def _lanes(configuration: Configuration, name: str, num_pipelines: int) -> Floats:
    """Return how many lanes of a unit each pipeline has, parts of one where several share it. [num_pipelines]"""
    if configuration.encoders is Encoders.REPLICATED:
        return np.ones(num_pipelines)
    lanes = lanes_of_pipelines(configuration.units[name], configuration.units[LLM], num_pipelines)
    first = lanes[:, 0]
    return (lanes[:, 1] - first) / np.bincount(first)[first]


def _classes(speeds: Floats) -> Floats:
    """Return speeds of which those that are nearly equal are equal.

    Microbatches are given out by speed, so what a replica does in the time of one is nearly the same everywhere. The
    fastest by a little would else get the longest sample of every turn, and be busy the longest.
    """
    step = np.log1p(_ALIKE_SPEEDS)
    return np.exp(np.rint(np.log(speeds / speeds.max()) / step) * step)


def _rearrange(
    setting: Setting, samples: SampleTable, instance: Ints, before: Mapping[str, Ints], replica: Ints, speeds: Floats
) -> Ints:
    """Return, for each instance, which one takes the language model's samples that were balanced for it.

    Args:
        setting: The job.
        samples: Those of the turn.
        instance: Of each sample.
        before: The replica that has each sample's output of an encoder, by encoder.
        replica: Of each instance.
        speeds: Likewise.
    """
    num_nodes = 1 + max(int(each.max(initial=0)) for each in (replica, *before.values()))
    crossing = np.zeros(len(replica) * num_nodes)
    for name, where in before.items():
        output = samples.units[name].tokens * setting.costs.by_name[name].output_bytes
        crossing += np.bincount(instance * num_nodes + where, weights=output, minlength=len(crossing))
    held = loads(samples.units[LLM].tokens, instance, len(replica))
    alike = np.floor(np.log(np.maximum(held, 1)) / np.log1p(_ALIKE))
    kinds = np.unique(speeds, return_inverse=True)[1] * (alike.max() + 1) + alike
    return rearrange(crossing.reshape(-1, num_nodes), replica, kinds.astype(np.int64))

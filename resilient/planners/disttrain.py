"""DistTrain: every unit has as many devices, and its own parallelism, as makes all of them equally fast.

Source: Zhang et al., "DistTrain" (SIGCOMM'25): disaggregated model orchestration and data reordering. With C the
forward and backward time of a sample, M the samples of a microbatch and BS those of a step, a unit u of dp replicas of
pp stages of tp devices computes, for each microbatch of all replicas of the language model at once,

    warm_u = DP_llm * M / dp * C_u(tp),    T_u = warm_u / pp,
    step = sum(warm_u) + max(T_u) * (BS / (DP_llm * M) - 1),

and keeps P / (pp * tp) + S / (pp * tp * dp) + L / tp bytes (parameters with gradients, the sharded optimizer, and the
activations of a microbatch). The paper relaxes pp to a convex problem. Here it is a whole number, and T_u is that of
the slowest stage when layers stay whole; what a call takes however few its samples are counts too. Beyond the paper,
the sum of gradients is added that takes longest, for the stage that has most of them, and memory has room for what
else is in flight. The search (:mod:`resilient.planners.disttrain_search`) is exact under these formulas: it leaves out
only what a lower bound excludes.

Samples are spread longest first over replicas by what they cost, and microbatches put into an order
(:mod:`resilient.planners.microbatch_order`). Replicas here are of unequal speed, so they need not get equally many
samples: batches are packed, not padded. An order that needs more memory than there is is not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from resilient.planners.balance import Floats, loads, longest_first
from resilient.planners.disttrain_search import search
from resilient.planners.entrain_memory import Room
from resilient.planners.expected import stage_curves
from resilient.planners.microbatch_order import reorder
from resilient.planners.planner import LLM, Assignment, Configuration, Place, Replica, Setting
from resilient.planners.samples import Ints, SampleTable


@dataclass(frozen=True)
class DistTrain:
    """The planner.

    Args:
        order: Puts microbatches into an order by their forwards and backwards on each stage;
            :func:`~resilient.planners.microbatch_order.fill_intervals` is the paper's own.
    """

    name: str = "disttrain"
    source: str = "DistTrain (SIGCOMM'25), model orchestration and data reordering"
    order: Callable[[npt.ArrayLike, npt.ArrayLike], Ints] = reorder

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the parallelism of each unit under which a step takes least; of equals, one on the fewest devices.

        Args:
            setting: The job.
            samples: A sample of the data set.

        Raises:
            ValueError: The model does not fit.
        """
        return search(setting, samples)

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Spread samples over replicas and order each replica's microbatches; all units place a sample alike.

        Args:
            setting: The job.
            configuration: As decided.
            batch: The global batch.
            replicas: The language model's replicas as they are now.
        """
        forward, backward, calls = _stage_ms(setting, configuration, batch)
        room = _room(setting, configuration)
        replica = longest_first((forward + backward).sum(axis=0), [each.speed for each in replicas])
        microbatch = np.zeros(len(batch), np.int64)
        for number, each in enumerate(replicas):
            members = np.flatnonzero(replica == number)
            parts = np.array_split(members, each.num_microbatches)
            times = [
                np.stack([one[:, part].sum(axis=1) + call * bool(len(part)) for part in parts], axis=1)
                for one, call in zip((forward, backward), calls, strict=True)
            ]
            part, order = np.repeat(np.arange(len(parts)), [len(each) for each in parts]), self.order(*times)
            place = np.argsort(order)[part]
            if room is not None and room.used(batch[members], place, place, len(parts)) > 1:
                place = _fitting(room, batch[members], part, order)
            microbatch[members] = place
        place = Place(replica=replica, microbatch=microbatch)
        return Assignment(units=dict.fromkeys(configuration.units, place))


def _room(setting: Setting, configuration: Configuration) -> Room | None:
    """Return what a replica of the language model has left for activations, in encoders that it shares with others."""
    room = Room.of(setting, configuration)
    if room is None:
        return None
    shares = {name: configuration.units[LLM].dp / spread.dp for name, spread in configuration.units.items()}
    return Room(units={name: replace(kept, parts=kept.parts * shares[name]) for name, kept in room.units.items()})


def _fitting(room: Room, samples: SampleTable, part: Ints, order: Ints) -> Ints:
    """Return the microbatch of each sample of a replica such that memory holds those that are in flight.

    An order may have heavy microbatches in a row. The next one is always the first of the order that still fits; if
    there is none at some time, samples are put into other microbatches, evenly.

    Args:
        room: What there is.
        samples: Of the replica.
        part: Of each sample, its microbatch as they come.
        order: Of those.
    """
    units = [(samples.units[name].tokens, kept) for name, kept in room.units.items()]
    windows = np.concatenate([kept.windows for _, kept in units])
    needs = np.concatenate([kept.parts[:, None] * loads(tokens, part, len(order)) for tokens, kept in units])
    sums = np.zeros((len(windows), len(order) + 1))
    place, waiting = np.zeros(len(order), np.int64), order.tolist()
    for position in range(len(order)):
        firsts = np.maximum(position + 1 - windows, 0)
        held = sums[:, position] - sums[np.arange(len(windows)), firsts]
        fits = (held[:, None] + needs[:, waiting] <= 1).all(axis=0)
        if not fits.any():
            return room.even(samples, len(order))
        chosen = waiting.pop(int(fits.argmax()))
        place[chosen], sums[:, position + 1] = position, sums[:, position] + needs[:, chosen]
    return place[part]


def _stage_ms(
    setting: Setting, configuration: Configuration, batch: SampleTable
) -> tuple[Floats, Floats, tuple[Floats, Floats]]:
    """Return each sample's forward and backward on each stage, in ms, and what calls take beside.

    A replica of an encoder works for several of the language model, or several for one: times are those of a microbatch
    of the language model. [num_stages, num_samples] twice, [num_stages] twice.
    """
    replicas = configuration.units[LLM].dp
    rows: list[tuple[Floats, Floats]] = []
    fixed: list[tuple[float, float]] = []
    for unit in setting.costs.units:
        spread, lengths = configuration.units[unit.name], batch.units[unit.name]
        share = replicas / spread.dp * setting.correction.factor(unit.name, spread.tp, lengths.longest)
        for forward, backward in stage_curves(unit, spread):
            rows.append((forward.of(lengths) * share, backward.of(lengths) * share))
            fixed.append((forward.fixed, backward.fixed))
    calls = np.array(fixed)
    return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows]), (calls[:, 0], calls[:, 1])

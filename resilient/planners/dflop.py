"""DFLOP: devices are split for the data there is, and every step's samples are put into even microbatches.

Source: DFLOP, the data-aware optimizer and the online microbatch scheduler. For i microbatches of GBS samples, unit u
with dp replicas of pp stages of tp devices computes for each microbatch

    dur_u = GBS / (i * dp) * C_u(tp) / pp,    step = (i + E_pp + L_pp - 1) * max(dur_u),

where the division by i * dp is missing in the paper's listing. C_u is the mean of the times of sampled data, which is
more than the time of the mean sample: attention is quadratic. A unit keeps activations until the gradient comes back
through all units after it: the first stage of an encoder for E_pp + L_pp microbatches. Of several encoders, which are
side by side, the deepest counts. As in
:mod:`resilient.planners.disttrain`, layers stay whole, and what calls take beside counts; so there may be too many
microbatches as well as too few. No replica has less than one sample a microbatch.

Beyond the paper, whose mean microbatch is all there is, the longest sample of a batch counts, which no scheduler
divides, and so do sums of gradients. With X for the expected time of that sample in all stages of its replica,

    step = (i - 1) * max(dur_u) + max((E_pp + L_pp) * max(dur_u), X) + sum of gradients.

Without X, data with a heavy tail are given as many replicas of one stage as there are devices, and a step takes several
times what was expected. A unit with fewer replicas than the language model is as slow, and keeps as much, as if each
pipeline had a part of one. One of the microbatches in memory may consist of the largest sample; the optimizer is
sharded over replicas. And i is as large as some whole number of samples in each microbatch lets it be: with 1.3 on
average, some microbatches take twice what others do.

The step has one minimum over i (it is the maximum of a convex and an ascending function), so all splits are searched,
each with the best i, and those left out that a lower bound excludes.

The paper runs its scheduler for the next batch while a step is computed, has units exchange activations between unequal
numbers of replicas, and normalises gradients by the global number of tokens. That is the runtime's business: ``assign``
is a function of the lengths of a batch, whenever they are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resilient.planners.balance import Floats, loads, longest_first
from resilient.planners.buckets import fill_buckets
from resilient.planners.costs import UnitCosts
from resilient.planners.expected import expected, parallelism
from resilient.planners.memory import fullest, kept_shares
from resilient.planners.planner import LLM, Assignment, Configuration, Place, Replica, Setting
from resilient.planners.samples import Ints, SampleTable
from resilient.planners.slots import slots


@dataclass(frozen=True)
class Dflop:
    """The planner.

    Args:
        time_limit_s: What the scheduler may take in every step with HiGHS in it. 0, as usual, leaves HiGHS out: what it
            finds in time depends on the machine and its load, and processes that assign by themselves must agree. With
            a limit one process must assign for all.
    """

    time_limit_s: float = 0.0
    name: str = "dflop"
    source: str = "DFLOP, data-aware optimizer and online microbatch scheduler"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the parallelism and number of microbatches under which a step takes least; of equals, fewest devices.

        Args:
            setting: The job; its ``microbatch`` is not used.
            samples: A sample of the data set.

        Raises:
            ValueError: The model does not fit.
        """
        units = setting.costs.units
        if LLM not in setting.costs.by_name:
            raise ValueError(f"costs must have a unit {LLM!r}, got {[unit.name for unit in units]}; name it so")
        found, step_ms = _best([_options(unit, samples, setting) for unit in units], setting)
        if found is None:
            raise ValueError(
                f"num_nodes must be enough for the model's units side by side, got {setting.num_nodes} of "
                f"{setting.cluster.devices_per_node} devices; use more, or larger ones"
            )
        degrees, num_microbatches = found
        spread = {
            unit.name: parallelism(unit, samples.units[unit.name], dp, pp, tp)
            for unit, (tp, dp, pp) in zip(units, degrees, strict=True)
        }
        return Configuration(units=spread, num_microbatches=num_microbatches, predicted_ms=step_ms)

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Put samples into microbatches such that the one that takes longest, in any unit, takes least.

        Where they would not fit into memory, large microbatches are kept apart; if that is not enough, samples are put
        into microbatches by memory instead. Of answers that do not fit either, the one that comes nearest is returned.

        Args:
            setting: The job.
            configuration: As decided.
            batch: The global batch.
            replicas: The language model's replicas as they are now.
        """
        replica, microbatch, speeds = slots(replicas)
        weights = stage_weights(setting, configuration, batch)
        bucket = fill_buckets(weights, speeds, time_limit_s=self.time_limit_s)
        place = Place(replica=replica[bucket], microbatch=microbatch[bucket])
        if fullest(setting, configuration, batch, place) > 1:
            kept = kept_shares(setting, configuration, batch)
            by_memory = longest_first(kept, np.ones(len(replica)))
            # The first that fits, or the one that comes nearest.
            place = min(
                (_apart(each, kept, replica, microbatch) for each in (bucket, by_memory)),
                key=lambda each: max(fullest(setting, configuration, batch, each), 1.0),
            )
        return Assignment(units=dict.fromkeys(configuration.units, place))


def stage_weights(setting: Setting, configuration: Configuration, batch: SampleTable) -> Floats:
    """Return what each sample costs a stage of each unit, in ms. [num_units, num_samples]

    A unit with half the language model's replicas computes two of its microbatches in the time of one.
    """
    rows: list[Floats] = []
    for unit in setting.costs.units:
        spread = configuration.units[unit.name]
        share = configuration.units[LLM].dp / spread.dp / spread.pp
        rows.append(setting.sample_ms(unit.name, batch.units[unit.name], spread.tp, spread.cp) * share)
    return np.stack(rows)


def _apart(bucket: Ints, kept: Floats, replica: Ints, microbatch: Ints) -> Place:
    """Return places such that each replica's largest microbatches, however many of them, are evenly among the others.

    Positions are taken in the order of their bits read backwards: 0, 4, 2, 6, 1, ...
    """
    size = loads(kept, bucket, len(replica))
    slot = np.empty(len(replica), dtype=np.int64)
    for each in range(int(replica[-1]) + 1):
        own = np.flatnonzero(replica == each)
        position, width = np.arange(len(own)), len(own).bit_length()
        backwards = sum((position >> bit & 1) << (width - 1 - bit) for bit in range(width))
        slot[own[np.argsort(-size[own], kind="stable")]] = own[np.argsort(backwards)]
    return Place(replica=replica[bucket], microbatch=microbatch[slot[bucket]])


def _options(unit: UnitCosts, samples: SampleTable, setting: Setting) -> Floats:
    """Return all (tp, dp, pp) of a unit that fit its state, as columns, in order of the time they take.

    Rows: tp, dp, pp; the slowest stage's time for the whole global batch as one microbatch, and for a call beside;
    the bytes of state; the bytes of that batch's activations on a device, and of the largest sample's; the time of the
    longest sample in all stages; that of the sums of gradients.
    """
    devices, batch, memory = setting.num_devices, setting.global_batch, setting.cluster.memory_bytes
    lengths = samples.units[unit.name]
    found: list[Floats] = []
    for each in expected(unit, lengths, devices, setting.cluster.devices_per_node):
        limits = np.arange(1, min(batch, devices // each.tp) + 1), np.arange(1, len(each.slowest_ms) + 1)
        dp, pp = (grid.ravel() for grid in np.meshgrid(*limits, indexing="ij"))
        few = dp * pp * each.tp <= devices
        dp, pp = dp[few], pp[few]
        token_bytes = each.token_bytes[pp - 1]
        values = (
            np.full(dp.shape, each.tp),
            dp,
            pp,
            batch / dp * each.slowest_ms[pp - 1],
            each.call_ms / pp,
            each.held_bytes[pp - 1] + each.optimizer_bytes[pp - 1] / dp,
            batch / dp * float(lengths.tokens.mean()) * token_bytes,
            float(lengths.tokens.max()) * token_bytes,
            np.full(dp.shape, _longest_ms(unit.work(each.tp).of(lengths), batch) + each.call_ms),
            each.sum_ms(dp, pp, setting.cluster),
        )
        found.append(np.stack(values).astype(np.float64))
    table = np.concatenate(found, axis=1)
    if memory is not None:
        least = table[KEPT] / (batch // table[DP])
        kept = least * (table[PP] - 1) + np.maximum(least, table[LARGEST])
        table = table[:, (table[STATE] < memory) & (table[STATE] + kept <= memory)]
    return table[:, np.argsort(table[WHOLE], kind="stable")]


def _longest_ms(times_ms: Floats, batch: int) -> float:
    """Return the expected time of the longest of so many samples, drawn from these."""
    below = (np.arange(len(times_ms) + 1) / len(times_ms)) ** batch
    return float(np.dot(np.sort(times_ms), np.diff(below)))


TP, DP, PP, WHOLE, CALL, STATE, KEPT, LARGEST, LONGEST, SUMS = range(10)
"""Rows of a table of options."""

_Found = tuple[list[tuple[int, int, int]], int]
"""(tp, dp, pp) of each unit, and the number of microbatches."""


def _best(tables: list[Floats], setting: Setting) -> tuple[_Found | None, float]:
    """Return the best of all options together, None if nothing fits, and the step's time in ms.

    Units that get devices in proportion to their work are searched first: what that takes excludes most of the rest.
    """
    if not all(table.shape[1] for table in tables):
        return None, np.inf
    work = np.array([(_size(table) * table[WHOLE]).min() for table in tables])
    shares = setting.num_devices * work / max(work.sum(), 1e-30)
    best_ns = np.inf
    for narrowest in (0.9, 0.5):
        near = [
            table[:, (_size(table) <= share) & (_size(table) >= narrowest * share)]
            for table, share in zip(tables, shares, strict=True)
        ]
        if all(table.shape[1] for table in near):
            best_ns = min(best_ns, _searched(near, setting)[1] * 1e6)
    tables = [table[:, table[WHOLE] * 1e6 <= best_ns + 1] for table in tables]
    fewest = [int(_size(table).min()) for table in tables]
    left = [setting.num_devices - sum(fewest) + own for own in fewest]
    if sum(fewest) > setting.num_devices:
        return None, np.inf
    tables = [table[:, _size(table) <= most] for table, most in zip(tables, left, strict=True)]
    return _searched(tables, setting, best_ns)


def _searched(tables: list[Floats], setting: Setting, best_ns: float = np.inf) -> tuple[_Found | None, float]:
    from resilient.planners.dflop_kernels import search

    found = np.zeros(len(tables) + 1, np.int64)
    columns = np.ascontiguousarray(np.concatenate(tables, axis=1))
    ends = np.cumsum([0, *(table.shape[1] for table in tables)])
    memory = float(setting.cluster.memory_bytes or np.inf)
    language = [unit.name for unit in setting.costs.units].index(LLM)
    step_ms = search(ends, columns, language, setting.global_batch, setting.num_devices, memory, best_ns, found)
    degrees = [
        (int(table[TP, option]), int(table[DP, option]), int(table[PP, option]))
        for table, option in zip(tables, found[:-1], strict=True)
    ]
    return ((degrees, int(found[-1])) if found[-1] else None), float(step_ms)


def _size(table: Floats) -> Floats:
    return table[TP] * table[DP] * table[PP]

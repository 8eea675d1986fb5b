"""The search for DFLOP's configuration: for the distribution of the samples, not for the mean one.

Source: DFLOP, the data-aware optimizer. For i microbatches of GBS samples, unit u with dp replicas of pp stages of tp
devices computes for each microbatch

    dur_u = GBS / (i * dp) * C_u(tp) / pp,    step = (i + E_pp + L_pp - 1) * max(dur_u),

where the division by i * dp is missing in the paper's listing. C_u is the mean of the times of sampled data, which is
more than the time of the mean sample: attention is quadratic. A unit keeps activations until the gradient comes back
through all units after it: the first stage of an encoder for E_pp + L_pp microbatches. Of several encoders, which are
side by side, the deepest counts. As in :mod:`resilient.planners.published.disttrain.planner`, layers stay whole, and
what calls take beside counts; so there may be too many microbatches as well as too few. No replica has less than one
sample a microbatch.

Beyond the paper, samples are whole. A pipeline has a whole number k of an encoder's lanes, or a lane a whole number of
pipelines, so that with dp / dp_llm between two of these the fuller ones count. And of the samples that a pipeline has
in a microbatch, the longest is on one lane. With k > 1 lanes a microbatch takes, instead of an even share, the mean of

    max(even share, time of its longest sample),

where the longest samples of all microbatches are the longest there are: the scheduler puts them into different ones.

The longest sample of a batch counts, which no scheduler divides, and so do sums of gradients. With X for the expected
time of that sample in all stages of its replica,

    step = (i - 1) * S * max(dur_u) + max((E_pp + L_pp) * max(dur_u), X) + sum of gradients.

Without X, data with a heavy tail are given as many replicas of one stage as there are devices, and a step takes several
times what was expected. S is 1 where memory holds the largest samples in all stages at a time. Where it does not, fewer
microbatches are in the pipeline while such samples pass it: a sample that needs r times the room of a stage, if all of
those were as large, counts r times. S is by how much that makes the mean of the times more, in the unit where it is
most.

Memory has room for the largest sample among others, and for a batch of two standard deviations more tokens than the
mean one; the optimizer is sharded over replicas. And i is as large as some whole number of samples in each microbatch
lets it be: with 1.3 on average, some microbatches take twice what others do.

All splits are searched, each with all such i, and those left out that a lower bound excludes; of numbers of stages,
those with which no stage is faster or smaller than with fewer. The best for each number of the language model's
replicas are then simulated (:func:`~resilient.planners.evaluation.known_batches.fastest_simulated`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.planner import Configuration, Setting
from resilient.planners.published.baselines.mean_microbatch import fastest
from resilient.planners.published.dflop.columns import (
    DP,
    KEPT,
    LARGEST,
    PP,
    STATE,
    TP,
    WHOLE,
)
from resilient.planners.stages.device_layout import used_devices
from resilient.planners.stages.expected_step import Expected, expected, longest_ms, parallelism
from resilient.planners.stages.one_pipeline import is_asked_for
from resilient.planners.stages.redundancy import Redundant, possibly_redundant, surely_redundant
from resilient.templates.common.arrays import Floats, Ints

_MARGIN = 2.0
"""Standard deviations by which a batch may have more tokens than on average."""

_SLACK = 1.15
"""How many times the least time steps may take of configurations that are simulated."""


def dflop_configurations(setting: Setting, samples: SampleTable) -> list[Configuration]:
    """Return the fastest configuration for each number of the language model's replicas, the fastest of all first.

    Of equals, one on the fewest devices. Numbers with which a step takes much longer than with the best are left out.

    Args:
        setting: The job; its ``microbatch`` is not used.
        samples: A sample of the data set.

    Raises:
        ValueError: There is none.
    """
    for redundant in (possibly_redundant, surely_redundant):
        found = [each for each in _fastest(setting, samples, redundant) if is_asked_for(setting, each)]
        if found:
            return sorted(found, key=lambda each: (each.predicted_ms, used_devices(each)))
    return [fastest((), "dflop", setting)]


def _fastest(setting: Setting, samples: SampleTable, redundant: Redundant) -> Iterator[Configuration]:
    units, language = setting.costs.units, setting.language
    tables: list[Floats] = []
    tails: list[Floats] = []
    for unit in units:
        degrees = expected(unit, samples.units[unit.name], setting.num_devices, setting.cluster.devices_per_node)
        of_tails = range(len(tails), len(tails) + len(degrees))
        tables.append(_options(unit, samples.units[unit.name], degrees, of_tails, setting, redundant))
        tails += [_tail(unit, samples.units[unit.name], each.tp) for each in degrees]
    for chosen, num_microbatches, step_ms in _best(tables, np.stack(tails), language, setting):
        spread = {
            unit.name: parallelism(unit, samples.units[unit.name], dp, pp, tp)
            for unit, (tp, dp, pp) in zip(units, chosen, strict=True)
        }
        yield Configuration(units=spread, num_microbatches=num_microbatches, predicted_ms=step_ms)


def _options(
    unit: UnitCosts,
    lengths: Lengths,
    degrees: Sequence[Expected],
    tails: Iterable[int],
    setting: Setting,
    redundant: Redundant,
) -> Floats:
    """Return all (tp, dp, pp) of a unit that fit its state, as columns, in order of the time they take.

    Rows: tp, dp, pp; the slowest stage's time for the whole global batch as one microbatch, and for a call beside;
    the bytes of state; the bytes of that batch's activations on a device, and of the largest sample's; the time of the
    longest sample in all stages; that of the sums of gradients; which of the tails is that of the degree.
    """
    devices, batch, memory = setting.num_devices, setting.global_batch, setting.cluster.memory_bytes
    most = batch * float(lengths.tokens.mean()) + _MARGIN * batch**0.5 * float(lengths.tokens.std())
    found: list[Floats] = []
    for each, tail in zip(degrees, tails, strict=True):
        limits = np.arange(1, min(batch, devices // each.tp) + 1), _stage_counts(each, setting)
        dp, pp = (grid.ravel() for grid in np.meshgrid(*limits, indexing="ij"))
        few = (dp * pp * each.tp <= devices) & redundant(setting, dp, pp * each.tp)
        if unit.name == LLM and setting.num_pipelines:
            few &= dp == setting.num_pipelines
        dp, pp = dp[few], pp[few]
        token_bytes = each.token_bytes[pp - 1]
        values = (
            np.full(dp.shape, each.tp),
            dp,
            pp,
            batch / dp * each.slowest_ms[pp - 1],
            each.call_ms / pp,
            each.held_bytes[pp - 1] + each.optimizer_bytes[pp - 1] * setting.sharded_part(dp),
            most / dp * token_bytes,
            float(lengths.tokens.max()) * token_bytes,
            np.full(dp.shape, longest_ms(unit.work(each.tp).of(lengths), batch) + each.call_ms),
            each.sum_ms(dp, pp, setting.cluster),
            np.full(dp.shape, tail),
        )
        found.append(np.stack(values).astype(np.float64))
    table = np.concatenate(found, axis=1)
    if memory is not None:
        least = table[KEPT] / (batch // table[DP])
        kept = least * (table[PP] - 1) + np.maximum(least, table[LARGEST])
        table = table[:, (table[STATE] < memory) & (table[STATE] + kept <= memory)]
    return table[:, np.argsort(table[WHOLE], kind="stable")]


def _stage_counts(each: Expected, setting: Setting) -> Ints:
    """Return the numbers of stages with which something is less than with all smaller ones, or devices are used."""
    if setting.num_pipelines:
        return np.arange(len(each.slowest_ms)) + 1
    tables = np.stack([each.slowest_ms, each.held_bytes, each.optimizer_bytes, each.token_bytes])
    least = np.minimum.accumulate(tables, axis=1)
    less = np.any(tables[:, 1:] < least[:, :-1] * (1 - 1e-9), axis=0)
    return np.flatnonzero(np.append(True, less)) + 1


def _tail(unit: UnitCosts, lengths: Lengths, tp: int) -> Floats:
    """Return how much of a unit's time is that of small samples. [3, num_samples + 1]

    Rows: their sizes, ascending, parts of that of the largest, and infinity; the part of the time that samples before
    each take, and the same weighted by their sizes.
    """
    order = np.argsort(lengths.tokens, kind="stable")
    size = lengths.tokens[order] / max(int(lengths.tokens.max()), 1)
    times = unit.work(tp).of(lengths)
    parts = times[order] / max(float(times.sum()), 1e-30)
    ascending = np.sort(times) / max(float(times.mean()), 1e-30)
    rows = (
        np.append(size, np.inf),
        *(np.concatenate(([0.0], np.cumsum(each))) for each in (parts, parts * size)),
        np.append(ascending, np.inf),
        np.concatenate(([0.0], np.cumsum(ascending[::-1]))),
    )
    return np.stack(rows)


class _Split(NamedTuple):
    degrees: list[tuple[int, int, int]]  # (tp, dp, pp) of each unit
    num_microbatches: int
    step_ms: float


def _best(tables: list[Floats], tails: Floats, language: int, setting: Setting) -> list[_Split]:
    """Return the best of all options together, for each number of the language model's replicas.

    Units that get devices in proportion to their work are searched first: what that takes excludes most of the rest.
    """
    if not all(table.shape[1] for table in tables):
        return []
    work = np.array([(_size(table) * table[WHOLE]).min() for table in tables])
    shares = setting.num_devices * work / max(work.sum(), 1e-30)
    limit_ns = np.inf
    for narrowest in (0.9, 0.5):
        near = [
            table[:, (_size(table) <= share) & (_size(table) >= narrowest * share)]
            for table, share in zip(tables, shares, strict=True)
        ]
        if all(table.shape[1] for table in near):
            found = _searched(near, tails, language, setting, 1.0, limit_ns)
            limit_ns = min([limit_ns, *(each.step_ms * 1e6 for each in found)])
    limit_ns *= _SLACK
    tables = [table[:, table[WHOLE] * 1e6 <= limit_ns + 1] for table in tables]
    fewest = [int(_size(table).min()) for table in tables]
    left = [setting.num_devices - sum(fewest) + own for own in fewest]
    if sum(fewest) > setting.num_devices:
        return []
    tables = [table[:, _size(table) <= most] for table, most in zip(tables, left, strict=True)]
    return _searched(tables, tails, language, setting, _SLACK, limit_ns)


def _searched(
    tables: list[Floats], tails: Floats, language: int, setting: Setting, slack: float, limit_ns: float
) -> list[_Split]:
    from resilient.planners.published.dflop.search_kernels import fastest_splits

    batch, memory = setting.global_batch, float(setting.cluster.memory_bytes or np.inf)
    best, found = np.empty(batch + 1), np.zeros((batch + 1, len(tables) + 1), np.int64)
    columns = np.ascontiguousarray(np.concatenate(tables, axis=1))
    ends = np.cumsum([0, *(table.shape[1] for table in tables)])
    devices = (setting.num_devices, setting.least_devices)
    fastest_splits(ends, columns, tails, language, batch, devices, memory, slack, limit_ns, best, found)
    return [
        _Split(
            degrees=[
                (int(table[TP, option]), int(table[DP, option]), int(table[PP, option]))
                for table, option in zip(tables, found[replicas, :-1], strict=True)
            ],
            num_microbatches=int(found[replicas, -1]),
            step_ms=float(best[replicas]) / 1e6,
        )
        for replicas in np.flatnonzero(best <= slack * best.min()).tolist()
        if found[replicas, -1]
    ]


def _size(table: Floats) -> Floats:
    return table[TP] * table[DP] * table[PP]

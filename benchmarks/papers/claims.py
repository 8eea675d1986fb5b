"""Published claims about multimodal planners, and what may be the reasons for gains and differences.

Owns claims; :mod:`papers.settings` has what they are looked for in, :mod:`headlines` prints what is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from papers.settings import (
    COCO,
    FROZEN,
    FROZEN_HUGE,
    FROZEN_LARGE,
    HUGE,
    HUGE_SEVERAL,
    LARGE,
    MEASURED_TIMES,
    MIDDLE,
    NARROW,
    SEVERAL,
    SMALL,
    SOUND,
    VIDEO,
    Case,
    Steps,
)

from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.packing.microbatch_order import fill_intervals
from resilient.planners.planner import Assignment, Configuration, Planner, Replica, Setting
from resilient.planners.published.baselines.balanced import StaticContext
from resilient.planners.published.baselines.mean_microbatch import fastest
from resilient.planners.published.baselines.uniform import Uniform
from resilient.planners.published.baselines.uniform_plans import has_room, uniform_plans
from resilient.planners.published.cornstarch.planner import Cornstarch
from resilient.planners.published.disttrain.planner import DistTrain
from resilient.planners.registry import planner
from resilient.templates.common.arrays import Ints

Who = tuple[Planner, Planner]
"""Who configures, and who assigns."""


@dataclass(frozen=True, kw_only=True)
class Instead:
    """A reason that is tried: the comparison with something else about it.

    Args:
        what: It.
        better: In the place of the claim's; likewise ``worse``.
        change: Fields of the case.
    """

    what: str
    better: Who | None = None
    worse: Who | None = None
    change: Mapping[str, Any] = field(default_factory=dict[str, Any])


def step_ms(steps: Steps) -> float:
    """Return what gains are of, if nothing else is said."""
    return steps.step_ms


def idle_ms(steps: Steps) -> float:
    """Return the time in which a device waits."""
    return steps.idle_ms


def vision_std_ms(steps: Steps) -> float:
    """Return how much the encoder's microbatches differ."""
    return steps.std_ms["vision"] if steps.std_ms else np.inf


def llm_std_ms(steps: Steps) -> float:
    """Return how much the language model's microbatches differ."""
    return steps.std_ms[LLM] if steps.std_ms else np.inf


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Something that was published.

    Args:
        name: What is claimed.
        published: As published.
        low: The range of the gain in it.
        high: Likewise.
        cases: Where it is looked for.
        better: Who is faster.
        worse: Than whom.
        reasons: What is tried in each case.
        measure: What is so many times less.
    """

    name: str
    published: str
    low: float
    high: float
    cases: tuple[Case, ...]
    better: Who
    worse: Who
    reasons: tuple[Instead, ...]
    measure: Callable[[Steps], float] = step_ms


def as_they_come(forward_ms: npt.ArrayLike, backward_ms: npt.ArrayLike) -> Ints:
    """Return the order that microbatches are in."""
    return np.arange(np.shape(forward_ms)[1])


SPREAD = DistTrain(name="disttrain, spread alone", order=as_they_come)
HEURISTIC = DistTrain(name="disttrain, order as published", order=fill_intervals)


@dataclass(frozen=True)
class Widest(Uniform):
    """A uniform plan that nobody searched: as much tensor parallelism as there is, then the fewest stages that fit."""

    name: str = "uniform, not searched"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the first plan that fits with microbatches as large as asked for, the fewest stages first."""

        def rank(plan: Configuration) -> tuple[int, ...]:
            size = round(setting.global_batch / (plan.units[LLM].dp * plan.num_microbatches))
            stages = [spread.pp for spread in plan.units.values()]
            return (abs(size - setting.microbatch), -plan.units[LLM].tp, plan.units[LLM].pp, plan.colocated, *stages)

        plans = (plan for plan in sorted(uniform_plans(setting, samples), key=rank) if has_room(setting, plan, samples))
        return fastest(islice(plans, 1), self.name, setting)


@dataclass(frozen=True)
class WholePictures(StaticContext):
    """Static context parallelism of the language model; encoders share out whole pictures, as DHP's do."""

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Make each microbatch one group of all devices."""
        place = super().assign(setting, configuration, batch, replicas).units[LLM]
        degree = np.full_like(place.replica, configuration.units[LLM].cp)
        grouped = replace(place, group=np.zeros_like(degree), degree=degree)
        return Assignment(units=dict.fromkeys(batch.units, grouped))


def who(configures: str | Planner, assigns: str | Planner | None = None) -> Who:
    """Return who configures and who assigns, which is the same where one is given."""
    one, other = (planner(each) if isinstance(each, str) else each for each in (configures, assigns or configures))
    return one, other


EVEN = Instead(what="samples all like the mean one", change={"even": True})
FREE = Instead(what="messages and sums that take no time", change={"free": True})
LARGER = Instead(what="microbatches of 8 samples", change={"microbatch": 8})


def alike(configures: str, better: str, worse: str) -> Instead:
    """Return both with one's configuration: what assignments alone make."""
    what = f"both configured by {configures}"
    return Instead(what=what, better=who(configures, better), worse=who(configures, worse))


def unbalanced(name: str, title: str) -> Instead:
    """Return the better planner with an assignment that balances nothing: what its configuration alone makes."""
    return Instead(what=f"{title} with samples as they come", better=who(name, "uniform"))


def one_stage(nodes: int) -> Instead:
    """Return the paper's step: every device an instance of all layers, with one microbatch."""
    return Instead(
        what=f"one stage and one microbatch for each of {8 * nodes} devices, messages hidden",
        better=who("fsdp", "orchmllm"),
        worse=who("fsdp"),
        change={"nodes": nodes, "global_batch": 32 * nodes, "free": True},
    )


UNSEARCHED = Instead(what="uniform plan not searched: widest tp, fewest stages", worse=who(Widest()))

CLAIMS = (
    Claim(
        name="Entrain over DistTrain",
        published="up to 1.40x",
        low=1.0,
        high=1.4,
        cases=(SMALL, MIDDLE, SEVERAL, VIDEO, HUGE),
        better=who("entrain"),
        worse=who("disttrain"),
        reasons=(
            LARGER,
            EVEN,
            alike("entrain", "entrain", "disttrain"),
            Instead(what="DistTrain's order as published, not searched", worse=who(HEURISTIC)),
            Instead(what="DistTrain without its order", worse=who(SPREAD)),
            Instead(what="DistTrain without spreading and order", worse=who("disttrain", "uniform")),
        ),
    ),
    *(
        Claim(
            name=f"the same: variation of microbatches, {unit}",
            published=f"down up to {high}-fold",
            low=1.0,
            high=high,
            cases=(SMALL, MIDDLE, VIDEO),
            better=who("entrain"),
            worse=who("disttrain"),
            reasons=(LARGER,),
            measure=measure,
        )
        for unit, high, measure in (("vision", 10.6, vision_std_ms), ("language model", 4.1, llm_std_ms))
    ),
    Claim(
        name="Entrain over DIP",
        published="up to 1.40x",
        low=1.0,
        high=1.4,
        cases=(SMALL, MIDDLE, SEVERAL, HUGE),
        better=who("entrain"),
        worse=who("dip"),
        reasons=(EVEN, FREE, unbalanced("entrain", "Entrain")),
    ),
    Claim(
        name="Cornstarch, aware of what is frozen",
        published="1.00x-2.46x",
        low=1.0,
        high=2.46,
        cases=(FROZEN, FROZEN_LARGE, FROZEN_HUGE, SMALL, *MEASURED_TIMES),
        better=who("cornstarch"),
        worse=who(Cornstarch(frozen_aware=False), "cornstarch"),
        reasons=(EVEN,),
    ),
    Claim(
        name="DistTrain over a uniform plan",
        published="1.3x-2.2x",
        low=1.3,
        high=2.2,
        cases=(MIDDLE, COCO, SEVERAL, VIDEO, LARGE, HUGE),
        better=who("disttrain"),
        worse=who("uniform"),
        reasons=(
            EVEN,
            FREE,
            alike("uniform", "disttrain", "uniform"),
            unbalanced("disttrain", "DistTrain"),
            UNSEARCHED,
        ),
    ),
    Claim(
        name="DistTrain's reordering",
        published="1.03x-1.11x",
        low=1.03,
        high=1.11,
        cases=(SMALL, MIDDLE, COCO, VIDEO, HUGE),
        better=who("disttrain"),
        worse=who("disttrain", "uniform"),
        reasons=(
            Instead(what="order alone, of what is spread", worse=who(SPREAD)),
            Instead(what="order as published, not searched", better=who(HEURISTIC)),
            Instead(
                what="spreading alone, over the uniform plan's replicas",
                better=who("uniform", SPREAD),
                worse=who("uniform"),
            ),
            LARGER,
            EVEN,
        ),
    ),
    Claim(
        name="DFLOP over a uniform plan",
        published="up to 3.6x",
        low=1.0,
        high=3.6,
        cases=(MIDDLE, COCO, SOUND, SEVERAL, NARROW, LARGE, HUGE),
        better=who("dflop"),
        worse=who("uniform"),
        reasons=(
            EVEN,
            FREE,
            alike("uniform", "dflop", "uniform"),
            unbalanced("dflop", "DFLOP"),
            UNSEARCHED,
            Instead(what="full sharding in the uniform plan's place", worse=who("fsdp")),
        ),
    ),
    Claim(
        name="the same: time in which devices wait",
        published="82-84 % less: 5.6x to 6.2x",
        low=5.6,
        high=6.2,
        cases=(MIDDLE, COCO, SOUND, HUGE),
        better=who("dflop"),
        worse=who("uniform"),
        reasons=(FREE, UNSEARCHED),
        measure=idle_ms,
    ),
    Claim(
        name="DHP over static context parallelism",
        published="up to 1.36x",
        low=1.0,
        high=1.36,
        cases=(MIDDLE, SEVERAL, VIDEO, HUGE_SEVERAL),
        better=who("dhp"),
        worse=who("static-cp"),
        reasons=(
            EVEN,
            FREE,
            alike("static-cp", "dhp", "static-cp"),
            alike("dhp", "dhp", "static-cp"),
            Instead(what="encoders that share out whole pictures in both", worse=who(WholePictures())),
            Instead(what="without the longest tenth of the samples", change={"short": 0.9}),
            Instead(what="without the longest quarter of the samples", change={"short": 0.75}),
        ),
    ),
    Claim(
        name="OrchMLLM over itself unbalanced",
        published="1.5x-2.0x",
        low=1.5,
        high=2.0,
        cases=(MIDDLE, SOUND, SEVERAL, HUGE),
        better=who("orchmllm"),
        worse=who("orchmllm", "uniform"),
        reasons=(EVEN, *(one_stage(nodes) for nodes in (1, 4, 16))),
    ),
    Claim(
        name="OrchMLLM over Megatron",
        published="3.1x-4.1x",
        low=3.1,
        high=4.1,
        cases=(MIDDLE, SOUND, HUGE),
        better=who("orchmllm"),
        worse=who("uniform"),
        reasons=(UNSEARCHED,),
    ),
)

"""The planner that asks all others, and takes the answer whose steps with known batches take least in simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from resilient.planners.costs.samples import SampleTable
from resilient.planners.evaluation.known_batches import known_batches, timed
from resilient.planners.planner import Assignment, Configuration, Replica, Setting
from resilient.planners.published.baselines.mean_microbatch import fastest
from resilient.planners.registry import AUTO, PLANNERS, check_generators, planner

_KNOWN_BATCHES = 4


@dataclass(frozen=True)
class BestOfAll:
    """The planner."""

    name: str = AUTO
    source: str = "this project: all planners by their own papers, compared by simulation"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the best of all planners' configurations.

        Args:
            setting: The job.
            samples: A sample of the data set.

        Raises:
            ValueError: None has one that fits.
        """
        batches = known_batches(setting, samples, _KNOWN_BATCHES)
        found: list[Configuration] = []
        refusal: ValueError | None = None
        for name in PLANNERS:
            try:
                check_generators(name, setting.costs)
                answer = planner(name).configure(setting, samples)
                found += timed(self, setting, [replace(answer, assigned_by=answer.assigned_by or name)], batches)
            except ValueError as error:
                refusal = error
        if not found and refusal is not None:
            raise refusal
        return fastest(found, self.name, setting)

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Have the planner assign whose configuration it is.

        Args:
            setting: The job.
            configuration: As decided.
            batch: The global batch.
            replicas: As they are now.
        """
        chosen = planner(configuration.assigned_by)
        return chosen.assign(setting, replace(configuration, assigned_by=""), batch, replicas)

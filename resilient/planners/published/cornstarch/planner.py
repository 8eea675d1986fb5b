"""Cornstarch: encoders are branches of a pipeline that is not a chain, and stages are cut by what they really run.

Source: Jang's dissertation, chapter 3, section 3.3.1. A layer's backward is ``B_l = B_w,l`` if l is trainable, plus
``B_d,l`` if a layer strictly before it on its path is (:meth:`~resilient.planners.costs.cost_model.CostModel.frozen`;
the paper's recurrence includes l itself and so charges the first trainable layer for a gradient that nothing needs).
Stages are cut such that the slowest is fastest in forward *and* that backward; who cuts as if everything were trained
gives frozen encoders, which run forwards only, about three times the devices they need.

Encoders are side by side, share their stages, or are run by every stage of the language model. Of each of these the
configurations that promise most (:mod:`resilient.planners.published.cornstarch.search`) are simulated with a batch that
is known, and the fastest is taken: what they promise is for microbatches all alike, and of those that are not the ones
that must wait for each other least are fast. Samples are taken as they come: the paper does not balance them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import SampleTable
from resilient.planners.evaluation.known_batches import known_batches, timed
from resilient.planners.planner import Configuration, Encoders, Setting
from resilient.planners.published.baselines.mean_microbatch import AsTheyCome, fastest
from resilient.planners.published.cornstarch.search import cornstarch_configurations

_TRIED = 4
"""Configurations with encoders in each of the places that are simulated."""


@dataclass(frozen=True)
class Cornstarch(AsTheyCome):
    """The planner.

    Args:
        encoders: Where they may be.
        frozen_aware: Whether stages are cut by what they run; otherwise as if everything were trained, for comparison.
    """

    name: str = "cornstarch"
    source: str = "Cornstarch (Jang's dissertation, chapter 3), section 3.3.1"
    encoders: tuple[Encoders, ...] = tuple(Encoders)
    frozen_aware: bool = True

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the configuration that is fastest in simulation, of those that promise most.

        Args:
            setting: The job.
            samples: A sample of the data set.

        Raises:
            ValueError: It does not fit.
        """
        if not self.frozen_aware:
            setting = replace(setting, costs=all_trained(setting.costs))
        plans = [
            plan for encoders in self.encoders for plan in cornstarch_configurations(setting, samples, encoders, _TRIED)
        ]
        return fastest(timed(self, setting, plans, known_batches(setting, samples, 1)), self.name, setting)


def all_trained(costs: CostModel) -> CostModel:
    """Return the model as those see it who do not ask what is frozen: every layer runs its whole backward."""
    return replace(
        costs,
        units=tuple(
            replace(unit, layers=tuple(replace(layer, trainable=True, input_gradient=True) for layer in unit.layers))
            for unit in costs.units
        ),
    )

"""The jobs that histories are about: small ones, of a few shapes, so that plans are made once."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from resilient.agent.membership.parts.context import Settings
from resilient.protocol.messages import JobSpec, StepOutcome
from resilient.state.manifest import Manifest, SavedStates, folder
from resilient.state.skipped import NONE_SKIPPED, SkippedSteps
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from tests.agent.membership.checker.faults.leaning import LEANINGS
from tests.agent.membership.checker.lineage import Applied, Disk, Lineage
from tests.agent.membership.simulated import RECIPE

RUN, OLD_RUN = "/runs/new", "/runs/old"
MOST_NODES = 6


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What plans depend on. The layer in the middle has no state: a state without bytes is nobody's to hold."""

    num_layers: int
    max_failures: int
    min_pipeline_nodes: int
    workers_per_node: int = 1

    @property
    def needed_nodes(self) -> int:
        """The fewest nodes the job can go on with."""
        return (self.max_failures + 1) * self.min_pipeline_nodes


SHAPES = (
    Shape(num_layers=3, max_failures=1, min_pipeline_nodes=1),
    Shape(num_layers=5, max_failures=1, min_pipeline_nodes=2),
    Shape(num_layers=4, max_failures=1, min_pipeline_nodes=1, workers_per_node=2),
    Shape(num_layers=3, max_failures=2, min_pipeline_nodes=1),
    Shape(num_layers=2, max_failures=0, min_pipeline_nodes=1),
    Shape(num_layers=4, max_failures=0, min_pipeline_nodes=2),
    Shape(num_layers=4, max_failures=0, min_pipeline_nodes=3),  # one pipeline, of at most four of five nodes
)


class SmallJob:
    """One job.

    Attributes:
        leaning: What goes wrong more often than in others.
        skipping: Steps whose loss is not finite.
        resumed: The lineage of the states it begins with.
    """

    def __init__(self, random: Random, disk: Disk) -> None:
        self.leaning = leaning = random.choice(LEANINGS)
        self.shape = shape = random.choices(SHAPES, leaning.shapes)[0]
        num_steps = random.randint(*leaning.num_steps)
        self.spec = JobSpec(
            profile=_profile(shape.num_layers),
            recipe=RECIPE,
            global_batch=12,
            microbatch=2,
            max_failures=shape.max_failures,
            min_pipeline_nodes=shape.min_pipeline_nodes,
            num_steps=num_steps,
            checkpoint_every=random.choice(leaning.checkpoints_every),
            comm_timeout_s=random.choice((2.0, 120.0)),
            alike={"job": {"model": "m"}},
        )
        self.states = tuple(layer.name for layer in self.spec.profile.layers if layer.state_bytes)
        self.skipping = frozenset(step for step in range(1, num_steps + 1) if random.random() < leaning.skipping_rate)
        self.resumed: Lineage = ()
        resume = None
        if random.random() < 0.2:
            resume = self._old_checkpoint(disk, random.randint(1, num_steps))
        self.settings = Settings(
            script="train.py",
            directory="/work",
            run_directory=RUN,
            num_nodes=random.randint(min(shape.needed_nodes + leaning.num_spare, MOST_NODES - 1), MOST_NODES - 1),
            workers_per_node=shape.workers_per_node,
            resume=resume,
            wait_for_nodes_s=random.choice((0.0, 10.0)),
        )

    def outcome(self, step: int) -> StepOutcome:
        """Return what the barrier of a step gives, in whichever generation."""
        loss = float("nan") if step in self.skipping else 1 / step
        return StepOutcome(step=step, loss=loss, grad_norm=1.0, skipped=self.skipped(step))

    def skipped(self, step: int) -> SkippedSteps:
        """Return what was skipped up to a step."""
        skipped = NONE_SKIPPED
        for number in range(1, step + 1):
            skipped = skipped.after(is_finite=number not in self.skipping)
        return skipped

    def is_due(self, step: int) -> bool:
        """Return whether workers write a checkpoint of a step as they pass it."""
        return step == self.spec.num_steps or self.spec.saves_after(step, is_chosen=False)

    def _old_checkpoint(self, disk: Disk, step: int) -> tuple[str, Manifest]:
        path = str(folder(OLD_RUN, step))
        self.resumed = tuple(Applied(number, 0, number not in self.skipping) for number in range(1, step + 1))
        states: SavedStates = {name: (disk.write(path, name, self.resumed),) for name in self.states}
        manifest = Manifest(step=step, recipe=RECIPE, states=states, skipped=self.skipped(step))
        disk.seal(path, manifest)
        return path, manifest


def _profile(num_layers: int) -> ModelProfile:
    stateless = num_layers // 2 if num_layers > 2 else -1
    return ModelProfile(
        layers=tuple(
            LayerProfile(
                name=f"layer{index}",
                costs=(LayerCost(forward_ms=1.0, backward_input_ms=1.0, backward_weight_ms=1.0),),
                parameter_bytes=0 if index == stateless else 40,
                optimizer_bytes=0 if index == stateless else 60,
            )
            for index in range(num_layers)
        )
    )

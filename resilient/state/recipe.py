"""Says what decides the values that a job trains: a checkpoint goes on only under the recipe it was written under.

Whatever is not in it may change between a checkpoint and the run that resumes it, because samples and results stay the
same: the number of steps, nodes and workers, redundancy, the pipelines' schedule. So may three things that results do
depend on, to be chosen anew for other machines and other numbers of steps, or after a stop: the microbatch (dropout
draws by microbatch), the schedule of the learning rate, and what is done about steps that are not finite. Must not
import torch.
"""

from __future__ import annotations

import msgspec

_DIGITS = 12
"""Shown of a digest."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Equal recipes give equal parameters after as many steps, but for the order of summation.

    Args:
        model: Its digest.
        num_layers: Of the model.
        num_parameters: Of the model.
        dataset: Its class.
        num_samples: Of the data set.
        global_batch: Samples of a step.
        optimizer: Class and arguments, without the schedule of the learning rate.
        seed: Of initial values, order of samples, and dropout.
        precision: Of the job.
        clip_grad_norm: Largest norm of the gradient; None for no limit.
    """

    model: str
    num_layers: int
    num_parameters: int
    dataset: str
    num_samples: int
    global_batch: int
    optimizer: str
    seed: int
    precision: str
    clip_grad_norm: float | None

    def differences(self, other: Recipe) -> list[str]:
        """Return, in words, what is another in ``other``, with its values here and there."""
        return [
            f"{name} {_shown(mine)}, now {_shown(theirs)}"
            for name in self.__struct_fields__
            if (mine := getattr(self, name)) != (theirs := getattr(other, name))
        ]


def _shown(value: object) -> str:
    is_digest = isinstance(value, str) and len(value) == 64 and " " not in value
    return str(value)[:_DIGITS] if is_digest else str(value)

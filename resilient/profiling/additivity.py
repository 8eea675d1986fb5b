"""Verifies that a microbatch's loss is the sum of its samples' losses, each of them computed alone.

Everything rests on it: how a step is cut into microbatches, and these dealt out to pipelines, may change no result.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import fsum, isfinite

import torch
from torch import nn

from resilient.errors import ArgumentError
from resilient.models.layer import Activations, Batch
from resilient.models.summed_loss import loss_behind
from resilient.runtime.batches import Batches, Read
from resilient.runtime.job import Job

logger = logging.getLogger(__name__)

_TOLERANCES = {"fp32": 1e-3, "bf16": 1e-3, "fp64": 1e-6}
"""Relative difference of sums: the order of summation, and what models compute less precisely than they might."""

_MOST_SAMPLES = 8
"""More would show no more, and take longer."""


class AdditivityCheck:
    """A microbatch (twice) and each of its samples alone, on their way through the layers, in evaluation.

    Args:
        job: The job.
        samples: The first microbatch's, of which the first are enough, and what else was read: a microbatch of one
            takes a second sample from it.
    """

    def __init__(self, job: Job, samples: Sequence[Read]) -> None:
        self._job = job
        self._tolerance = _TOLERANCES[job.precision]
        self._samples = [*samples, *samples][: min(max(2, job.microbatch), _MOST_SAMPLES)]
        chosen = [self._samples, self._samples, *([sample] for sample in self._samples)]
        batches = Batches(job)
        try:
            self._batches: list[Batch] = [batches.join(each) for each in chosen]
        except Exception as error:  # the data set's own collate, which may not be made for one sample
            self._give_up(f"a sample cannot be collated alone ({type(error).__name__}: {error})")
        else:
            self._check_targets()
        self._activations: list[Activations] = [{} for _ in self._batches]
        self._losses = [0.0 for _ in self._batches]

    @torch.no_grad()
    def advance(self, layer_index: int, module: nn.Module) -> None:
        """Take all of them through one layer.

        Args:
            layer_index: The layer's in the model.
            module: The layer, which can run the microbatch in training.

        Raises:
            ArgumentError: The losses do not add up.
        """
        before = [part.training for part in module.modules()]
        module.eval()
        try:
            for index in range(len(self._batches)):
                self._run(index, layer_index, module)
                if not self._batches:  # given up
                    return
        finally:
            for part, training in zip(module.modules(), before, strict=True):
                part.training = training
        if layer_index == len(self._job.model.layers) - 1 and self._batches:
            self._check()

    def _run(self, index: int, layer_index: int, module: nn.Module) -> None:
        model, batch = self._job.model, self._batches[index]
        name = model.layers[layer_index].name
        torch.manual_seed(index)  # so that the microbatch's two runs differ if anything is drawn
        try:
            made = module(dict(self._activations[index]), batch)
            loss, self._activations[index] = loss_behind(model, layer_index, made, batch)
            if loss is not None:
                self._losses[index] += float(loss)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            if index >= 2:
                raise _depends(f"an error in layer {name!r} for one alone ({told})") from error
            self._give_up(f"layer {name!r} cannot be run in evaluation ({told})")

    def _check_targets(self) -> None:
        """Refuse a ``collate`` that drops or adds targets, as far as the model can count them.

        More than one to a sample may be padded, with a value that only the model's loss knows.
        """
        count = getattr(self._job.model, "num_targets", None)
        if count is None:
            return
        found, counts = count(self._batches[0]), [count(each.sample) for each in self._samples]
        if found is None or None in counts:
            return
        expected = sum(counts)
        if found < expected or (found > expected and set(counts) == {1}):
            raise ArgumentError(
                f"collate of {type(self._job.dataset).__name__}",
                "keep the targets of its samples",
                f"{found} for {len(counts)} samples that have {expected}",
                "join all samples, each once",
            )

    def _check(self) -> None:
        together, again, *alone = self._losses
        total, scale = fsum(alone), fsum(map(abs, alone))
        if not all(map(isfinite, self._losses)):
            self._give_up("it is not a number")  # which the first step tells, too
        elif not self._is_close(together, again, scale):
            self._give_up("the model draws random numbers in evaluation")
        elif not self._is_close(together, total, scale):
            of = f"{len(alone)} samples whose losses alone add up to {total:.4g}"
            if self._is_mean(together, alone):
                raise ArgumentError(
                    "loss",
                    "be summed over the microbatch's targets",
                    f"a mean ({together:.4g} for {of})",
                    "use reduction='sum'",
                )
            raise _depends(f"{together:.4g} for {of}")

    def _is_mean(self, together: float, alone: Sequence[float]) -> bool:
        """Whether a loss is the mean over samples, or over the targets of samples of unequal length."""
        count = getattr(self._job.model, "num_targets", lambda sample: 1)
        weights = [count(each.sample) or 1 for each in self._samples]
        over_targets = fsum(loss * weight for loss, weight in zip(alone, weights, strict=True)) / sum(weights)
        over_samples = fsum(alone) / len(alone)
        return any(self._is_close(together, mean, abs(mean)) for mean in (over_samples, over_targets))

    def _is_close(self, one: float, other: float, scale: float) -> bool:
        return abs(one - other) <= self._tolerance * scale

    def _give_up(self, why: str) -> None:
        logger.warning("that the loss is a sum over its samples cannot be verified: %s", why)
        self._batches, self._activations = [], []


def _depends(got: str) -> ArgumentError:
    return ArgumentError(
        "a sample's loss",
        "not depend on the other samples of its microbatch",
        got,
        "mask what is padded, sum the loss, and use LayerNorm or GroupNorm for norms over the microbatch",
    )

"""Where samples lie in each phase, as permutations: ``permutation[i]`` is the place of what was at place i."""

from __future__ import annotations

import numpy as np

from resilient.planners.samples import Ints


def placement(slots: Ints) -> Ints:
    """Return each sample's place when slots lie one after the other, each with its samples in their order."""
    return invert(np.argsort(slots, kind="stable").astype(np.int64))


def invert(permutation: Ints) -> Ints:
    """Return the permutation that takes everything back."""
    inverse = np.empty_like(permutation)
    inverse[permutation] = np.arange(len(permutation))
    return inverse


def compose(then: Ints, first: Ints) -> Ints:
    """Return the permutation that does ``first`` and ``then`` after it."""
    return then[first]


def handover(encoder: Ints, language: Ints) -> Ints:
    """Return how encoder outputs go straight to the language model: back from the encoder's places, on to its own.

    Gradients go back by the inverse.

    Args:
        encoder: From the order of samples to places in the encoder.
        language: From the order of samples to places in the language model.

    Source: OrchMLLM, rearrangement composition.
    """
    return compose(language, invert(encoder))

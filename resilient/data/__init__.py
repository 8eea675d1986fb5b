"""Data sets, the order of samples, how samples become microbatches, and who reads them when."""

from resilient.data.dataset import Dataset, Sample, collate_of, num_targets, stack
from resilient.data.lazy import Lazy
from resilient.data.multimodal import IGNORED_LABEL, collate_multimodal, images_of
from resilient.data.sampler import StepSampler

__all__ = [
    "IGNORED_LABEL",
    "Dataset",
    "Lazy",
    "Sample",
    "StepSampler",
    "collate_multimodal",
    "collate_of",
    "images_of",
    "num_targets",
    "stack",
]

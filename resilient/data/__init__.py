"""Data sets, the order of samples, and how samples become microbatches."""

from resilient.data.dataset import Dataset, Sample, collate, num_targets, stack
from resilient.data.multimodal import IGNORED_LABEL, collate_multimodal, images_of
from resilient.data.sampler import StepSampler, microbatches

__all__ = [
    "IGNORED_LABEL",
    "Dataset",
    "Sample",
    "StepSampler",
    "collate",
    "collate_multimodal",
    "images_of",
    "microbatches",
    "num_targets",
    "stack",
]

"""The example with a data set whose samples have a placeholder too many from some index on."""

from __future__ import annotations

import torch

from resilient.data import Sample
from resilient.examples import digits_vlm
from resilient.examples.digits_vlm import IMAGE, DigitsDataset


class Mismatched(DigitsDataset):
    """One placeholder more than the image has features, in one sample of eight."""

    def __getitem__(self, index: int) -> Sample:
        sample = super().__getitem__(index)
        if index % 8:
            return sample
        tokens, labels = sample["input_ids"], sample["labels"]
        return {
            **sample,
            "input_ids": torch.cat((tokens[:1], torch.tensor([IMAGE]), tokens[1:])),
            "labels": torch.cat((labels[:1], labels)),
        }


if __name__ == "__main__":
    digits_vlm.DigitsDataset = Mismatched
    digits_vlm.main()

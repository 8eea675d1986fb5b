"""Samples and data sets that are none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from resilient.data import stack
from tests.resilient.mistaken_jobs import (
    ONE,
    ONES,
    TOKENS,
    Counted,
    Image,
    Points,
    Stream,
    of_collate,
    of_sample,
    of_vision,
    train,
)

A_DICT = "return a dict such as {'input': ..., 'target': ...}"
TO_TENSOR = "convert it, leave it out, or give the data set a collate(samples) that makes tensors of it"
A_MAP = "dataset must be a map from index to sample, with __len__ and __getitem__, got"
INTO_A_LIST = "read what it yields into a list, or give its class both methods"
IMAGES = "'vision.pixels' must be a tensor [channels, height, width], or a list of such, got"
LABELLED = {"input": ONES, "labels": torch.tensor(1)}


def padded(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {entry: functional.pad(value[None], (0, 1), value=-100) for entry, value in stack(samples).items()}


SAMPLES: dict[str, tuple[Callable[[], object], str]] = {
    "list": (of_sample([ONES, ONE]), f"sample 3 of Points: must map names to tensors, got a list; {A_DICT}"),
    "tuple": (
        lambda: train(dataset=TensorDataset(torch.ones(8, 2))),
        f"sample 3 of TensorDataset: must map names to tensors, got a tuple; {A_DICT}",
    ),
    "nothing": (of_sample(lambda _: None), f"sample 3 of Points: must map names to tensors, got None; {A_DICT}"),
    "no target": (
        of_sample({"input": ONES, "target": None}),
        f"sample 3 of Points: 'target' must be a tensor or numbers, got None; {TO_TENSOR}",
    ),
    "text": (
        of_sample({"input": ONES, "target": ONE, "caption": "a cat"}),
        f"sample 3 of Points: 'caption' must be a tensor or numbers, got 'a cat'; {TO_TENSOR}",
    ),
    "image": (
        of_sample({"input": Image(), "target": ONE}),
        f"sample 3 of Points: 'input' must be a tensor or numbers, got an Image; {TO_TENSOR}",
    ),
    "nested": (
        of_sample({"input": {"x": ONES}, "target": ONE}),
        f"sample 3 of Points: 'input' must be a tensor or numbers, got a dict; {TO_TENSOR}",
    ),
    "ragged list": (
        of_sample({"input": [[1.0], [2.0, 3.0]], "target": ONE}),
        f"sample 3 of Points: 'input' must be a tensor or numbers, got a list; {TO_TENSOR}",
    ),
    "no input": (
        of_sample({"x": ONES, "target": ONE}),
        "sample 3 of Points: must hold 'input', which a chain reads, got ['target', 'x']; rename an entry",
    ),
    "what the loss reads": (
        of_sample({"input": ONES, "label": 1.0}),
        "microbatches of Points must hold 'target', which the model reads, got ['input', 'label']; rename what the "
        "data set returns",
    ),
    "entries that vary": (
        of_sample(lambda index: {"input": ONES, "target": ONE} | ({"weight": ONE} if index == 6 else {})),
        "samples [3, 6] of Points: entry 'weight' must be in all samples, got one of ['input', 'target']; add it",
    ),
    "shapes that vary": (
        of_sample(lambda index: {"input": torch.ones(2 + index), "target": ONE}),
        "samples [3, 6] of Points: entry 'input' must have one shape in all samples of a microbatch, got [(5,), (8,)]; "
        "give the data set a collate(samples) that pads",
    ),
    "lists of tokens": (
        of_vision(input_ids=[1, 2, 2, 2, 2]),
        "sample 3 of Points: 'input_ids' must be a tensor [seq], got a list; return torch.as_tensor(...) of it",
    ),
    "arrays of tokens": (
        of_vision(labels=np.array([2, 2, 2, 2, 3])),
        "sample 3 of Points: 'labels' must be a tensor [seq], got an ndarray; return torch.as_tensor(...) of it",
    ),
    "text for tokens": (
        of_vision(input_ids="hello"),
        "sample 3 of Points: 'input_ids' must be a tensor [seq], got 'hello'; convert it, or leave the sample out",
    ),
    "tokens that are no integers": (
        of_vision(input_ids=TOKENS["input_ids"].float()),
        "sample 3 of Points: 'input_ids' must be whole numbers, got torch.float32; use .long()",
    ),
    "image for pixels": (
        of_vision(**{"vision.pixels": Image()}),
        f"sample 3 of Points: {IMAGES} an Image; convert it, or leave the sample out",
    ),
    "no image": (
        of_vision(**{"vision.pixels": None}),
        f"sample 3 of Points: {IMAGES} None; convert it, or leave the sample out",
    ),
    "channels last": (
        of_vision(**{"vision.pixels": torch.zeros(8, 8, 3)}),
        "sample 3 of Points: vision image must have shape [3, height, width], got (8, 8, 3); reshape it",
    ),
}
DATASETS: dict[str, tuple[Callable[[], object], str]] = {
    "loader": (
        lambda: train(dataset=DataLoader(TensorDataset(ONES))),
        f"{A_MAP} a DataLoader; pass its .dataset: the trainer orders, batches and collates samples itself",
    ),
    "iterable": (lambda: train(dataset=Stream()), f"{A_MAP} a Stream without __len__; {INTO_A_LIST}"),
    "set": (lambda: train(dataset={1, 2}), f"{A_MAP} a set without __getitem__; {INTO_A_LIST}"),
    "generator": (
        lambda: train(dataset=(index for index in range(8))),
        f"{A_MAP} a generator without __len__ and __getitem__; {INTO_A_LIST}",
    ),
    "splits": (
        lambda: train(dataset={"train": Points(), "test": Points()}),
        f"{A_MAP} a dict of names; pass one of its entries ('train', 'test') or a list of samples",
    ),
    "class": (lambda: train(dataset=Points), f"{A_MAP} the class Points; make one of it"),
    "empty": (lambda: train(dataset=[]), "dataset must hold at least one sample, got 0; check how it is built"),
    "collate that is none": (
        of_collate(3),
        "the data set's collate must be a method, got 3; write def collate(self, samples), or rename it",
    ),
    "collate to a tensor": (
        of_collate(lambda samples: ONES),
        f"samples [3, 6] of Points: collate must return tensors by name, got a Tensor; {A_DICT}",
    ),
    "collate to nothing": (
        of_collate(lambda samples: None),
        f"samples [3, 6] of Points: collate must return tensors by name, got None; {A_DICT}",
    ),
    "collate to lists": (
        of_collate(lambda samples: {"input": [sample["input"] for sample in samples]}),
        "samples [3, 6] of Points: collate must return tensors, got a list as 'input'; stack or pad it, or leave it "
        "out",
    ),
    "collate that drops samples": (
        of_collate(lambda samples: stack(samples[1:])),
        "samples [3, 6] of Points: collate must keep all 2 samples, got 1; leave samples out in __len__ and "
        "__getitem__",
    ),
    "collate that drops labels": (
        lambda: train(dataset=Points(LABELLED, lambda samples: padded(samples[1:]))),
        "collate of Points must keep the targets of its samples, got 1 for 2 samples that have 2; join all samples, "
        "each once",
    ),
    "collate that adds samples": (
        lambda: train(dataset=Points(LABELLED, lambda samples: stack([*samples, *samples]))),
        "collate of Points must keep the targets of its samples, got 4 for 2 samples that have 2; join all samples, "
        "each once",
    ),
    "collate to another name": (
        of_collate(lambda samples: {"x": torch.stack([sample["input"] for sample in samples])}),
        "microbatches of Points must hold 'input', which the model reads, got ['x']; rename what the data set returns",
    ),
    "count that is none": (
        lambda: train(dataset=Counted()),
        "num_targets(3) of Counted must be a whole number >= 0, got None; return how many targets the sample adds to "
        "the loss",
    ),
}

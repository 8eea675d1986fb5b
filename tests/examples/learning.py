"""Trains an example's model in the test's own process, on packed cells: what samples are lacks nothing for them."""

from __future__ import annotations

import torch

from resilient.data.dataset import Dataset
from resilient.models.layer import WholeModel
from resilient.models.multimodal.module import MultimodalModule
from resilient.models.packing import why_padded
from resilient.optim import WarmupCosine
from tests.resilient.small import assemble


def trained(model: MultimodalModule, dataset: Dataset, *, steps: int, lr: float = 3e-3) -> WholeModel:
    """Return the model after some steps, of the size and with the rates that the script has."""
    assert why_padded(model, dataset) is None
    batch, whole = 32, assemble(model, seed=0)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: WarmupCosine(steps // 10, steps, floor=0.01)(step + 1)
    )
    for step in range(steps):
        samples = [dataset[i] for i in range(step * batch, (step + 1) * batch)]
        cell = {}
        for unit in model.units:
            cell |= model.collate_unit(unit, samples, keys=range(batch))
        optimizer.zero_grad()
        num_targets = sum(model.num_targets(sample) or 0 for sample in samples)
        (whole.loss(cell) / num_targets).backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return whole

"""How much faster cells of packed samples are than padded microbatches: forward and backward of one process.

The samples are heavy-tailed, as mixes of captions, documents and pictures are. A microbatch is padded to its longest
text and its largest picture; a cell of the same samples is one row without padding. What is measured is the time of
one core, in turns, so that it does not matter who else uses the machine. Gradients are compared.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, SiglipVisionConfig

from resilient import EncoderModule, MultimodalModule
from resilient.data import collate_multimodal
from resilient.data.seeding import sample_key
from resilient.models.layer import Batch, WholeModel, initialize_layer

MICROBATCHES, SAMPLES, REPEATS, PLACEHOLDER, WORDS = 2, 8, 5, 3, 1000
PATCH, LARGEST, LONGEST = 14, 24, 1500


def make_model() -> MultimodalModule:
    """Return a small model of the usual proportions."""
    vision = SiglipVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=3,
        image_size=LARGEST * PATCH,
        patch_size=PATCH,
    )
    language = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    return MultimodalModule(
        encoders={"vision": EncoderModule(vision, placeholder_id=PLACEHOLDER)}, language_model=language
    )


def draw_sample(generator: torch.Generator) -> dict[str, Any]:
    """Draw a text of log-normal length, and in most of them some pictures of log-normal size."""

    def drawn(median: float, spread: float, most: int) -> int:
        return min(most, max(1, int(median * torch.randn((), generator=generator).mul(spread).exp())))

    num_images = int(torch.randint(0, 4, (), generator=generator))
    grids = [(drawn(6, 0.6, LARGEST), drawn(6, 0.6, LARGEST)) for _ in range(num_images)]
    words = torch.randint(10, WORDS, (drawn(120, 1.0, LONGEST),), generator=generator)
    ids = torch.cat((torch.full((sum(rows * cols for rows, cols in grids),), PLACEHOLDER), words))
    labels = torch.where(ids == PLACEHOLDER, -100, ids.roll(-1))
    pixels = [torch.randn(3, rows * PATCH, cols * PATCH, generator=generator) for rows, cols in grids]
    return {"input_ids": ids, "labels": labels, "vision.pixels": pixels}


def pack(model: MultimodalModule, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the packed cell of samples."""
    keys = [sample_key(0, 1, index) for index in range(len(samples))]
    return model.collate_unit("vision", samples, keys) | model.collate_unit("llm", samples, keys)


def train_ms(whole: WholeModel, batches: Sequence[Batch]) -> float:
    """Run forward and backward of all, and return how long the processor was busy."""
    started = time.process_time()
    for batch in batches:
        whole.loss(batch).backward()
    return 1000 * (time.process_time() - started)


def gradients(whole: WholeModel, batches: Sequence[Batch]) -> Tensor:
    """Return all gradients, one behind the other."""
    whole.zero_grad()
    train_ms(whole, batches)
    return torch.cat([parameter.grad.flatten() for parameter in whole.parameters() if parameter.grad is not None])


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    model = make_model()
    whole = WholeModel(model, {spec.name: initialize_layer(spec, seed=0) for spec in model.layers})
    cells = [[draw_sample(generator) for _ in range(SAMPLES)] for _ in range(MICROBATCHES)]
    batches = {
        "padded": [collate_multimodal(samples) for samples in cells],
        "packed": [pack(model, samples) for samples in cells],
    }
    padded, packed = (gradients(whole, each) for each in batches.values())
    times: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(REPEATS):
        for name, each in batches.items():
            times[name].append(train_ms(whole, each))
    table = Table("", "tokens", "patches", "ms", box=None)
    for name, each in batches.items():
        tokens = sum(batch["input_ids"].numel() for batch in each)
        pixels = sum(value.numel() for batch in each for value in batch.values() if value.is_floating_point())
        table.add_row(name, f"{tokens}", f"{pixels // (3 * PATCH**2)}", f"{median(times[name]):.0f}")
    console = Console()
    console.print(table)
    ratio, difference = median(times["padded"]) / median(times["packed"]), (padded - packed).norm() / padded.norm()
    console.print(f"ratio {ratio:.2f}, gradients differ by {float(difference):.1e}")


if __name__ == "__main__":
    main()

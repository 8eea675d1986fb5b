"""The same training in plain PyTorch with torch's tensor parallelism: each layer is divided over all processes.

Started by torchrun. The plan is that of torch's documentation, with sequence parallelism between the products, a
vocabulary-parallel embedding and ``loss_parallel``. Rank 0 prints the seconds of every step as a JSON list.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
import torch.distributed as dist
from model import batch_of, model_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding


class Model(nn.Module):
    """The job's Llama-shaped model."""

    def __init__(self, seq_len: int) -> None:
        super().__init__()
        given = model_of("llama")
        shape = given.shape_of(given.SMALL)
        config = given.config_of(shape)
        self.embed = nn.Embedding(shape.vocabulary, shape.blocks.hidden)
        self.blocks = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(shape.blocks.num_blocks))
        self.norm = LlamaRMSNorm(shape.blocks.hidden, eps=config.rms_norm_eps)
        self.head = nn.Linear(shape.blocks.hidden, shape.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=config.initializer_range)
        self._places = LlamaRotaryEmbedding(config)(torch.empty(1), torch.arange(seq_len)[None])

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, position_embeddings=self._places)
        return self.head(self.norm(hidden))


def plan(model: Model) -> dict[str, ParallelStyle]:
    """Return how each part is divided; activations between products are divided by tokens."""
    tokens, whole = Shard(1), Replicate()
    found: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }
    for index in range(len(model.blocks)):
        block = f"blocks.{index}"
        found |= {
            f"{block}.input_layernorm": SequenceParallel(),
            f"{block}.post_attention_layernorm": SequenceParallel(),
            f"{block}.self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": tokens}, desired_input_kwarg_layouts={"hidden_states": whole}
            ),
            f"{block}.mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(whole,)),
        }
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            found[f"{block}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            found[f"{block}.{name}"] = RowwiseParallel(output_layouts=tokens)
    return found


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("llama",), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--microbatch", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    given = model_of(args.model)
    model = Model(given.SEQ_LEN)
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data, num_targets = given.dataset(), args.batch * given.TARGETS_PER_SAMPLE
    seconds: list[float] = []
    for number in range(args.steps):
        started = time.perf_counter()
        inputs, targets = batch_of(data, number * args.batch, args.batch)
        optimizer.zero_grad()
        for part, target in zip(inputs.split(args.microbatch), targets.split(args.microbatch), strict=True):
            with loss_parallel():
                (given.summed_loss(model(part), target) / num_targets).backward()
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The small chain, with a first layer that is partly frozen; on one node a bit of a layer's state flips in a step."""

from __future__ import annotations

import argparse
import os
import sys

import chain
import torch
from torch import nn

import resilient as rs
from resilient.runtime import worker
from resilient.runtime.commit import Ledger

PARTS = ("parameter", "frozen", "slot")


def parse_arguments() -> argparse.Namespace:
    """Return the options of the flip; the others are the chain's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--flip-node", default="", help="in its first worker; '0,1': of the second in its second")
    parser.add_argument("--flip-step", type=int, default=3)
    parser.add_argument("--flip-layer", default="layer.0")
    parser.add_argument("--flip-part", choices=PARTS, default="parameter")
    parser.add_argument("--flip-bit", type=int, default=0, help="of a number of 64; 52 doubles or halves it")
    args, others = parser.parse_known_args()
    sys.argv[1:] = others
    return args


class FlippingLedger(Ledger):
    """A ledger in whose buffers a bit flips, once."""

    args = parse_arguments()
    has_flipped = False

    def begin_step(self) -> None:
        super().begin_step()
        places = {(node, str(place)) for place, node in enumerate(self.args.flip_node.split(","))}
        here = os.environ.get("RESILIENT_NODE"), os.environ.get("LOCAL_RANK")
        if here in places and self.version + 1 == self.args.flip_step and not self.has_flipped:
            self.has_flipped = True
            state = self.current[self.args.flip_layer]
            trainable, frozen = state.layout.num_trainable, state.layout.num_frozen
            position = {"parameter": 1, "frozen": trainable, "slot": trainable + frozen + 1}[self.args.flip_part]
            state.buffer.view(torch.int64)[position] ^= 1 << self.args.flip_bit


def half_frozen() -> nn.Module:
    """Return a layer of which one part stays as it is."""
    frozen = nn.Linear(chain.WIDTH, chain.WIDTH).requires_grad_(False)
    return nn.Sequential(frozen, nn.Tanh(), nn.Linear(chain.WIDTH, chain.WIDTH))


def build_model(num_layers: int, slow_node: int | None = None, breaks: str = "", *, frozen: bool = False) -> rs.Chain:
    """Return the chain of the tests, its first layer another one."""
    rest = [lambda: nn.Sequential(nn.Linear(chain.WIDTH, chain.WIDTH), nn.Tanh()) for _ in range(num_layers - 2)]
    return rs.Chain([half_frozen, *rest, lambda: nn.Linear(chain.WIDTH, 1)], chain.squared_error)


if __name__ == "__main__":
    worker.Ledger = FlippingLedger
    chain.build_model = build_model
    chain.main()

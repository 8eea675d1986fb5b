"""The same training as torchft recovers it: three replica groups of one process, DDP over torchft's manager.

The batch shrinks with the number of replicas, which is how torchft works: a step after the failure has two thirds of
the samples.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from replica import NUM_REPLICAS, Points, accumulate, make_model, microbatches, parser, tell
from torch.distributed import FileStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torchft import (  # pyright: ignore[reportMissingImports]
    DistributedDataParallel,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)


def main() -> None:
    """Train until stopped."""
    options = parser()
    options.add_argument("--replica", type=int, required=True)
    options.add_argument("--lighthouse", required=True)
    args = options.parse_args()
    logging.basicConfig(level=logging.WARNING)
    model = make_model()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": plain.state_dict()}

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        hostname="localhost",
        lighthouse_addr=args.lighthouse,
        replica_id=f"replica_{args.replica}",
        init_sync=False,
    )
    replicated = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, plain)
    data = Points()
    # All replicas are known to the lighthouse before the first quorum, so that none has to catch up.
    meeting = FileStore(str(args.folder / "meeting"), NUM_REPLICAS)
    meeting.set(f"ready/{args.replica}", "")
    meeting.wait([f"ready/{replica}" for replica in range(NUM_REPLICAS)])
    while True:
        step = manager.current_step()
        parts = microbatches(data, step, args.replica, args.batch, args.microbatch)
        optimizer.zero_grad(set_to_none=False)
        accumulate(replicated, parts)
        optimizer.step()
        if manager.current_step() > step:
            tell(args.replica, manager.current_step())


if __name__ == "__main__":
    main()

"""A job of plain torch: sums its ranks once; in its first round it waits for a file and rank 0 then kills itself."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, killed = dist.get_rank(), folder / "killed"
again = int(killed.exists())  # torchrun counts restarts only where a worker failed
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
written = folder / f"rank-{rank}"
written.write_text(f"{total.item():g} of {dist.get_world_size()}")
written.rename(folder / f"round-{again}-rank-{rank}")  # whole when it is there
if not again:
    while not (folder / "go-on").exists():
        time.sleep(0.05)
    if rank == 0:
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()

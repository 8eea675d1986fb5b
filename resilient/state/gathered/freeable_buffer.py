"""Memory that can be given back while tensors still point into it, and taken anew when they are used again.

The one use of ``untyped_storage().resize_``, which torch's own sharding rests on as well. Tried on torch 2.13: a module
keeps its parameters, and autograd what it saved of them, while there is nothing behind them; after the memory was taken
anew, and filled with the same values, they are what they were. Autograd watches for changes by a counter that views of
a tensor share, but not with what ``.data`` returns: what is written here changes nothing for it.
"""

from __future__ import annotations

import torch
from torch import Tensor


class FreeableBuffer:
    """Bytes without memory, at first.

    Args:
        num_bytes: How many.
        device: Where.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.free()

    @property
    def num_bytes(self) -> int:
        """What it takes now: all or nothing."""
        return self._bytes.untyped_storage().nbytes()

    @property
    def bytes(self) -> Tensor:
        """The bytes, ``[num_bytes]``, to be written."""
        return self._bytes.data

    def view(self, start: int, end: int, dtype: torch.dtype) -> Tensor:
        """Return some of them as elements of a type; a write to :attr:`bytes` is none to it, for autograd."""
        # the memory is not looked at, but views are only made of what there is
        if not self.num_bytes:
            self.allocate()
        return self._bytes.data[start:end].view(dtype).data

    def allocate(self) -> None:
        """Take the memory; nothing is in it."""
        self._bytes.untyped_storage().resize_(self._bytes.numel())

    def free(self) -> None:
        """Give the memory back; nothing may use it before it is allocated and filled."""
        self._bytes.untyped_storage().resize_(0)

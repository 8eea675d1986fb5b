"""Linear layers and embeddings of which each tensor-parallel device has a part, in modules made for one device.

A part of the module that linear layers with divided outputs are in gathers the tokens once for all of them; those with
divided inputs hand each device the sum of its tokens. Between the two, a device computes with what it has. Where tokens
are exchanged in chunks, what is computed before and after that is computed meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from resilient.models.tensor_parallel.devices import TensorDevices
from resilient.models.tensor_parallel.exchanges import gather_tokens, sum_tokens
from resilient.models.tensor_parallel.overlapped import gathered_products, summed_product

COLUMNS, ROWS = "colwise", "rowwise"
"""Linear layers whose outputs, and whose inputs are divided, as transformers calls them."""


class TokenCount:
    """How many tokens there are in the microbatch that is computed; each device has some."""

    value = 0


class ColumnLinear(nn.Linear):
    """A linear layer of this device's outputs, for the tokens of :func:`entering`."""

    made: Tensor | None = None
    """What it is to return, where that is computed already."""

    def forward(self, input: Tensor) -> Tensor:
        made, self.made = self.made, None
        return super().forward(input) if made is None else made


class RowLinear(nn.Linear):
    """A linear layer of this device's inputs: the sum over all devices, of its tokens.

    Args:
        whole: The layer as one device has it; of its sizes alone.
        devices: They.
    """

    def __init__(self, whole: nn.Linear, devices: TensorDevices) -> None:
        super().__init__(devices.own_size(whole.in_features), whole.out_features, whole.bias is not None)
        self._devices = devices

    def forward(self, input: Tensor) -> Tensor:
        if self._devices.num_chunks > 1:
            total = summed_product(input, self.weight, self._devices)
        else:
            total = sum_tokens(nn.functional.linear(input, self.weight), self._devices)
        return total if self.bias is None else total + self.bias.to(total.dtype)


class VocabularyEmbedding(nn.Embedding):
    """An embedding of this device's part of the vocabulary; of all tokens, it returns this device's.

    Args:
        num_embeddings: Of all devices.
        embedding_dim: Width.
        padding_idx: Has no gradient.
        devices: They.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, devices: TensorDevices
    ) -> None:
        self.ids = devices.own(num_embeddings)
        if padding_idx is not None:
            padding_idx = padding_idx - self.ids.start if self.ids.start <= padding_idx < self.ids.stop else None
        super().__init__(self.ids.stop - self.ids.start, embedding_dim, padding_idx)
        self._devices = devices

    def forward(self, input: Tensor) -> Tensor:
        is_own = (input >= self.ids.start) & (input < self.ids.stop)
        rows = super().forward((input - self.ids.start).where(is_own, 0))
        return sum_tokens(rows.where(is_own[..., None], 0), self._devices)


def entering(part: Tensor, columns: Sequence[ColumnLinear], devices: TensorDevices, num_tokens: int) -> Tensor:
    """Return all tokens ``[microbatch, num_tokens, ...]``, for some layers to be called with next, and nothing else.

    Args:
        part: Those of this device.
        columns: The layers.
        devices: They.
        num_tokens: Of all.
    """
    if devices.num_chunks == 1:
        return gather_tokens(part, devices, num_tokens)
    whole, made = gathered_products(part, columns, devices, num_tokens)
    for column, each in zip(columns, made, strict=True):
        column.made = each
    return whole


def divide_linears(module: nn.Module, rules: Mapping[str, str], devices: TensorDevices, num_tokens: TokenCount) -> None:
    """Have a module that was made for one device compute with this device's part of its linear layers.

    What reshapes their outputs must take as many heads as there are. What enters a part of the module that layers with
    divided outputs are in must be used by these alone.

    Args:
        module: It; it is changed, and its linear layers get other values.
        rules: Path of a linear layer -> :data:`COLUMNS` or :data:`ROWS`.
        devices: They.
        num_tokens: Known whenever the module runs.
    """
    columns: dict[str, list[ColumnLinear]] = {}
    for path, rule in rules.items():
        whole = module.get_submodule(path)
        assert isinstance(whole, nn.Linear), path
        if rule == ROWS:
            module.set_submodule(path, RowLinear(whole, devices))
            continue
        part = ColumnLinear(whole.in_features, devices.own_size(whole.out_features), whole.bias is not None)
        module.set_submodule(path, part)
        columns.setdefault(path.rpartition(".")[0], []).append(part)

    def gather(
        together: Sequence[ColumnLinear], _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = entering(arguments[0] if arguments else named["hidden_states"], together, devices, num_tokens.value)
        return ((hidden, *arguments[1:]), named) if arguments else ((), {**named, "hidden_states": hidden})

    for path, together in columns.items():
        module.get_submodule(path).register_forward_pre_hook(partial(gather, together), with_kwargs=True)

"""Linear layers and embeddings of which each tensor-parallel device has a part, in modules made for one device.

A part of the module that linear layers with divided outputs are in gathers the tokens once for all of them; those with
divided inputs hand each device the sum of its tokens. Between the two, a device computes with what it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from resilient.models.tensor_parallel.devices import TensorDevices
from resilient.models.tensor_parallel.exchanges import gather_tokens, sum_tokens

COLUMNS, ROWS = "colwise", "rowwise"
"""Linear layers whose outputs, and whose inputs are divided, as transformers calls them."""


class TokenCount:
    """How many tokens there are in the microbatch that is computed; each device has some."""

    value = 0


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


def divide_linears(module: nn.Module, rules: Mapping[str, str], devices: TensorDevices, num_tokens: TokenCount) -> None:
    """Have a module that was made for one device compute with this device's part of its linear layers.

    What reshapes their outputs must take as many heads as there are.

    Args:
        module: It; it is changed, and its linear layers get other values.
        rules: Path of a linear layer -> :data:`COLUMNS` or :data:`ROWS`.
        devices: They.
        num_tokens: Known whenever the module runs.
    """

    def gather(
        _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if arguments:
            return (gather_tokens(arguments[0], devices, num_tokens.value), *arguments[1:]), named
        return (), {**named, "hidden_states": gather_tokens(named["hidden_states"], devices, num_tokens.value)}

    for path, rule in rules.items():
        whole = module.get_submodule(path)
        assert isinstance(whole, nn.Linear), path
        if rule == ROWS:
            part = RowLinear(whole, devices)
        else:
            part = nn.Linear(whole.in_features, devices.own_size(whole.out_features), whole.bias is not None)
        module.set_submodule(path, part)
    for path in dict.fromkeys(path.rpartition(".")[0] for path, rule in rules.items() if rule == COLUMNS):
        module.get_submodule(path).register_forward_pre_hook(gather, with_kwargs=True)

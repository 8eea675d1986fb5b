"""Matrix products that feed on, or are followed by, exchanges of tokens in chunks, which go on while they are computed.

A product of columns begins with this device's tokens while those of the others come, and goes on with each chunk that
is here; of a product of rows each chunk is on its way to be summed as soon as it is computed. Backwards do the other of
the two, and what is left to be summed then is so while the gradients of the matrices are computed.

An exchange begins in one node of autograd's graph and ends in another, and tensors between these are not yet what they
will be: nobody else may read them. Matrices have nodes of their own, as a backward may be split into that of inputs and
that of parameters. Of nodes that are ready autograd runs the newest: the products', before the matrices', and then that
which waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from resilient.models.tensor_parallel.devices import Exchange, TensorDevices, TokenPieces


def gathered_products(
    part: Tensor, columns: Sequence[nn.Linear], devices: TensorDevices, num_tokens: int
) -> tuple[Tensor, list[Tensor]]:
    """Return all tokens ``[microbatch, num_tokens, ...]``, of which gradients do not come back, and what layers make.

    Args:
        part: Those of this device.
        columns: Linear layers, each with this device's outputs.
        devices: They.
        num_tokens: Of all.
    """
    chunks = _Chunks(devices, num_tokens)
    whole = cast(Tensor, _Gather.apply(part, chunks))
    dtype = _product_type(part)
    matrices = [_matrix(column.weight, column.bias, whole.detach(), dtype, None) for column in columns]
    weights = [column.weight.detach() for column in columns]
    biases = [None if column.bias is None else column.bias.detach() for column in columns]
    made = cast(tuple[Tensor, ...], _Products.apply(chunks, True, dtype, whole, biases, *weights))
    outputs = [_joined(each, matrix).transpose(0, 1) for each, matrix in zip(made, matrices, strict=True)]
    return whole.detach().transpose(0, 1), outputs


def summed_product(input: Tensor, weight: Tensor, devices: TensorDevices) -> Tensor:
    """Return this device's tokens of the sum over all devices of a product with a part of a matrix.

    Args:
        input: This device's inputs, of all tokens, ``[microbatch, tokens, own inputs]``.
        weight: ``[outputs, own inputs]``.
        devices: They.
    """
    chunks, tokens, dtype = _Chunks(devices, input.shape[1]), input.transpose(0, 1), _product_type(input)
    matrix = _matrix(weight, None, tokens.detach(), dtype, chunks)
    (made,) = cast(tuple[Tensor], _Products.apply(chunks, False, dtype, tokens, [None], weight.detach()))
    return cast(Tensor, _Sum.apply(_joined(made, matrix), chunks))


def _product_type(input: Tensor) -> torch.dtype:
    kind = input.device.type
    lowers = torch.is_autocast_enabled(kind) and input.dtype is not torch.float64
    return torch.get_autocast_dtype(kind) if lowers else input.dtype


class _Chunks:
    """The exchanges of tokens, ``[tokens, microbatch, ...]``, before and after a product."""

    def __init__(self, devices: TensorDevices, num_tokens: int) -> None:
        self._devices = devices
        self._num_tokens = num_tokens
        self._own = devices.own(num_tokens)
        self._chunks = devices.chunks(num_tokens)
        self._exchanges: list[Exchange] = []

    def start_gathers(self, part: Tensor) -> Tensor:
        """Return where the tokens of all devices will be."""
        whole = part.new_empty((self._num_tokens, part.shape[0], *part.shape[2:]))
        whole[self._own] = part.transpose(0, 1)
        into = whole.detach()  # the node that returns it holds this: it would never be freed if nobody waited
        self._exchanges = [self._devices.start_gather(into, pieces) for pieces in self._chunks]
        return whole

    def arriving(self) -> Iterator[TokenPieces]:
        """Yield which tokens there are: this device's, then one chunk of the others' after the other."""
        yield [self._own]
        exchanges, self._exchanges = self._exchanges, []
        for pieces, exchange in zip(self._chunks, exchanges, strict=True):
            exchange.wait()
            yield [piece for index, piece in enumerate(pieces) if index != self._devices.index]

    def leaving(self, total: Tensor) -> Iterator[TokenPieces]:
        """Yield which tokens are to be computed, and start to sum them when that is done."""
        total = total.detach()  # as above
        for pieces in self._chunks:
            yield pieces
            self._exchanges.append(self._devices.start_sum(total, pieces))

    def finish(self) -> None:
        """Wait for all that was started."""
        exchanges, self._exchanges = self._exchanges, []
        for exchange in exchanges:
            exchange.wait()

    def own(self, whole: Tensor) -> Tensor:
        """Return this device's tokens, ``[microbatch, own tokens, ...]``."""
        return whole[self._own].transpose(0, 1)


class _Gather(Function):
    """Starts to gather tokens; its backward waits for the sums of their gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, chunks: _Chunks) -> Tensor:
        ctx.chunks = chunks
        return chunks.start_gathers(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.chunks.finish()
        return ctx.chunks.own(gradients[0]), None


class _Sum(Function):
    """Waits for sums of tokens; its backward starts to gather their gradients."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, chunks: _Chunks) -> Tensor:
        ctx.chunks = chunks
        chunks.finish()
        ctx.save_for_backward(total.new_empty(0))  # what runs again ends with the last tensor that is saved: not before
        return chunks.own(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.chunks.start_gathers(gradients[0]), None


class _Products(Function):
    """Multiplies tokens as they arrive, or before they leave, and their gradients the other way round."""

    @staticmethod
    def forward(
        ctx: Any,
        chunks: _Chunks,
        arrive: bool,
        dtype: torch.dtype,
        tokens: Tensor,
        biases: Sequence[Tensor | None],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.chunks, ctx.arrive, ctx.shape, ctx.types = chunks, arrive, tokens.shape, (tokens.dtype, dtype)
        ctx.save_for_backward(*weights)
        used = [weight.to(dtype) for weight in weights]
        made = tuple(tokens.new_empty((*tokens.shape[:2], len(weight)), dtype=dtype) for weight in weights)
        for pieces in chunks.arriving() if arrive else chunks.leaving(made[0]):
            for piece in pieces:
                rows = tokens[piece].flatten(0, 1).to(dtype)
                for weight, bias, each in zip(used, biases, made, strict=True):
                    into = each[piece].flatten(0, 1)
                    if bias is None:
                        torch.mm(rows, weight.t(), out=into)
                    else:
                        torch.addmm(bias.to(dtype), rows, weight.t(), out=into)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        type_of_tokens, dtype = ctx.types
        weights = [weight.to(dtype) for weight in ctx.saved_tensors]
        total = gradients[0].new_empty(ctx.shape, dtype=type_of_tokens)
        for pieces in ctx.chunks.leaving(total) if ctx.arrive else ctx.chunks.arriving():
            for piece in pieces:
                pairs = zip((each[piece].flatten(0, 1) for each in gradients), weights, strict=True)
                rows, weight = next(pairs)
                found = rows @ weight
                for rows, weight in pairs:
                    found.addmm_(rows, weight)
                total[piece] = found.view(total[piece].shape)
        return None, None, None, total, None, *(None for _ in weights)


class _Matrix(Function):
    """Stands for a matrix beside what is made with it: nothing in memory, and its backward is the matrix's."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        dtype: torch.dtype,
        chunks: _Chunks | None,
    ) -> Tensor:
        ctx.chunks, ctx.dtype = chunks, weight.dtype
        ctx.save_for_backward(tokens)
        return tokens.new_zeros(1, dtype=dtype).expand(*tokens.shape[:2], len(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.chunks is not None:  # of inputs without a gradient nobody else has waited for it
            ctx.chunks.finish()
        (tokens,) = ctx.saved_tensors
        rows = gradients[0].flatten(0, 1)
        weight = bias = None
        if ctx.needs_input_grad[0]:
            weight = (rows.t() @ tokens.flatten(0, 1).to(rows.dtype)).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            bias = rows.sum(0).to(ctx.dtype)
        return weight, bias, None, None, None


class _Join(Function):
    """Leads gradients of what is made to what it is made of, and to the matrix."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, matrix: Tensor) -> Tensor:
        return made.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], gradients[0]


def _matrix(
    weight: Tensor, bias: Tensor | None, tokens: Tensor, dtype: torch.dtype, chunks: _Chunks | None
) -> Tensor | None:
    """Return what stands for a matrix; None where it is frozen."""
    is_trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    return cast(Tensor, _Matrix.apply(weight, bias, tokens, dtype, chunks)) if is_trained else None


def _joined(made: Tensor, matrix: Tensor | None) -> Tensor:
    return made if matrix is None else cast(Tensor, _Join.apply(made, matrix))

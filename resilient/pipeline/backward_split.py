"""Splits a backward in two: the gradients of what came in at once, those of parameters whenever there is time.

Owns what lies between the two. The gradients of inputs flow through those nodes of the autograd graph from which an
input can be reached. A parameter hangs off one of these nodes, its *anchor*: with the gradient that arrives there, its
own needs nothing of the rest of the graph. So the first part notes what arrives at the anchors, the second goes from
each anchor to its parameters, and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_Arrived = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class _Piece:
    """A backward from ``outputs`` with ``gradients`` to ``parameters``."""

    outputs: Sequence[Tensor] | Sequence[GradientEdge]
    gradients: Sequence[Tensor | None]
    parameters: Sequence[Tensor]


@dataclass(frozen=True)
class Deferred:
    """The second part of a backward.

    Args:
        pieces: Last layers first.
        outputs: What is differentiated: nodes alone do not keep their graph alive.
    """

    pieces: Sequence[_Piece] = ()
    outputs: Sequence[Tensor] = ()

    @property
    def num_bytes(self) -> int:
        """What the gradients take that wait for it."""
        waiting = [gradient for piece in self.pieces for gradient in piece.gradients if gradient is not None]
        storages = [gradient.untyped_storage() for gradient in waiting]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def accumulate(self) -> None:
        """Add to the parameters' gradients; called once."""
        for piece in self.pieces:
            torch.autograd.backward(piece.outputs, piece.gradients, inputs=piece.parameters)


def differentiate_inputs(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
) -> tuple[Sequence[Tensor | None], Deferred]:
    """Run the first part of a backward.

    Args:
        outputs: What is differentiated.
        gradients: Of each output; None for a scalar.
        inputs: Leaves; none of them means that everything is left for the second part.
        parameters: Leaves whose gradients are computed in the second part.

    Returns:
        The gradients of ``inputs``, None where nothing arrives, and the second part. Where that needs nothing of the
        graph, the graph is free.
    """
    if not inputs:
        return (), Deferred([_Piece(outputs, gradients, parameters)] if outputs and parameters else [])
    if not outputs:
        return [None] * len(inputs), Deferred()
    anchored, several = _anchors(outputs, inputs, parameters)
    arrived: dict[Node, _Arrived] = {}
    handles = [node.register_prehook(partial(_note, arrived, node)) for node in anchored if node is not None]
    keeps_graph = bool(anchored)
    found = torch.autograd.grad(outputs, [*inputs, *several], gradients, retain_graph=keeps_graph, allow_unused=True)
    for handle in handles:
        handle.remove()
    ready = zip(several, found[len(inputs) :], strict=True)
    pieces = [_Piece([leaf], [gradient], [leaf]) for leaf, gradient in ready if gradient is not None]
    for node, hanging in anchored.items():
        if node is None:
            pieces.append(_Piece(outputs, gradients, hanging))
            continue
        there = {number: grad for number, grad in enumerate(arrived.get(node, ())) if grad is not None}
        if there:
            pieces.append(_Piece([GradientEdge(node, number) for number in there], list(there.values()), hanging))
    return found[: len(inputs)], Deferred(pieces, outputs if keeps_graph else ())


def _note(arrived: dict[Node, _Arrived], node: Node, gradients: _Arrived) -> None:
    arrived[node] = gradients


def _anchors(
    outputs: Iterable[Tensor], inputs: Iterable[Tensor], parameters: Iterable[Tensor]
) -> tuple[dict[Node | None, list[Tensor]], list[Tensor]]:
    """Return the parameters by anchor, last layers first, and those that hang off several.

    Of several anchors one may lie behind another, and a backward from that one would pass both. Such parameters (a
    matrix that is used twice) are few. The anchor None stands for the outputs from which no input is reached.
    """
    roots = [get_gradient_edge(output).node for output in outputs]
    targets = {get_gradient_edge(leaf).node for leaf in inputs}
    leaves = {get_gradient_edge(leaf).node: leaf for leaf in parameters}
    children: dict[Node, list[Node]] = {}
    order = _children_first(roots, children)
    through: set[Node] = set()
    for node in order:
        if node in targets or not through.isdisjoint(children[node]):
            through.add(node)
    sides: dict[Node | None, list[Node]] = {None: [root for root in roots if root not in through]}
    for node in reversed(order):
        if node in through:
            sides[node] = [child for child in children[node] if child not in through]
    anchors_of: dict[Node, list[Node | None]] = {leaf: [] for leaf in leaves}
    for anchor, side in sides.items():
        for node in _children_first(side, children):
            if node in leaves:
                anchors_of[node].append(anchor)
    anchored: dict[Node | None, list[Tensor]] = {}
    for leaf, anchors in anchors_of.items():
        if len(anchors) == 1:
            anchored.setdefault(anchors[0], []).append(leaves[leaf])
    several = [leaves[leaf] for leaf, anchors in anchors_of.items() if len(anchors) > 1]
    return {anchor: anchored[anchor] for anchor in sides if anchor in anchored}, several


def _children_first(roots: Iterable[Node], children: dict[Node, list[Node]]) -> list[Node]:
    """Return all nodes that are reached from ``roots``, each after the nodes it leads to, which ``children`` keeps."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            if node not in children:
                children[node] = [child for child, _ in node.next_functions if child is not None]
            stack.extend((child, False) for child in children[node] if child not in seen)
    return order

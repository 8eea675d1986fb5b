"""Splits a backward in two: the gradients of what came in at once, those of parameters whenever there is time.

Owns what lies between the two. The gradients of inputs flow through those nodes of the autograd graph from which an
input can be reached. A parameter hangs off one of these nodes, its *anchor*: with the gradient that arrives there, its
own needs nothing of the rest of the graph. So the first part notes what arrives at the anchors, the second goes from
each anchor to its parameters, and nothing is computed twice.

A parameter that is used several times hangs off several anchors, of which one may lie behind another: a backward to the
parameter would pass both. So the second part goes from each to the node beside it that leads to the parameter, and on
from all of these together. That takes a node of each anchor's own (a linear layer turns its matrix around, and that is
one). Where the parameter itself is beside the anchor (a bias, a norm's scale), its gradient is made in the first part.
So it is beside a function that is written in Python, as a compiled layer is: that makes all its gradients at once.

Hooks on tensors see what arrives there in both parts; what they make of it counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_Arrived = tuple[Tensor | None, ...]


@contextmanager
def _as_they_are(arrived: Mapping[GradientEdge, Tensor]) -> Iterator[None]:
    """Let gradients that hooks of their nodes have already seen pass these unchanged."""
    of_nodes: dict[Node, dict[int, Tensor]] = {}
    for edge, gradient in arrived.items():
        of_nodes.setdefault(edge.node, {})[edge.output_nr] = gradient
    # it runs after all that are there already
    handles = [node.register_prehook(partial(_put_back, seen)) for node, seen in of_nodes.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _put_back(seen: Mapping[int, Tensor], gradients: _Arrived) -> _Arrived:
    return tuple(seen.get(number, gradient) for number, gradient in enumerate(gradients))


@dataclass(frozen=True)
class _Whole:
    """A backward from ``outputs`` with ``gradients`` to ``parameters``."""

    outputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    parameters: Sequence[Tensor]

    def accumulate(self) -> None:
        torch.autograd.backward(self.outputs, self.gradients, inputs=self.parameters)


@dataclass(frozen=True)
class _Piece:
    """A backward from one node, with what ``arrived`` there, to ``parameters``."""

    arrived: Mapping[GradientEdge, Tensor]
    parameters: Sequence[Tensor]

    @property
    def gradients(self) -> Sequence[Tensor]:
        return list(self.arrived.values())

    def accumulate(self) -> None:
        with _as_they_are(self.arrived):
            torch.autograd.backward(list(self.arrived), self.gradients, inputs=self.parameters)


@dataclass(frozen=True)
class _Joined:
    """Backwards from several anchors, with what arrived there, each by edges of its own, to the same ``parameters``."""

    arrived: Sequence[Mapping[GradientEdge, Tensor]]
    edges: Sequence[Sequence[GradientEdge]]
    parameters: Sequence[Tensor]

    @property
    def gradients(self) -> Sequence[Tensor]:
        return [gradient for at_anchor in self.arrived for gradient in at_anchor.values()]

    def accumulate(self) -> None:
        reached: dict[GradientEdge, Tensor] = {}
        for at_anchor, edges in zip(self.arrived, self.edges, strict=True):
            # other pieces begin at the same anchors
            given = list(at_anchor.values())
            with _as_they_are(at_anchor):
                found = torch.autograd.grad(list(at_anchor), edges, given, retain_graph=True, allow_unused=True)
            reached |= {edge: each for edge, each in zip(edges, found, strict=True) if each is not None}
        with _as_they_are(reached):
            torch.autograd.backward(list(reached), list(reached.values()), retain_graph=True, inputs=self.parameters)


@dataclass(frozen=True)
class Deferred:
    """The second part of a backward.

    Args:
        pieces: Last layers first.
        outputs: What is differentiated: nodes alone do not keep their graph alive.
    """

    pieces: Sequence[_Whole | _Piece | _Joined] = ()
    outputs: Sequence[Tensor] = ()

    @property
    def waiting(self) -> dict[int, int]:
        """Bytes of the gradients that wait for it, by their addresses."""
        waiting = [gradient for piece in self.pieces for gradient in piece.gradients if gradient is not None]
        storages = [gradient.untyped_storage() for gradient in waiting]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    def accumulate(self) -> None:
        """Add to the parameters' gradients; called once."""
        for piece in self.pieces:
            piece.accumulate()


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
        return (), Deferred([_Whole(outputs, gradients, parameters)] if outputs and parameters else [])
    if not outputs:
        return [None] * len(inputs), Deferred()
    hanging = _hanging(outputs, inputs, parameters)
    arrived: dict[Node, _Arrived] = {}
    handles = [anchor.register_prehook(partial(_note, arrived, anchor)) for anchor in hanging.anchors()]
    direct = hanging.direct
    keeps_graph = bool(hanging.single or hanging.joined)
    found = torch.autograd.grad(outputs, [*inputs, *direct], gradients, retain_graph=keeps_graph, allow_unused=True)
    for handle in handles:
        handle.remove()
    at = {
        anchor: {GradientEdge(anchor, number): grad for number, grad in enumerate(there) if grad is not None}
        for anchor, there in arrived.items()
    }
    ready = zip(direct, found[len(inputs) :], strict=True)
    pieces: list[_Whole | _Piece | _Joined] = [
        _Piece({get_gradient_edge(leaf): grad}, [leaf]) for leaf, grad in ready if grad is not None
    ]
    for edges, leaves in hanging.joined.items():
        reached = {anchor: own for anchor, own in edges if at.get(anchor)}
        if reached:
            pieces.append(_Joined([at[anchor] for anchor in reached], list(reached.values()), leaves))
    for anchor, leaves in hanging.single.items():
        if anchor is None:
            pieces.append(_Whole(outputs, gradients, leaves))
        elif at.get(anchor):
            pieces.append(_Piece(at[anchor], leaves))
    return found[: len(inputs)], Deferred(pieces, outputs if keeps_graph else ())


def _note(arrived: dict[Node, _Arrived], node: Node, gradients: _Arrived) -> None:
    arrived[node] = gradients


@dataclass(frozen=True)
class _Hanging:
    """What parameters hang off.

    Attributes:
        single: Those of one anchor, last layers first. The anchor None stands for the outputs from which no input is
            reached.
        joined: Those of several, by each of these with its edges that lead to them.
        direct: Those whose gradients are made in the first part.
    """

    single: dict[Node | None, list[Tensor]]
    joined: dict[tuple[tuple[Node, tuple[GradientEdge, ...]], ...], list[Tensor]]
    direct: list[Tensor]

    def anchors(self) -> set[Node]:
        single = {anchor for anchor in self.single if anchor is not None}
        return single.union(anchor for edges in self.joined for anchor, _ in edges)


def _hanging(outputs: Iterable[Tensor], inputs: Iterable[Tensor], parameters: Iterable[Tensor]) -> _Hanging:
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
    anchors_of: dict[Node, list[Node | None]] = {}
    for anchor, side in sides.items():
        for node in _children_first(side, children):
            anchors_of.setdefault(node, []).append(anchor)
    hanging = _Hanging({anchor: [] for anchor in sides}, {}, [])
    for node, leaf in leaves.items():
        anchors = anchors_of.get(node, [])
        if len(anchors) == 1:
            at_once = isinstance(anchors[0], BackwardCFunction) and node in children[anchors[0]]
            (hanging.direct if at_once else hanging.single[anchors[0]]).append(leaf)
        elif anchors:
            edges = [_own_edges(anchor, node, anchors_of, children) for anchor in anchors]
            if all(edges):
                hanging.joined.setdefault(tuple(filter(None, edges)), []).append(leaf)
            else:
                hanging.direct.append(leaf)
    for anchor in [anchor for anchor, hangs in hanging.single.items() if not hangs]:
        del hanging.single[anchor]
    return hanging


def _own_edges(
    anchor: Node | None, leaf: Node, anchors_of: Mapping[Node, Sequence[Node | None]], children: dict[Node, list[Node]]
) -> tuple[Node, tuple[GradientEdge, ...]] | None:
    """Return an anchor with its edges to a leaf; None where one of these leads to a node that others lead to, too.

    These others are another anchor's edges, or another of its own: what goes on from both would pass the node twice.
    """
    if anchor is None:
        return None
    behind = {
        GradientEdge(child, number): _children_first([child], children)
        for child, number in anchor.next_functions
        if child is not None and child in anchors_of
    }
    edges = [edge for edge, order in behind.items() if leaf in order]
    shared = any(anchors_of[edge.node] != [anchor] for edge in edges)
    nested = any(edge.node in order[:-1] for edge in edges for order in behind.values())
    return None if shared or nested else (anchor, tuple(edges))


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

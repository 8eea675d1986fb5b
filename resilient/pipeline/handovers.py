"""Hands features from unit to unit in one step: joined for what the next unit computes, gradients split again.

Owns which rows of what came from where. Units process samples in cells of their own, so what one of them makes at once
may go to several cells of the next, and what that needs may come from several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from resilient.models.layer import Activations
from resilient.pipeline.row_actions import CellPart, RowActions, StageLink
from resilient.pipeline.sample_rows import RowsSource, SampleRows, rearranged


class Handovers:
    """What one row gets of other units, and gives them, in one step.

    Args:
        of_row: The row.
        samples: Says which samples are in a part, in order.
        num_features: Says how many rows go from a unit to another, of a sample.
    """

    def __init__(
        self,
        of_row: RowActions,
        samples: Callable[[CellPart], tuple[int, ...]],
        num_features: Callable[[str, str, int], int],
    ) -> None:
        self._of_row = of_row
        self._samples = samples
        self._num_features = num_features
        self._rows: dict[StageLink, SampleRows] = {}
        self._names: dict[StageLink, tuple[str, ...]] = {}
        self._gradients: dict[StageLink, list[RowsSource]] = {}

    def rows(self, link: StageLink) -> SampleRows:
        """Return the rows of what goes over a link: those samples of its source that its target has."""
        if link not in self._rows:
            targets = self._of_row.parts(link.target, link.target_cell)
            wanted = {sample for part in targets for sample in self._samples(part)}
            made = self._samples(self._of_row.source(link))
            self._rows[link] = self._counted(link, (sample for sample in made if sample in wanted))
        return self._rows[link]

    def outgoing(self, link: StageLink, activations: Activations) -> Activations:
        """Return what of a part's activations goes over a link."""
        return rearranged([(self._made(link), activations)], self.rows(link))

    def of_part(self, returned: Mapping[StageLink, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the gradients of a part's activations, given those that came back over each of its links."""
        sources = [(self.rows(link), gradients) for link, gradients in returned.items() if gradients]
        return rearranged(sources, self._made(next(iter(returned)))) if sources else {}

    def joined(self, part: CellPart, arrived: Mapping[StageLink, Activations]) -> Activations:
        """Return what a part of a unit's cell gets of all that came for the cell.

        Args:
            part: It.
            arrived: By link; all of the cell.
        """
        found: Activations = {}
        for unit, links in self._by_unit(arrived).items():
            sources = [(self.rows(link), arrived[link]) for link in links]
            target = self._wanted(part, links)
            joined = rearranged(sources, target)
            for name, tensor in joined.items():
                if any(tensors[name].requires_grad for _, tensors in sources):
                    joined[name] = tensor.detach().requires_grad_()
            repeated = sorted(joined.keys() & found.keys())
            assert not repeated, f"unit {unit} makes {repeated}, as another one does"
            found |= joined
        for link, activations in arrived.items():
            self._names[link] = tuple(activations)
        return found

    def keep(self, part: CellPart, links: Iterable[StageLink], gradients: Mapping[str, Tensor]) -> None:
        """Keep the gradients of what :meth:`joined` gave a part, for those links that it was made of."""
        for of_unit in self._by_unit(links).values():
            rows = self._wanted(part, of_unit)
            for link in of_unit:
                wanted = {name: gradients[name] for name in self._names[link] if name in gradients}
                if wanted:
                    self._gradients.setdefault(link, []).append((rows, wanted))

    def returned(self, link: StageLink) -> dict[str, Tensor]:
        """Return the gradients of what came over a link, once all parts of the cell have theirs."""
        kept = self._gradients.pop(link, [])
        return rearranged(kept, self.rows(link)) if kept else {}

    def _by_unit(self, links: Iterable[StageLink]) -> dict[str, list[StageLink]]:
        found: dict[str, list[StageLink]] = {}
        for link in links:
            found.setdefault(self._of_row.lane(link.source).unit, []).append(link)
        return found

    def _wanted(self, part: CellPart, links: Iterable[StageLink]) -> SampleRows:
        """Return the rows of a part's samples in what comes over links from one unit."""
        links = list(links)
        there = {sample for link in links for sample in self.rows(link).samples}
        return self._counted(links[0], (sample for sample in self._samples(part) if sample in there))

    def _made(self, link: StageLink) -> SampleRows:
        return self._counted(link, self._samples(self._of_row.source(link)))

    def _counted(self, link: StageLink, samples: Iterable[int]) -> SampleRows:
        source, target = (self._of_row.lane(stage).unit for stage in (link.source, link.target))
        chosen = tuple(samples)
        return SampleRows(chosen, [self._num_features(source, target, sample) for sample in chosen])

"""What a copy of a state has gone through, and the files that copies are written to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from resilient.state.manifest import Manifest, SavedState


class Violation(AssertionError):  # noqa: N818  (it is no error of the checker)
    """Something that must hold does not."""


class Applied(NamedTuple):
    """One step, as it was applied to a state: in which generation its gradients were summed, and whether it updated."""

    step: int
    generation: int
    is_update: bool

    def __str__(self) -> str:
        return f"{self.step}{'' if self.is_update else '-'}@{self.generation}"


def damage(worker: tuple[int, int]) -> Applied:
    """Return what memory does to a copy: no two do the same."""
    return Applied(0, 10 * worker[0] + worker[1], is_update=False)


def is_damaged(lineage: Iterable[Applied]) -> bool:
    """Return whether memory has damaged a copy."""
    return any(applied.step == 0 for applied in lineage)


Lineage = tuple[Applied, ...]
"""All steps a copy has gone through: two copies of a state have the same bytes if their lineages are equal."""


def told(lineage: Iterable[Applied]) -> str:
    """Return a lineage in words."""
    return " ".join(map(str, lineage)) or "initial"


@dataclass
class Disk:
    """The folder that all nodes write to, but for those that write somewhere else by mistake.

    Attributes:
        files: What is in them, by folder and name.
        manifests: Of the folders that are checkpoints.
    """

    files: dict[tuple[str, str], Lineage] = field(default_factory=dict[tuple[str, str], Lineage])
    manifests: dict[str, Manifest] = field(default_factory=dict[str, Manifest])

    def write(self, path: str, state: str, lineage: Lineage, *, is_elsewhere: bool = False) -> SavedState:
        """Write a copy to a file named after its contents; return what its writer says of it."""
        digest = told(lineage)
        saved = SavedState(file=f"{state}.{digest}", num_bytes=len(digest), sha256=digest)
        if not is_elsewhere:
            self.files[path, saved.file] = lineage
        return saved

    def lacking(self, path: str, manifest: Manifest) -> str | None:
        """Return a file that is not there."""
        return next((saved.file for saved in manifest.files if (path, saved.file) not in self.files), None)

    def seal(self, path: str, manifest: Manifest) -> None:
        """Make a folder a checkpoint, without the files that it does not name."""
        self.manifests[path] = manifest
        named = {saved.file for saved in manifest.files}
        self.files = {(at, file): kept for (at, file), kept in self.files.items() if at != path or file in named}

    def load(self, path: str, state: str) -> Lineage:
        """Return a state of a checkpoint."""
        if path not in self.manifests:
            raise Violation(f"{state} is to be loaded from {path}, which is no checkpoint")
        (saved,) = self.manifests[path].states[state]
        return self.files[path, saved.file]

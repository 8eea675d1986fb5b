"""Sets how all pictures look, and opens the figures they are drawn in; imports matplotlib, which is slow, only then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.common.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GREY, RED, GREEN, BLUE = "#1f2933", "#9aa5b1", "#c92a2a", "#2b8a3e", "#1c5fa8"
PALE_BLUE, PALE_GREY = "#a9c9ee", "#e4e7eb"

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.edgecolor": "none",
    "legend.framealpha": 0.9,
}


@contextmanager
def panels(path: Path | str, inches: Sequence[float]) -> Iterator[list[Axes]]:
    """Give the axes to draw a picture on, and write it when the block ends.

    Args:
        path: The PNG file.
        inches: Height of each panel, from top to bottom.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    require("matplotlib", "a figure")
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context(_STYLE):
        layout = ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12)
        figure = Figure(figsize=(10.5, sum(inches)), dpi=150, layout=layout, facecolor="white")
        FigureCanvasAgg(figure)
        yield list(figure.subplots(len(inches), 1, height_ratios=inches, squeeze=False)[:, 0])
        figure.savefig(path, format="png")


def legend_above(axes: Axes, colours: Mapping[str, Any]) -> None:
    """Say in one line above the axes what colours stand for; a title needs a ``pad`` of 26 to be above that.

    Args:
        axes: They.
        colours: By what each stands for.
    """
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color=colour, label=meaning) for meaning, colour in colours.items()],
        loc="lower left",
        bbox_to_anchor=(-0.01, 0.99),
        borderaxespad=0.2,
        ncols=len(colours),
        handlelength=1,
        handleheight=1,
        columnspacing=1.2,
        fontsize=8.5,
    )

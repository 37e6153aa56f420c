"""Drawing with matplotlib without a display, and the one message where it is not installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES = (6.0, 4.0)
_DPI = 120


def require_matplotlib() -> None:
    """Raise `SettingError` where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SettingError(
            "Pictures need matplotlib, which is not installed: pip install 'finemoe[report]', "
            "or leave --output out. The text needs nothing."
        ) from None


def draw(path: Path, title: str, x: str, y: str, paint: Callable[[Axes], None]) -> Path:
    """Write the PNG `path` of one picture that `paint` fills; the same content gives the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    paint(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    figure.savefig(path, format="png", metadata={"Software": None})
    return path

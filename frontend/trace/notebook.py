"""What notebooks show: pages in frames of their own, whose styles reach nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from .radix_outline import outline_of

_HEIGHT_PX = 480


def framed(page: str, height_px: int = _HEIGHT_PX) -> str:
    """A whole HTML page within another one; its scripts see nothing of that."""
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" loading="lazy" '
        f'style="width:100%;height:{height_px}px;border:0"></iframe>'
    )


class RadixTree(dict[str, Any]):
    """`backend.tree()`: the radix tree as plain data, see `stemma.radix.render`; notebooks show it
    as nested lists, the biggest subtrees first."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        super().__init__(tree)

    def _repr_html_(self) -> str:
        return outline_of(self).replace("<details>", "<details open>", 1)

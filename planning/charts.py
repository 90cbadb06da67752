"""Charts as SVG, and pages of them as one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import floor, isfinite, log10

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 40, 48
_COLORS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a", "#bf3989", "#0a7ea4")
_BAR = 22
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;margin:1rem 0}"
    "td,th{padding:.25rem .75rem;border:1px solid #ccc;text-align:left}"
    "svg{max-width:100%;height:auto}pre{overflow:auto;background:#f6f8fa;padding:1rem}"
)

Series = Mapping[str, Sequence[tuple[float, float]]]
"""Points by the name of their line, by rising x."""


def line_chart(
    title: str,
    x_name: str,
    y_name: str,
    series: Series,
    *,
    limit: float | None = None,
    is_log_x: bool = False,
) -> str:
    """Lines through points, and a dashed one at `limit`; y begins at 0, at x by the logarithm where
    `is_log_x`. Points that are not finite are left out."""
    kept = {
        name: [(x, y) for x, y in points if isfinite(x) and isfinite(y)]
        for name, points in series.items()
    }
    every = [point for points in kept.values() for point in points]
    if not every:
        return ""

    def scale(x: float) -> float:
        return log10(max(x, 1e-9)) if is_log_x else x

    low, high = min(scale(x) for x, _ in every), max(scale(x) for x, _ in every)
    top = max([y for _, y in every] + ([limit] if limit is not None else [])) * 1.05 or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        share = (scale(x) - low) / (high - low) if high > low else 0.5
        inner_x, inner_y = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + share * inner_x, _HEIGHT - _BOTTOM - y / top * inner_y

    parts = [_axis_y(top, place, low if not is_log_x else 10**low)]
    xs = sorted({x for x, _ in every})
    for x in xs if len(xs) <= 8 else _ticks(high, low):
        at, _ = place(x, 0)
        parts.append(_text(at, _HEIGHT - _BOTTOM + 16, _short(x), "middle"))
    if limit is not None:
        _, at = place(xs[0], limit)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" '
            'stroke="#57606a" stroke-dasharray="6 4"/>'
        )
    for number, (name, points) in enumerate(kept.items()):
        color = _COLORS[number % len(_COLORS)]
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for x, y in points:
            at_x, at_y = place(x, y)
            note = f"<title>{escape(name)}: {_short(x)}, {_short(y)}</title>"
            parts.append(
                f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="3" fill="{color}">{note}</circle>'
            )
    parts += _legend(list(kept))
    parts.append(_text((_LEFT + _WIDTH) / 2, _HEIGHT - 12, x_name, "middle"))
    parts.append(_text(8, _TOP - 8, y_name, "start"))
    return _svg(title, _HEIGHT + 18 * ((len(kept) + 2) // 3), parts)


def bar_chart(title: str, bars: Sequence[tuple[str, float]]) -> str:
    """A bar for each value, not below 0, with its name and number."""
    most = max((value for _, value in bars), default=0.0) or 1.0
    parts, left = [], 280
    for number, (name, value) in enumerate(bars):
        y = _TOP + number * _BAR
        width = value / most * (_WIDTH - left - 72)
        parts.append(_text(left - 8, y + 14, name, "end"))
        size = f'width="{width:.1f}" height="{_BAR - 6}"'
        parts.append(f'<rect x="{left}" y="{y}" {size} fill="{_COLORS[0]}"/>')
        parts.append(_text(left + width + 6, y + 14, _short(value), "start"))
    return _svg(title, _TOP + _BAR * len(bars) + 8, parts)


def page(title: str, parts: Sequence[str]) -> str:
    """Charts, tables and paragraphs, which are HTML already, as one file."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1>{''.join(parts)}</body></html>\n"
    )


def table(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows with the same keys, as HTML."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row.values()) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui,sans-serif" font-size="12">'
        f'<rect width="{_WIDTH}" height="{height:g}" fill="#fff"/>'
        f"{_text(8, 16, title, 'start', weight='bold')}{''.join(parts)}</svg>\n"
    )


def _axis_y(top: float, place: Callable[[float, float], tuple[float, float]], x: float) -> str:
    parts = []
    for value in _ticks(top, 0.0):
        _, at = place(x, value)
        ends = f'x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"'
        parts.append(f'<line {ends} stroke="#d8dee4"/>')
        parts.append(_text(_LEFT - 6, at + 4, _short(value), "end"))
    return "".join(parts)


def _ticks(top: float, low: float) -> list[float]:
    """Some four round numbers."""
    step = 10 ** floor(log10(max(top - low, 1e-12) / 2))
    step *= 2.5 if (top - low) / step > 10 else 1
    step *= 2 if (top - low) / step > 6 else 1
    first = -(-low // step) * step
    return [first + number * step for number in range(int((top - first) / step) + 1)]


def _legend(names: Sequence[str]) -> list[str]:
    parts = []
    for number, name in enumerate(names):
        x, y = _LEFT + number % 3 * 190, _HEIGHT + 4 + number // 3 * 18
        color = _COLORS[number % len(_COLORS)]
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
        parts.append(_text(x + 14, y, name, "start"))
    return parts


def _text(x: float, y: float, text: str, anchor: str, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="#1f2328">{escape(text)}</text>'
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

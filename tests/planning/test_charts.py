"""Charts are well-formed, and show what they are given."""

from __future__ import annotations

from math import nan
from xml.etree import ElementTree

import pytest

from stemma.planning.charts import bar_chart, line_chart, page, table

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("is_log_x", [False, True])
def test_a_line_goes_through_its_points(is_log_x: bool) -> None:
    lines = {"a & b": [(8.0, 1.0), (64.0, 2.0), (512.0, nan)], "c": [(8.0, 0.5), (64.0, 0.0)]}
    chart = ElementTree.fromstring(
        line_chart("t < u", "x", "y", lines, limit=1.5, is_log_x=is_log_x)
    )
    first, second = (each.get("points", "").split() for each in chart.iter(f"{SVG}polyline"))
    assert len(first) == len(second) == 2, "what is not finite is left out"
    heights = [float(point.split(",")[1]) for point in first]
    assert heights[1] < heights[0], "more is higher"
    texts = [each.text for each in chart.iter(f"{SVG}text")]
    assert {"t < u", "a & b", "c", "x", "y", "8", "64"} <= set(texts)


def test_bars_are_as_long_as_their_values() -> None:
    chart = ElementTree.fromstring(bar_chart("t", [("a", 2.0), ("b", 1.0), ("none", 0.0)]))
    _, *bars = chart.iter(f"{SVG}rect")
    widths = [float(bar.get("width", "nan")) for bar in bars]
    assert widths[0] == pytest.approx(2 * widths[1]) and widths[2] == 0.0


def test_nothing_to_draw_is_no_chart() -> None:
    assert line_chart("t", "x", "y", {"a": []}) == ""
    assert table([]) == ""


def test_a_page_has_all_its_parts_and_their_texts_are_no_markup() -> None:
    found = page("<t>", [table([{"a": "<b>", "c": 1}])])
    assert "<b>" not in found and "&lt;b&gt;" in found and "<title>&lt;t&gt;" in found

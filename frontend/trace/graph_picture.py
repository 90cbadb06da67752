"""A captured graph as an SVG: a column per branch, a box per op, time downwards.

An op is placed one row below everything it needs, so that concurrent ops are side by side.
Everything is in one file; colours follow the reader's light or dark scheme.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from ..protocol import ir
from .labels import label_of, short_source
from .op_graph import Branch, Edge, OpGraph, OpKey

BOX_WIDTH, BOX_HEIGHT = 210, 40
COLUMN, ROW = 250, 62  # from one box to the next
MARGIN, HEAD = 20, 56  # around the picture; above the first row
CHARS_A_LINE = 29

_HIDDEN = (ir.RoleBegin, ir.RoleEnd, ir.End)
_STYLE = """
svg{--paper:#fff;--ink:#1b1f24;--soft:#5d6673;--line:#8b949e;--text:#f3f5f7;--call:#dff3ea;
--flow:#e4ecfa;--wait:#fdeccc;--var:#0072b2;background:var(--paper);
font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
@media (prefers-color-scheme:dark){svg{--paper:#14171b;--ink:#e8eaed;--soft:#a3acb8;--line:#6b7480;
--text:#22272e;--call:#123c2c;--flow:#1d2f4d;--wait:#4a3610;--var:#6cb6ff}}
text{fill:var(--ink)}.soft{fill:var(--soft);font-size:11px}.kind{font-weight:600}
.title{font-size:15px;font-weight:600}
rect{fill:var(--text);stroke:var(--line)}.gen rect,.select rect{fill:var(--call)}
.fork rect,.join rect,.var rect{fill:var(--flow)}.wait rect,.pause rect{fill:var(--wait)}
.wait rect,.pause rect{stroke-dasharray:4 3}
path{fill:none;stroke:var(--line);stroke-width:1.5}path.var{stroke:var(--var);stroke-dasharray:5 3}
.arrow{fill:var(--line);stroke:none}.lane{stroke:var(--line);stroke-dasharray:1 5;opacity:.6}
"""


def svg_of(graphs: Sequence[OpGraph]) -> str:
    """One standalone SVG file; several graphs are stacked vertically."""
    panels = [_Panel(graph) for graph in graphs]
    width = max((panel.width for panel in panels), default=MARGIN)
    height = sum(panel.height for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{escape(_title(graphs))}">',
        f"<style>{_STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path class="arrow" d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    top = 0
    for panel in panels:
        parts += [f'<g transform="translate(0 {top})">', *panel.parts(), "</g>"]
        top += panel.height
    return "\n".join([*parts, "</svg>"])


def page_of(graphs: Sequence[OpGraph]) -> str:
    """The picture on an HTML page of its own, which scrolls where it is too wide."""
    title = escape(_title(graphs))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{title}</title><style>:root{{color-scheme:light dark}}"
        "body{margin:0;overflow:auto;background:#fff}"
        "@media (prefers-color-scheme:dark){body{background:#14171b}}</style></head><body>\n"
        f"{svg_of(graphs)}\n</body></html>\n"
    )


def _title(graphs: Sequence[OpGraph]) -> str:
    return "captured: " + ", ".join(graph.name for graph in graphs)


@dataclass(frozen=True, slots=True)
class _Box:
    """An op's place; `column` and `row` count from 0."""

    op: ir.Op
    column: int
    row: int
    role: str

    @property
    def x(self) -> int:
        return MARGIN + self.column * COLUMN

    @property
    def y(self) -> int:
        return HEAD + self.row * ROW

    @property
    def middle(self) -> int:
        return self.x + BOX_WIDTH // 2


class _Panel:
    """The picture of one graph, at the origin."""

    def __init__(self, graph: OpGraph) -> None:
        self._graph = graph
        self._branches = graph.branches
        self._columns = {b.number: column for column, b in enumerate(self._branches)}
        self._boxes = _placed(graph, self._columns)
        self._shown = [b for b in self._boxes.values() if not isinstance(b.op, _HIDDEN)]
        self._num_rows = 1 + max((box.row for box in self._shown), default=0)
        has_wait = graph.wait is not None
        self.width = 2 * MARGIN + (len(self._branches) - 1) * COLUMN + BOX_WIDTH
        self.height = HEAD + (self._num_rows + has_wait) * ROW + MARGIN

    def parts(self) -> Iterator[str]:
        """SVG elements, the lowest layer first."""
        yield _text(MARGIN, 20, self._graph.name, "title")
        for branch in self._branches:
            yield from self._lane(branch)
        for edge in self._graph.edges:
            yield from self._edge(edge)
        for box in self._shown:
            yield from self._box(box)
        if self._graph.wait is not None:
            yield from self._wait()

    def _lane(self, branch: Branch) -> Iterator[str]:
        x = MARGIN + self._columns[branch.number] * COLUMN
        shown = [b for b in self._shown if b.op.branch == branch.number]
        yield _text(x, HEAD - 14, branch.path, "soft")
        for above, below in pairwise(shown):
            if below.row == above.row + 1 or not isinstance(below.op, ir.Join):
                yield _arrow(f"M{above.middle} {above.y + BOX_HEIGHT}L{below.middle} {below.y - 1}")
            else:
                line = f"M{above.middle} {above.y + BOX_HEIGHT}L{below.middle} {below.y - 1}"
                yield f'<path class="lane" d="{line}"/>'

    def _edge(self, edge: Edge) -> Iterator[str]:
        origin, target = self._ends(edge)
        if origin is None or target is None:
            return
        if edge.kind == "fork":
            x, y = origin.x + BOX_WIDTH, origin.y + BOX_HEIGHT // 2
            end = f"{target.middle} {target.y - 1}"
            yield _arrow(f"M{x} {y}H{target.middle - 12}Q{target.middle} {y} {end}")
        elif edge.kind == "join":
            x, y = target.x + BOX_WIDTH + 1, target.y + BOX_HEIGHT // 2
            start = f"{origin.middle} {origin.y + BOX_HEIGHT}"
            yield _arrow(f"M{start}V{y - 12}Q{origin.middle} {y} {origin.middle - 12} {y}H{x}")
        else:
            start = f"{origin.x} {origin.y + BOX_HEIGHT - 8}"
            end = f"{target.x} {target.y + 8}"
            left = min(origin.x, target.x) - 16
            curve = f"M{start}C{left} {origin.y + BOX_HEIGHT - 8} {left} {target.y + 8} {end}"
            yield _arrow(curve, "var", f"{', '.join(edge.names)} is appended")

    def _ends(self, edge: Edge) -> tuple[_Box | None, _Box | None]:
        """The boxes that an edge connects: hidden ops are replaced by their neighbours."""
        if edge.kind == "var":
            return self._boxes.get(edge.origin), self._boxes.get(edge.target)
        if edge.kind == "fork":
            inside = [b for b in self._shown if b.op.branch == edge.target[0]]
            return self._boxes.get(edge.origin), inside[0] if inside else None
        inside = [b for b in self._shown if b.op.branch == edge.origin[0]]
        return inside[-1] if inside else None, self._boxes.get(edge.target)

    def _box(self, box: _Box) -> Iterator[str]:
        kind, details = label_of(box.op, CHARS_A_LINE - 2)
        words = details.split(" ") if isinstance(box.op, ir.Gen | ir.Select) else []
        name = words[0] if words else ""
        rest = details[len(name) :].strip() or box.role
        if isinstance(box.op, ir.Text):
            kind = box.role or kind
        if isinstance(box.op, ir.Var):
            origin = (box.op.of_branch, box.op.of_seq)
            rest = f"{self._graph.name_of(origin)} of {_path(self._graph, origin)}"
        if isinstance(box.op, ir.Join):
            names = dict.fromkeys(name for edge in self._into(box) for name in edge.names)
            rest = " ".join(filter(None, [details, ", ".join(f"{name}[]" for name in names)]))
        source = short_source(box.op.source)
        full = " ".join(label_of(box.op, 2000)).strip()
        head = f"{kind} {name}".strip()
        yield f'<g class="{escape(box.op.kind)}"><title>{escape(f"{full} ({source})")}</title>'
        yield _rect(box.x, box.y)
        yield _text(box.x + 8, box.y + 16, _cut(head, CHARS_A_LINE - len(source) - 1), "kind")
        yield _text(box.x + BOX_WIDTH - 8, box.y + 16, source, "soft", anchor="end")
        yield _text(box.x + 8, box.y + 32, _cut(rest, CHARS_A_LINE), "soft") + "</g>"

    def _into(self, box: _Box) -> list[Edge]:
        key = (box.op.branch, box.op.seq)
        return [e for e in self._graph.edges if e.target == key and e.kind == "join"]

    def _wait(self) -> Iterator[str]:
        wait = self._graph.wait
        assert wait is not None
        x = MARGIN + self._columns[wait.branch] * COLUMN
        y = HEAD + self._num_rows * ROW
        inside = [b for b in self._shown if b.op.branch == wait.branch]
        if inside:
            last = inside[-1]
            yield _arrow(f"M{last.middle} {last.y + BOX_HEIGHT}L{x + BOX_WIDTH // 2} {y - 1}")
        yield '<g class="wait">' + _rect(x, y)
        yield _text(x + 8, y + 16, "first wait", "kind")
        yield _text(x + BOX_WIDTH - 8, y + 16, short_source(wait.source), "soft", anchor="end")
        yield _text(x + 8, y + 32, _cut(wait.reading, CHARS_A_LINE), "soft") + "</g>"


def _placed(graph: OpGraph, columns: dict[int, int]) -> dict[OpKey, _Box]:
    """Every op's box; a hidden op takes the row of the op above it."""
    needs: dict[OpKey, list[OpKey]] = {}
    for edge in graph.edges:
        needs.setdefault(edge.target, []).append(edge.origin)
    boxes: dict[OpKey, _Box] = {}
    roles: dict[int, str] = {}
    for op in graph.ops:
        key = (op.branch, op.seq)
        above = [boxes[n].row for n in needs.get(key, ()) if n in boxes]
        before = boxes.get((op.branch, op.seq - 1))
        above += [before.row] if before else []
        row = max(above, default=-1) + (not isinstance(op, _HIDDEN))
        if isinstance(op, ir.RoleBegin):
            roles[op.branch] = op.role
        boxes[key] = _Box(op, columns.get(op.branch, 0), row, roles.get(op.branch, ""))
        if isinstance(op, ir.RoleEnd):
            roles.pop(op.branch, None)
    return boxes


def _path(graph: OpGraph, key: OpKey) -> str:
    return graph.branch(key[0]).path


def _cut(text: str, num_chars: int) -> str:
    return text if len(text) <= num_chars else text[: max(num_chars - 1, 0)] + "…"


def _rect(x: int, y: int) -> str:
    return f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'


def _arrow(path: str, kind: str = "", title: str = "") -> str:
    named = f"<title>{escape(title)}</title>" if title else ""
    shape = f'<path class="{kind}" d="{path}" marker-end="url(#tip)"'
    return f"{shape}>{named}</path>" if named else f"{shape}/>"


def _text(x: int, y: int, text: str, kind: str, anchor: str = "start") -> str:
    at = f'x="{x}" y="{y}" class="{kind}"'
    anchored = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f"<text {at}{anchored}>{escape(text)}</text>"

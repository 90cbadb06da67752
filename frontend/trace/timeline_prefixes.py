"""The timeline's side panel: the calls as a tree of the prefixes that they share."""

from __future__ import annotations

from html import escape

from .labels import count
from .radix_outline import outline_of
from .records import CallRecord, ProgramRecord
from .run_record import RunRecord


def prefixes_of(run: RunRecord) -> str:
    """A bar's length is its call's number of tokens; the runtime's own tree is folded below."""
    largest = max((_num_tokens(call) for call in run.calls), default=0) or 1
    first = first_indices(run)
    trees = []
    for index, program in enumerate(run.programs):
        if len(run.programs) > 1:
            trees.append(f"<h3>#{index} {escape(program.name)}</h3>")
        trees.append(_prefix_tree(program, first[index], largest))
    key = "".join(f'<li><i class="{name}"></i>{text}</li>' for name, text in _TOKENS.items())
    radix = "" if run.tree is None else outline_of(run.tree)
    return (
        '<section aria-label="prefixes"><h2>What each call reused</h2>'
        f'<div class="tree">{"".join(trees)}</div><ul class="key">{key}</ul>{radix}</section>'
    )


_TOKENS = {
    "cached": "cached",
    "host": "from host",
    "disk": "from disk",
    "computed": "computed",
    "made": "generated",
}


def _prefix_tree(program: ProgramRecord, first: int, largest: int) -> str:
    """Calls below the call that they continue; a chain without branching is not indented."""
    following: dict[int | None, list[int]] = {}
    for index, call in enumerate(program.calls):
        following.setdefault(call.follows, []).append(index)
    parts: list[str] = []
    todo: list[int | str] = ["</ul>", *reversed(following.get(None, [])), "<ul>"]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            parts.append(item)
            continue
        parts.append(f"<li>{_node(program.calls[item], first + item, largest)}</li>")
        below = following.get(item, [])
        if len(below) == 1:
            todo.append(below[0])
        elif below:
            todo += ["</ul></li>", *reversed(below), "<li><ul>"]
    return "".join(parts)


def _node(call: CallRecord, number: int, largest: int) -> str:
    prompt, cached = call.prompt_tokens or 0, call.cached_tokens or 0
    host, disk = call.host_tokens or 0, call.disk_tokens or 0
    tokens = {
        "cached": max(0, cached - host - disk),
        "host": host,
        "disk": disk,
        "computed": max(0, prompt - cached),
        "made": call.generated_tokens or 0,
    }
    whole = _num_tokens(call) or 1
    bar = "".join(
        f'<i class="{name}" style="width:{percent_of(num, whole)}"></i>'
        for name, num in tokens.items()
        if num
    )
    share = f"{count(call.cached_tokens)} of {count(call.prompt_tokens)}"
    name, path = escape(call.name or call.kind), escape(call.path)
    return (
        f'<a class="node" href="#c{number}" aria-label="{name} on {path}: {share} cached">{name} '
        f"<code>{path}</code><small>{share}</small>"
        f'<em style="width:{percent_of(whole, largest)}">{bar}</em></a>'
    )


def _num_tokens(call: CallRecord) -> int:
    return (call.prompt_tokens or 0) + (call.generated_tokens or 0)


def first_indices(run: RunRecord) -> list[int]:
    """The number of each program's first call among all calls."""
    firsts, total = [], 0
    for program in run.programs:
        firsts.append(total)
        total += len(program.calls)
    return firsts


def percent_of(value: float, whole: float) -> str:
    """As a CSS length, at most 100%."""
    return f"{min(100.0, 100.0 * value / whole):.4g}%"

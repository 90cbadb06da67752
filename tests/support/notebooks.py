"""Runs a notebook's cells as a notebook does, and keeps what each would show."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any


def shown_by(path: Path) -> list[Any]:
    """The value of each code cell's last expression, None where that is no expression."""
    notebook = json.loads(path.read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert not cell["outputs"] and cell["execution_count"] is None, "kept without outputs"
        body = ast.parse("".join(cell["source"]), str(path)).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), str(path), "exec"), names)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), str(path), "eval"), names)
        shown.append(value)
    return shown

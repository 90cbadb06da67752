"""Where a checkpoint keeps its chat templates, of which there may be several with names.

`chat_template.jinja` and `additional_chat_templates/NAME.jinja` win over tokenizer_config.json, as
in transformers; chat_template.json, which processors have, comes last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import InvalidRequest, ModelLoadError

DEFAULT, TOOL_USE = "default", "tool_use"
MAX_TEMPLATE_CHARS = 1024 * 1024


def find_templates(
    folder: Path, config: Mapping[str, Any], chosen: str | None = None
) -> dict[str, str]:
    """A folder's templates by name, the one to use without tools as "default" and another one with
    tools, where there is one, as "tool_use"; empty where there are none. `chosen`: a name, or a
    file, of the one for everything.

    Raises ModelLoadError for a file that is no text, InvalidRequest for `chosen`.
    """
    found = _in_files(folder) or _in_value(config.get("chat_template"))
    found = found or _in_value(_processors(folder / "chat_template.json"))
    if chosen is not None:
        return {DEFAULT: _chosen(found, chosen)}
    if found and DEFAULT not in found:
        found[DEFAULT] = next(iter(found.values()))
    return {name: found[name] for name in (DEFAULT, TOOL_USE) if name in found}


def _chosen(found: Mapping[str, str], chosen: str) -> str:
    if chosen in found:
        return found[chosen]
    if Path(chosen).is_file():
        return _text(Path(chosen))
    allowed = f"a file, or one of the checkpoint's templates: {sorted(found)}"
    raise InvalidRequest.of("chat_template", chosen, allowed)


def _in_files(folder: Path) -> dict[str, str]:
    files = {DEFAULT: folder / "chat_template.jinja"}
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        files[path.stem] = path
    return {name: _text(path) for name, path in files.items() if path.is_file()}


def _in_value(value: object) -> dict[str, str]:
    """Of a template, or a list of named ones, as configurations have them."""
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = {entry.get("name"): entry.get("template") for entry in entries}
    if not isinstance(value, dict):
        return {}
    return {n: t for n, t in value.items() if isinstance(n, str) and isinstance(t, str)}


def _processors(path: Path) -> object:
    if not path.is_file():
        return None
    try:
        whole = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not JSON: {error}") from error
    return whole.get("chat_template") if isinstance(whole, dict) else None


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: not UTF-8: {error}") from error
    if len(text) > MAX_TEMPLATE_CHARS:
        raise ModelLoadError(f"{path}: more than {MAX_TEMPLATE_CHARS} characters")
    return text

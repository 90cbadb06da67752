"""Test suites of JSON Schema on disk: schemas with instances that are valid, and that are not.

Two layouts. The official JSON-Schema-Test-Suite: a folder of `*.json`, each a list of groups
{"description", "schema", "tests": [{"description", "data", "valid"}]}, in a folder named for the
draft. MaskBench: a group a file, or lines of {"id", "schema", "tests": [{"data", "valid"}]}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...constrained.schema.bundling import bundled
from ...errors import InvalidGrammar, InvalidRequest

DIALECTS = {
    "draft3": "http://json-schema.org/draft-03/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
OPTIONAL = ("optional", "optional/format")
REMOTES = "http://localhost:1234/"  # where the suite's schemas expect the files of its remotes/


@dataclass(frozen=True, slots=True)
class SchemaCase:
    """A schema, which names its dialect, with instances to accept and to refuse."""

    id: str
    schema: Any
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]
    asserts_format: bool = True


def read_suite(root: Path, draft: str | None, *, has_optional: bool) -> list[SchemaCase]:
    """The groups of a draft, from `root` or `root/tests/DRAFT`, each schema bundled with what it
    refers to of the suite's remotes. Raises InvalidRequest."""
    folder, name = _draft_folder(root, draft)
    remotes = _remotes(root, folder)
    folders = [folder, *(folder / part for part in OPTIONAL if has_optional)]
    cases = [
        _with_remotes(
            _case(_title(path.relative_to(folder), group), group, name, _asserts_format(one, name)),
            remotes,
        )
        for one in folders
        for path in sorted(one.glob("*.json"))
        for group in _groups(json.loads(path.read_text("utf-8")))
    ]
    if not cases:
        raise InvalidRequest.of("--suite", str(root), "a folder that holds *.json or tests/DRAFT")
    return cases


def read_cases(path: Path, draft: str | None) -> list[SchemaCase]:
    """The cases of a file's lines. Raises InvalidRequest."""
    if not path.is_file():
        raise InvalidRequest.of("--cases", str(path), "a file of JSON lines")
    lines = (json.loads(line) for line in path.open("rb") if line.strip())
    return [_case(str(line["id"]), line, draft) for line in lines]


def _remotes(root: Path, folder: Path) -> dict[str, Any]:
    """The suite's remotes by URI; {} where there are none beside the drafts."""
    for place in (root, folder.parent, folder.parent.parent):
        if (place / "remotes").is_dir():
            remotes = place / "remotes"
            return {
                REMOTES + path.relative_to(remotes).as_posix(): json.loads(path.read_text("utf-8"))
                for path in remotes.rglob("*.json")
            }
    return {}


def _with_remotes(case: SchemaCase, remotes: dict[str, Any]) -> SchemaCase:
    try:
        return replace(case, schema=bundled(case.schema, remotes))
    except InvalidGrammar:  # an unknown dialect, which its compilation reports
        return case


def _groups(contents: Any) -> list[dict[str, Any]]:
    """The file's groups; MaskBench has one group per file, without a list."""
    return [contents] if isinstance(contents, dict) else contents


def _title(path: Path, group: dict[str, Any]) -> str:
    return f"{path.with_suffix('')}: {group.get('description', '')}".rstrip(": ")


def _asserts_format(folder: Path, draft: str | None) -> bool:
    """By the draft: from 2019-09 on a format is a mere annotation unless requested, which the suite
    does in optional/format/."""
    return draft not in ("draft2019-09", "draft2020-12") or folder.name == "format"


def _draft_folder(root: Path, draft: str | None) -> tuple[Path, str | None]:
    """The folder with the draft's files, and the draft; None: each schema's own."""
    if draft is not None and draft not in DIALECTS:
        raise InvalidRequest.of("--draft", draft, f"one of {', '.join(DIALECTS)}")
    for folder in (root / "tests", root):
        if draft is not None and (folder / draft).is_dir():
            return folder / draft, draft
    name = draft or root.resolve().name
    if name in DIALECTS:
        return root, name
    if any(root.glob("*.json")):
        return root, None
    known = ", ".join(path.name for path in _drafts_below(root)) or ", ".join(DIALECTS)
    raise InvalidRequest.of("--draft", draft, f"a folder named for a draft, or one of {known}")


def _drafts_below(root: Path) -> Iterator[Path]:
    for folder in (root / "tests", root):
        yield from (folder / name for name in DIALECTS if (folder / name).is_dir())


def _case(
    name: str, group: dict[str, Any], draft: str | None, asserts_format: bool = True
) -> SchemaCase:
    schema, tests = group["schema"], group["tests"]
    if draft is not None and isinstance(schema, dict) and "$schema" not in schema:
        schema = {"$schema": DIALECTS[draft], **schema}
    return SchemaCase(
        name,
        schema,
        tuple(test["data"] for test in tests if test["valid"]),
        tuple(test["data"] for test in tests if not test["valid"]),
        asserts_format,
    )

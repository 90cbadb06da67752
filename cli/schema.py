"""`stemma schema`: checks a JSON Schema as a request would have it; bundles one of several files.

Exit status 1 where the schema is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin

from ..errors import InvalidRequest
from .connect import Commands

if TYPE_CHECKING:
    from ..constrained.schema_check import SchemaReport
    from ..constrained.vocabulary import Vocabulary

_WITH = "a further schema that this one refers to, or a folder of them (may be repeated)"


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "schema", help="check a JSON Schema, or bundle one of several files"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser(
        "check", help="how it is enforced, what is refused and what to change, an example document"
    )
    _add_files(check)
    how = check.add_mutually_exclusive_group()
    how.add_argument("--strict", action="store_true",
        help="refuse what cannot be enforced (default)")  # fmt: skip
    how.add_argument("--lenient", action="store_true", help="drop what cannot be enforced")
    check.add_argument("--whitespace", choices=("compact", "flexible"), default="compact",
        help="between tokens of JSON (default: %(default)s)")  # fmt: skip
    check.add_argument("--property-order", choices=("schema", "any"), default="schema",
        help="of an object's keys (default: %(default)s)")  # fmt: skip
    check.add_argument("--formats", choices=("enforce", "ignore"), default="enforce",
        help="what `format` does (default: %(default)s)")  # fmt: skip
    tokens = check.add_mutually_exclusive_group()
    tokens.add_argument("--model", metavar="MODEL",
        help="time the binding to this model's vocabulary and the first mask, too")  # fmt: skip
    tokens.add_argument("--vocabulary", type=Path, metavar="FILE",
        help="the same for a tokenizer.json")  # fmt: skip
    check.add_argument("--json", action="store_true", help="print it as data")
    check.set_defaults(run=run_check)
    bundle = actions.add_parser(
        "bundle", help="print it as one document with the schemas that it refers to"
    )
    _add_files(bundle)
    bundle.set_defaults(run=run_bundle)


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the schema; - is standard input")
    parser.add_argument("--with", dest="others", type=Path, action="append", default=[],
        metavar="OTHER", help=_WITH)  # fmt: skip


def run_bundle(args: argparse.Namespace) -> int:
    """Print the bundled schema."""
    print(json.dumps(_bundled(args), indent=2, ensure_ascii=False))
    return 0


def run_check(args: argparse.Namespace) -> int:
    """Print the report."""
    from ..constrained.schema_check import check_schema
    from ..constrained.spec import GrammarSpec

    spec = GrammarSpec(
        "json_schema",
        json.dumps(_bundled(args)),
        whitespace=args.whitespace,
        property_order=args.property_order,
        formats=args.formats,
        is_lenient=args.lenient,
    )
    report = check_schema(spec, _vocabulary(args))
    if args.json:
        print(json.dumps(asdict(report), ensure_ascii=False))
    else:
        print("\n".join(_lines(report)))
    return 1 if report.path is None else 0


def _lines(report: SchemaReport) -> list[str]:
    lines = []
    if report.path is None:
        lines.append("refused")
        for one in report.refusals:
            place = f"{one.pointer} {one.keyword}: " if one.pointer is not None else ""
            lines.append(f"  {place}{one.reason}")
            if one.remedy:
                lines.append(f"    remedy: {one.remedy}")
    else:
        lines.append(f"path      {report.path}: {report.reason}")
        if report.num_states is not None:
            lines.append(f"states    {report.num_states:,} ({report.num_bytes / 1024:,.0f} KiB)")
        lines += [f"watched   {what}" for what in report.watches]
    lines += [f"warning   {warning}" for warning in report.warnings]
    lines += [f"note      {note}" for note in report.notes]
    if report.example is not None:
        validity = {True: "valid by jsonschema", False: "NOT valid by jsonschema",
                    None: "jsonschema is not installed"}  # fmt: skip
        lines += [f"example   ({validity[report.is_example_valid]})", f"  {report.example}"]
    elif report.path is not None:
        lines.append("example   none was found")
    times = ", ".join(f"{part} {1000 * value:,.1f} ms" for part, value in report.seconds.items())
    return [*lines, f"time      {times}"]


def _bundled(args: argparse.Namespace) -> Any:
    from ..constrained.schema.bundling import bundled

    schema = _read(args.file)
    base = schema.get("$id", schema.get("id", "")) if isinstance(schema, dict) else ""
    folder = Path() if args.file == "-" else Path(args.file).parent
    resources: dict[str, Any] = {}
    for path in _files(args.others):
        other = _read(str(path))
        own = other.get("$id", other.get("id")) if isinstance(other, dict) else None
        near = path.resolve()
        if near.is_relative_to(folder.resolve()):
            relative = near.relative_to(folder.resolve()).as_posix()
            resources[urljoin(base if isinstance(base, str) else "", relative)] = other
        if isinstance(own, str):
            resources[own.rstrip("#")] = other
    return bundled(schema, resources) if resources else schema


def _files(paths: list[Path]) -> list[Path]:
    return [
        file
        for path in paths
        for file in (sorted(path.rglob("*.json")) if path.is_dir() else [path])
    ]


def _read(file: str) -> Any:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
        return json.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{file}: {error}; a file of JSON is expected", "file") from error


def _vocabulary(args: argparse.Namespace) -> Vocabulary | None:
    if args.model is None and args.vocabulary is None:
        return None
    from ..constrained.vocabulary import Vocabulary
    from ..runtime.checkpoint.location import locate_model
    from ..runtime.tokenizer.token_bytes import token_bytes
    from ..runtime.tokenizer.tokenizer import Tokenizer

    folder = args.vocabulary.parent if args.model is None else locate_model(args.model)
    described = _read(str(folder / "tokenizer.json"))
    pieces = described["model"]["vocab"]
    ids = [*(pieces.values() if isinstance(pieces, dict) else range(len(pieces)))]
    ids += [token["id"] for token in described.get("added_tokens", ())]
    tokenizer = Tokenizer(folder, max(ids) + 1)
    return Vocabulary(token_bytes(folder, tokenizer), tokenizer.encode_forced, max(ids) + 1)

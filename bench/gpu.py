"""The GPU path on a GPU: kernels checked, then timed against what the device can do, then engines.

    stemma bench gpu                     all sections; planned for ten minutes on an H200
    python bench/gpu.py --only decode    from a checkout, where nothing is installed

Needs torch, triton and numpy; transformers for the comparison. Where zmq, orjson or llguidance are
missing nothing is lost: engines run in this process. docs/measure/gpu.md has the targets.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

DEFAULT_TIME_LIMIT_S = 560.0
_CHECKS = "checks"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench gpu`."""
    add = parser.add_argument
    add("--only", nargs="+", metavar="SECTION",
        help="ceilings (always run), risks, prefill, dependent, checks, decode, step, "
             "tree, extend, peers, small, experts, latent, scans, stall, serving "
             "(default: all)")  # fmt: skip
    add(
        "--phase",
        choices=("first", "kernels", "serving"),
        help="the sections of one of three calls, each under ten minutes; with --only, more",
    )
    add("--skip", nargs="+", default=[], metavar="SECTION", help="all but these")
    add("--device", default="cuda", choices=("cuda", "cpu"),
        help="cpu: the CPU's own kernels, to try the script (default: %(default)s)")  # fmt: skip
    add("--scale", default="full", choices=("full", "cpu", "tiny"),
        help="cpu: less, for kernels of a CPU; tiny: for TRITON_INTERPRET=1, without a GPU "
             "(default: %(default)s)")  # fmt: skip
    add("--time-limit", type=float, default=DEFAULT_TIME_LIMIT_S, metavar="S",
        help="no section begins or goes on after that (default: %(default)s)")  # fmt: skip
    add("--peer-python", default=sys.executable, metavar="PYTHON",
        help="of the environment with transformers (default: this one)")  # fmt: skip
    add("--no-peer", action="store_true", help="no comparison")
    add("--commit", help="write this down where there is no git")
    add("--one-process", action="store_true",
        help="all sections in this process: for profilers and debuggers")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure and report; 1 where anything failed or computed something wrong."""
    from ..errors import InvalidRequest
    from .harness.report import write_file

    names = _chosen(args)
    why_not = _why_no_device(args)
    if why_not is not None:
        raise InvalidRequest.of("device", args.device, why_not)
    rows: list[dict[str, Any]] = []
    sections: list[dict[str, Any]] = []
    details = {"scale": args.scale, "sections": sections}
    if args.commit is not None:
        details["commit"] = args.commit
    with contextlib.closing(_sections(names, rows, args)) as found:
        for name, messages in found:
            started = time.monotonic()
            entry: dict[str, Any] = {"section": name}
            sections.append(entry)
            for message in messages:
                _take(message, name, rows, entry, args)
            entry["seconds"] = time.monotonic() - started
            write_file("gpu", rows, args, is_partial=True, **details)  # for a run that is killed
    path = write_file("gpu", rows, args, **details)
    if args.json:
        print(json.dumps(rows))
    _say(f"{_summary(rows)}; written to {path}")
    return int(any(_is_failure(row) for row in rows))


def _chosen(args: argparse.Namespace) -> list[str]:
    """Sections in their order. Raises InvalidRequest."""
    from ..errors import InvalidRequest
    from .roofline.sections import BASE, PHASES, SECTIONS

    for name in (*(args.only or ()), *args.skip):
        if name not in SECTIONS:
            raise InvalidRequest.of("section", name, f"one of {', '.join(SECTIONS)}")
    asked = {*(args.only or ()), *(PHASES[args.phase] if args.phase else ())}
    wanted = (asked or set(SECTIONS)) - set(args.skip) | {BASE}
    return [name for name in SECTIONS if name in wanted]


def _why_no_device(args: argparse.Namespace) -> str | None:
    import torch

    from ..kernels.triton.availability import is_interpreted

    if args.device == "cpu" or torch.cuda.is_available():
        return None
    if is_interpreted() and args.scale == "tiny":
        return None
    return "cuda needs a GPU; without one, TRITON_INTERPRET=1 with --scale tiny tries the script"


def _sections(
    names: list[str], rows: list[dict[str, Any]], args: argparse.Namespace
) -> Generator[tuple[str, Iterator[dict[str, Any]]]]:
    """Each section's name and messages; `rows` are those so far."""
    from .roofline.section_process import in_processes
    from .roofline.sections import Setting, ceilings_of, measured

    setting = Setting(args.device, args.scale, None if args.no_peer else args.peer_python)
    if not args.one_process:
        yield from in_processes(names, setting, rows, args.time_limit)
        return
    for name in names:
        yield name, measured(name, setting, ceilings_of(rows))


def _take(
    message: dict[str, Any],
    name: str,
    rows: list[dict[str, Any]],
    entry: dict[str, Any],
    args: argparse.Namespace,
) -> None:
    """Add one message of a section to the report."""
    from .roofline.rows import Row, shown

    if "device" in message:
        entry.update(message)
        return
    row = message.get("row")
    if row is None:
        failure = Row(name, error=message["error"], details={"log": message["log"]})
        row = failure.to_json(name, is_interpreted=False)
    rows.append(row)
    if not args.json and (row["section"] != _CHECKS or _is_failure(row)):
        _say(" | ".join(_cell(value) for value in shown(row).values()))


def _is_failure(row: dict[str, Any]) -> bool:
    """An error, or a wrong result; a missed target of speed is not a failure."""
    is_wrong = row["verdict"] == "missed" and not row["is_timed"]
    return row["verdict"] == "error" or is_wrong


def _summary(rows: list[dict[str, Any]]) -> str:
    checked = [row for row in rows if not row["is_timed"] and row["verdict"]]
    held = [row for row in rows if row["is_timed"] and row["verdict"] in ("met", "missed")]
    right = sum(row["verdict"] == "met" for row in checked)
    met = sum(row["verdict"] == "met" for row in held)
    errors = sum(row["verdict"] == "error" for row in rows)
    return (
        f"{right} of {len(checked)} results right, {met} of {len(held)} targets met, "
        f"{errors} errors"
    )


def _cell(value: object) -> str:
    from .harness.report import shown_value

    return shown_value(value)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- from a checkout -----------------------------------------------------------------------------


def main() -> int:
    """Entry point as a script."""
    from ..errors import StemmaError
    from ..flags import Parser
    from .harness.report import add_report_flags

    parser = Parser(
        prog="gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_flags(parser)
    add_report_flags(parser)
    try:
        return run(parser.parse_args())
    except StemmaError as error:
        _say(f"gpu.py: {error}")
        return 2


def _run_as_module() -> None:
    """Run again as a module of the package that this file is in, whatever its folder is called."""
    with tempfile.TemporaryDirectory(prefix="stemma-bench-") as folder:
        (Path(folder) / "stemma").symlink_to(Path(__file__).resolve().parents[1])
        sys.path[0] = folder
        runpy.run_module("stemma.bench.gpu", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    if __package__:
        sys.exit(main())
    _run_as_module()

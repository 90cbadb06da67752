"""Every block of code in README.md and docs/ runs as it stands, or says above it why it does not.

A page's blocks run in order, in one folder, its Python in one namespace. One `stemma serve` on the
embedded model stands for the server that they ask (port 8000) and is the programs' backend.

    python         is executed
    bash, js       is executed; curl fails where the answer is no success
    console        lines that begin with `$ ` are executed, and print the others
    json, toml     is parsed
    text and the like are pictures of something; nothing is asked of them

`<!-- not run: reason -->` on the line above a block is for what installs something, or needs a GPU,
a model of the hub or another server. Commands of `stemma` are parsed in such a block, too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from stemma.cli.parser import MODULES
from stemma.flags import Parser

ROOT = Path(st.__file__).parent
PAGES = {"README.md": ROOT / "README.md"} | {
    path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "docs").rglob("*.md"))
}
RUN = {"python", "bash", "console", "js"}
SHELL = {"bash", "console"}
PARSED = {"json": json.loads, "toml": tomllib.loads}
SHOWN = {"text", "yaml", "ini", "nginx"}
TIMEOUT_S = 120
_BLOCK = re.compile(
    r"^(?:<!-- not run: *(?P<reason>.*?) *-->\n)?```(?P<language>\S*)\n(?P<source>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block; `reason` says why it is not run, None where it is."""

    line: int
    language: str
    source: str
    reason: str | None

    @property
    def commands(self) -> str:
        """What a shell would be given of it."""
        if self.language != "console":
            return self.source
        typed = re.findall(r"^\$ ((?:.*\\\n)*.*)$", self.source, re.MULTILINE)
        return "\n".join(typed) + "\n"

    @property
    def printed(self) -> list[str]:
        """The lines that a console's commands are said to print."""
        rest = re.sub(r"^\$ (?:.*\\\n)*.*\n", "", self.source, flags=re.MULTILINE)
        return rest.splitlines() if self.language == "console" else []


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(text.count("\n", 0, m.start("source")), m["language"], m["source"], m["reason"])
        for m in _BLOCK.finditer(text)
    ]


BLOCKS = {name: blocks(page) for name, page in PAGES.items()}
TO_RUN = {
    name: [block for block in found if block.language in RUN and block.reason is None]
    for name, found in BLOCKS.items()
}


@pytest.mark.parametrize("name", [name for name, found in BLOCKS.items() if found])
def test_each_block_says_what_it_is(name: str) -> None:
    text = PAGES[name].read_text("utf-8")
    assert text.count("\n```") == 2 * len(BLOCKS[name]), "fences begin and end at a line's start"
    assert text.count("<!-- not run:") == sum(b.reason is not None for b in BLOCKS[name])
    for block in BLOCKS[name]:
        where = f"{name}:{block.line}"
        assert block.language in RUN | set(PARSED) | SHOWN, f"{where}: which language?"
        if block.language in PARSED:
            PARSED[block.language](block.source)
        if block.reason is not None:
            assert block.language in RUN, f"{where}: nothing would run it"
            assert len(block.reason.split()) >= 3, f"{where}: why is it not run?"


@pytest.mark.parametrize("name", [name for name, found in TO_RUN.items() if found])
def test_blocks_of_a_page_run(
    name: str, served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("documented")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    environment = _shell_environment(tmp_path)
    lacking: list[str] = []
    with st.Runtime(served.endpoint) as runtime:
        st.set_default_backend(runtime)
        try:
            for block in TO_RUN[name]:
                source = re.sub(r"http://(127\.0\.0\.1|localhost):8000", served.url, block.commands)
                assert ":8000" not in source, "a server is named as http://127.0.0.1:8000"
                if block.language == "python":
                    _run_python(source, PAGES[name], block.line, module)
                elif _lacks(block):
                    lacking.append(_lacks(block))
                else:
                    printed = _run_elsewhere(source, block, tmp_path, environment)
                    missing = [line for line in block.printed if line not in printed]
                    assert not missing, f"{name}:{block.line} prints other lines:\n{printed}"
        finally:
            st.set_default_backend(None)
    if lacking:
        pytest.skip(f"all but the blocks that need {', '.join(lacking)} have run")


def _lacks(block: Block) -> str:
    """A program that the block needs and that is not here."""
    needed = "node" if block.language == "js" else "curl" if "curl" in block.source else "bash"
    return "" if shutil.which(needed) else needed


def _run_python(source: str, page: Path, line: int, module: types.ModuleType) -> None:
    """Errors name the page and its own line."""
    exec(compile("\n" * line + source, str(page), "exec"), vars(module))


def _run_elsewhere(source: str, block: Block, folder: Path, environment: dict[str, str]) -> str:
    program = ["node"] if block.language == "js" else ["bash", "-euo", "pipefail"]
    file = folder / f"block-{block.line}.{'mjs' if block.language == 'js' else 'sh'}"
    file.write_text(source, "utf-8")
    ran = subprocess.run(
        [*program, file], capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder,
        env=environment, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"line {block.line}: {source}{ran.stdout}{ran.stderr}"
    return ran.stdout


def _shell_environment(folder: Path) -> dict[str, str]:
    """With this installation's commands, a curl that tells of errors, and a clone's examples."""
    commands = folder / "bin"
    commands.mkdir()
    for name, line in {
        "stemma": f"{shlex.quote(sys.executable)} -m stemma",
        "python": shlex.quote(sys.executable),
        "curl": f"{shutil.which('curl')} --fail-with-body",
    }.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n', "utf-8")
        (commands / name).chmod(0o755)
    (folder / "examples").symlink_to(ROOT / "examples")
    return {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "COLUMNS": "100"}


def test_every_documented_command_is_one() -> None:
    parser = Parser(prog="stemma", exit_on_error=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for module in dict.fromkeys(MODULES.values()):
        importlib.import_module(f"stemma.cli.{module}").add_parser(commands)
    found = list(_stemma_commands())
    assert len(found) > 20
    for where, words in found:
        try:
            parser.parse_args(words)
        except (SystemExit, argparse.ArgumentError) as error:
            raise AssertionError(f"{where}: stemma {shlex.join(words)}: {error}") from error


def _stemma_commands() -> Iterator[tuple[str, list[str]]]:
    """Each `stemma ...` of a shell's block, with its arguments."""
    for name, found in BLOCKS.items():
        for block in found:
            if block.language in SHELL:
                for line in block.commands.replace("\\\n", " ").splitlines():
                    command = re.match(r"(?:[A-Z_]+=\S+ )*stemma (.*)", line)
                    if command:
                        yield f"{name}:{block.line}", shlex.split(command[1], comments=True)

"""`stemma demo`: agents, an extraction, a chat and a fork/join program on the embedded model."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..frontend.client.backend import Backend
from ..frontend.dsl.state import ProgramState
from ..runtime.checkpoint.location import EMBEDDED_DRAFT, EMBEDDED_MODEL
from ..runtime.config import add_engine_flags, engine_config
from . import demo_programs as programs
from .connect import Commands, start_engine
from .tree import draw


def add_parser(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("demo", help="see it work, on the embedded model, in seconds")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


@dataclass(slots=True)
class Part:
    """One part of the demo: what it printed and what it cost."""

    title: str
    lines: list[str] = field(default_factory=list)
    num_right: int = 0
    num_checked: int = 0
    wall_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that needed no computing."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    def check(self, is_right: bool) -> str:
        """Count an answer; the mark to print before it."""
        self.num_checked += 1
        self.num_right += is_right
        return "ok " if is_right else "BAD"

    def count(self, states: Iterable[ProgramState]) -> None:
        """Add up what the programs' calls cost."""
        for state in states:
            for name in state.generated():
                found = state.get_meta_info(name)
                for meta in found if isinstance(found, list) else [found]:
                    self._add(meta)

    def _add(self, meta: dict[str, Any]) -> None:
        self.prompt_tokens += meta["prompt_tokens"]
        self.cached_tokens += meta["cached_tokens"]
        self.completion_tokens += meta["completion_tokens"]


def run(args: argparse.Namespace) -> int:
    """Run all parts; 1 when an answer of the agent is wrong."""
    _take_draft(args)
    started = time.perf_counter()
    with start_engine(args) as backend:
        start_s = time.perf_counter() - started
        _say(args, f"engine ready after {start_s:.2f} s: {_model_line(backend)}\n")
        parts = []
        for make in (_agent, _extract, _chat, _fork_join, _tools):
            part = make(backend)
            parts.append(part)
            _say(args, _shown(part))
        picture = draw(backend, max_depth=6, max_children=5)
        info = backend.get_server_info()
    total_s = time.perf_counter() - started
    _say(args, f"the radix tree that these programs share\n{picture}\n")
    peak_mb = info["peak_rss_bytes"] / 2**20
    drafts = _drafts(info)
    _say(args, f"drafts: {_drafts_line(drafts)}")
    _say(args, f"total {total_s:.1f} s; engine's peak memory {peak_mb:.0f} MB")
    if args.json:
        rows = [{**asdict(part), "hit_rate": part.hit_rate} for part in parts]
        figures = {"start_s": start_s, "total_s": total_s, "peak_mb": peak_mb, "drafts": drafts}
        print(json.dumps({**figures, "parts": rows}))
    agent = parts[0]
    if agent.num_right < agent.num_checked:
        print(f"the agent was wrong {agent.num_checked - agent.num_right} times", file=sys.stderr)
        return 1
    return 0


def _take_draft(args: argparse.Namespace) -> None:
    """The draft that comes with the embedded model, on a CPU, unless the flags say otherwise."""
    config = engine_config(args)
    is_embedded = str(config.model) in (str(EMBEDDED_MODEL), EMBEDDED_MODEL.name)
    is_open = not config.has_draft_model and config.speculate == "auto"
    is_alone = config.device == "cpu" and config.num_processes == 1
    if is_embedded and is_open and is_alone and config.speculative_num_tokens:
        args.draft_model = str(EMBEDDED_DRAFT)


def _drafts(info: dict[str, Any]) -> dict[str, Any]:
    """What was guessed, by whom, and how often it was right."""
    stats = info["stats"]
    return {
        "sources": info["speculation"].get("sources", {}),
        "tokens_a_step": stats["num_generated_tokens"] / max(1, stats["num_steps"]),
    }


def _drafts_line(drafts: dict[str, Any]) -> str:
    told = [
        f"{counts['accepted_tokens']} of {counts['drafted_tokens']} guesses "
        f"{'of the trained draft' if source == 'model' else 'by ' + source} right"
        for source, counts in sorted(drafts["sources"].items())
    ]
    return ", ".join([*told, f"{drafts['tokens_a_step']:.2f} tokens a step"])


def _agent(backend: Backend) -> Part:
    part = Part("(a) a ReAct agent with a calculator and a lookup tool")
    later = Part("from the second question on")
    started = time.perf_counter()
    for number, (question, expected) in enumerate(programs.QUESTIONS):
        state = programs.agent.run(question, backend=backend)
        part.count([state])
        if number:
            later.count([state])
        is_right = state["answer"] == expected
        part.lines.append(f"{part.check(is_right)} {question}")
        part.lines += [f"      {line}" for line in _steps(state)]
    part.wall_s = time.perf_counter() - started
    part.lines.append(f"hit rate from the second question on: {later.hit_rate:.0%}")
    return part


def _steps(state: ProgramState) -> list[str]:
    """The agent's turn as it was written."""
    text: str = state.messages()[-1]["content"]
    return text.splitlines()


def _extract(backend: Backend) -> Part:
    part = Part("(b) ten texts become JSON")
    started = time.perf_counter()
    rows = [{"kind": k, "fields": f, "text": t} for k, f, t in programs.TEXTS]
    states = programs.extract.run_batch(rows, backend=backend)
    part.wall_s = time.perf_counter() - started
    part.count(states)
    for (_, fields, text), state in zip(programs.TEXTS, states, strict=True):
        mark = part.check(_is_faithful(state["json"], fields, text))
        part.lines.append(f"{mark} {text}\n      {state['json']}")
    return part


def _is_faithful(output: str, fields: str, text: str) -> bool:
    """Whether it is JSON with these keys, each value copied from the text."""
    try:
        found = json.loads(output, parse_int=str, parse_float=str)
    except ValueError:
        return False
    if not isinstance(found, dict) or list(found) != fields.split(", "):
        return False
    return all(str(value) in text for value in found.values())


def _chat(backend: Backend) -> Part:
    part = Part("(c) a chat of five turns recalls facts")
    started = time.perf_counter()
    messages = tuple(message for message, _ in programs.CHAT)
    state = programs.chat.run(messages, backend=backend)
    part.wall_s = time.perf_counter() - started
    part.count([state])
    for number, (message, fact) in enumerate(programs.CHAT):
        reply = state[f"reply{number}"]
        part.lines.append(f"{part.check(fact in reply)} {message}\n      {reply}")
    return part


def _fork_join(backend: Backend) -> Part:
    part = Part("(d) three extractions of one text, in parallel branches, joined")
    started = time.perf_counter()
    state = programs.fork_join.run(programs.FORK_TEXT, programs.FORK_FIELDS, backend=backend)
    part.wall_s = time.perf_counter() - started
    part.count([state])
    part.lines.append(f"    {programs.FORK_TEXT}\n      {state['whole']}")
    for fields, value in zip(programs.FORK_FIELDS, state["part"], strict=True):
        mark = part.check(_is_faithful(value, fields, programs.FORK_TEXT))
        part.lines.append(f"{mark} {fields}\n      {value}")
    return part


def _tools(backend: Backend) -> Part:
    part = Part("(e) the model calls Python functions, and answers from what they return")
    started = time.perf_counter()
    states = [
        programs.assistant_with_tools.run(question, backend=backend)
        for question, _ in programs.TOOL_QUESTIONS
    ]
    part.wall_s = time.perf_counter() - started
    part.count(states)
    for (question, expected), state in zip(programs.TOOL_QUESTIONS, states, strict=True):
        part.lines.append(f"{part.check(expected in state['answer'])} {question}")
        for message in state.messages()[1:]:
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            part.lines += [f"      {call['name']} {call['arguments']}" for call in calls]
            part.lines += [f"      {message['content']}"] if message["content"] else []
    return part


def _shown(part: Part) -> str:
    counts = (
        f"{part.num_right} of {part.num_checked} right, {part.wall_s:.2f} s, "
        f"{part.prompt_tokens} prompt tokens, {part.cached_tokens} cached "
        f"({part.hit_rate:.0%}), {part.completion_tokens} generated"
    )
    return "\n".join([part.title, *(f"  {line}" for line in part.lines), f"  {counts}\n"])


def _model_line(backend: Backend) -> str:
    info = backend.connection.info
    return f"{info['model']}, {info['dtype']} on {info['device']}"


def _say(args: argparse.Namespace, text: str) -> None:
    if not args.json:
        print(text, flush=True)

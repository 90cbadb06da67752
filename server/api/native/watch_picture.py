"""The state that all watchers see: the engine's reports combined, and the rates computed from them.

The engine reports changes. Here they are merged into the whole picture, which a new watcher, or one
too slow for the changes, receives without another question to the engine.
"""

from __future__ import annotations

from collections import deque
from typing import Any

MAX_STEPS = 256  # in a whole picture
RATE_S = 1.0  # rates are means over this period
HIT_RATE_S = 10.0
OWNER = 12  # the place of the owner's label in a node's row
ROOT = 2


class Picture:
    """Owns what is known of one engine since the first poll."""

    def __init__(self) -> None:
        self.run: str | None = None
        self.last_step = 0
        self.tree_version: int | None = None
        self.pool_version = 0
        self._nodes: dict[int, list[Any]] = {}
        self._texts: dict[str, str] = {}
        self._steps: deque[dict[str, Any]] = deque(maxlen=1024)
        self._names: dict[str, dict[str, Any]] = {}
        self._pool: dict[str, Any] | None = None
        self._last: dict[str, Any] = {}
        self._counts: deque[tuple[float, int, int]] = deque()  # s, prompt and cached tokens

    def questions(self) -> dict[str, Any]:
        """The arguments of the next `watch` call."""
        return {
            "run": self.run, "step": self.last_step, "tree": self.tree_version,
            "pool": self.pool_version,
        }  # fmt: skip

    def take(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Merge a report; returns the event's data for watchers who have seen everything before."""
        is_new = answer["run"] != self.run
        if is_new:
            self._forget()
            self.run = answer["run"]
        tree, steps = answer["tree"], answer["steps"]
        if tree["is_whole"]:
            self._nodes.clear()
            self._texts.clear()
        for number, _ in tree["removed"]:
            self._nodes.pop(number, None)
            self._texts.pop(str(number), None)
        self._nodes.update((row[0], row) for row in tree["nodes"])
        self._texts.update(tree["texts"])
        self.tree_version = tree["version"]
        self._steps.extend(steps["items"])
        self._take_names(steps["names"])
        if self._steps:
            self.last_step = self._steps[-1]["id"]
        if answer["pool"] is not None:
            self._pool, self.pool_version = answer["pool"], answer["pool"]["version"]
        self._last = {**answer, "rates": self._rates(answer)}
        return {**self._last, "is_whole": is_new or tree["is_whole"]}

    def whole(self) -> dict[str, Any]:
        """Everything, for watchers who have seen nothing."""
        steps = list(self._steps)[-MAX_STEPS:]
        return {
            **self._last,
            "is_whole": True,
            "steps": {"items": steps, "names": self._names, "num_missed": 0},
            "tree": {
                **self._last["tree"],
                "is_whole": True,
                "nodes": list(self._nodes.values()),
                "texts": self._texts,
                "removed": [],
            },
            "pool": self._pool,
        }

    def seen_from(self, event: dict[str, Any], namespace: str) -> dict[str, Any]:
        """An event's data for a caller who may see one namespace only: nodes and requests of other
        namespaces keep their numbers, without texts and names."""
        roots = event["tree"]["roots"]
        own = {int(number) for number, name in roots.items() if is_within(name, namespace)}
        tree = {
            **event["tree"],
            "roots": {n: (name if int(n) in own else None) for n, name in roots.items()},
            "nodes": [r if r[ROOT] in own else [*r[:OWNER], None] for r in event["tree"]["nodes"]],
            "texts": {
                number: text
                for number, text in event["tree"]["texts"].items()
                if self._nodes[int(number)][ROOT] in own
            },
        }
        names = {
            number: _seen_request(name, namespace)
            for number, name in event["steps"]["names"].items()
        }
        queue = {
            **event["queue"],
            "running": [_seen_request(told, namespace) for told in event["queue"]["running"]],
            "waiting": [_seen_request(told, namespace) for told in event["queue"]["waiting"]],
        }
        return {
            **event, "tree": tree, "steps": {**event["steps"], "names": names}, "queue": queue
        }  # fmt: skip

    def _forget(self) -> None:
        """Reset: another engine reports, or one that has lost track of what it reported."""
        self.last_step = 0
        for kept in (self._steps, self._names, self._counts):
            kept.clear()

    def _take_names(self, names: dict[str, dict[str, Any]]) -> None:
        self._names.update(names)
        while len(self._names) > 2 * MAX_STEPS:
            del self._names[next(iter(self._names))]

    def _rates(self, answer: dict[str, Any]) -> dict[str, Any]:
        now_s, stats = answer["now_s"], answer["engine"]["stats"]
        sums = {"prefill": 0, "decode": 0, "forced": 0, "score": 0, "cached": 0}
        num_steps, busy_ms = 0, 0.0
        for step in reversed(self._steps):
            if step["start_s"] < now_s - RATE_S:
                break
            num_steps += 1
            busy_ms += step["ms"]
            for kind in sums:
                sums[kind] += step["tokens"][kind]
        self._counts.append((now_s, stats["num_prompt_tokens"], stats["num_cached_tokens"]))
        while len(self._counts) > 1 and self._counts[1][0] <= now_s - HIT_RATE_S:
            self._counts.popleft()
        num_prompt = self._counts[-1][1] - self._counts[0][1]
        num_cached = self._counts[-1][2] - self._counts[0][2]
        return {
            "seconds": RATE_S,
            **{f"{kind}_tokens": round(count / RATE_S) for kind, count in sums.items()},
            "steps": round(num_steps / RATE_S),
            "busy": round(min(1.0, busy_ms / 1000 / RATE_S), 3),
            "hit_rate": round(num_cached / num_prompt, 4) if num_prompt else None,
        }


def is_within(name: str, namespace: str) -> bool:
    """Whether a namespace is the caller's own or a salted part of it; for a caller without a
    namespace a salted one never is, since its owner is unknown."""
    return name == namespace or (bool(namespace) and name.startswith(f"{namespace}#"))


def _seen_request(told: dict[str, Any], namespace: str) -> dict[str, Any]:
    if is_within(told["namespace"], namespace):
        return told
    return {**told, "program": None, "tenant": None, "namespace": None}

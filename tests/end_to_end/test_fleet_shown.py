"""What `stemma serve --replicas 2` shows of itself: the tree, `/watch` and `/metrics`."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, children
from waiting import PATIENCE_S, wait_until

import stemma
from stemma.__main__ import main

DASHBOARD = Path(stemma.__file__).parent / "docs" / "grafana" / "stemma.json"
SHELVES = ("novels", "maps", "letters", "poems")
SYSTEM = "You keep a small library by the sea. "
Series = dict[tuple[str, str], float]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--replicas", "2", "--placement", "round_robin", "--num-threads", "1")
    with ServerProcess(tmp_path_factory.mktemp("fleet"), *flags) as server:
        server.wait_healthy()
        for shelf in SHELVES:
            assert server.generate(8, prompt=f"{SYSTEM}Shelf: {shelf}").status_code == 200
        yield server


def get(server: ServerProcess, path: str) -> Any:
    reply = httpx.get(server.url + path, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    return reply.json()


def metrics(server: ServerProcess) -> Series:
    """Samples by name and replica; of those with more labels the sum."""
    text = httpx.get(server.url + "/metrics", timeout=PATIENCE_S).text
    series: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            place = (sample.name, sample.labels.get("replica", ""))
            series[place] = series.get(place, 0.0) + sample.value
    return series


def states(server: ServerProcess) -> list[str]:
    return [told["state"] for told in get(server, "/get_server_info")["replicas"]]


def test_the_command_draws_the_whole_and_each_replica(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*flags: str) -> str:
        assert main(["tree", "--endpoint", server.endpoint, *flags]) == 0
        return capsys.readouterr().out

    wait_until(lambda: all(shelf in shown() for shelf in SHELVES))
    whole = shown()
    assert re.search(r"tokens +0 1$", whole, re.MULTILINE)
    assert re.search(rf'─ "{SYSTEM}Shelf: " .* 0 1$', whole, re.MULTILINE), whole
    marks = [re.search(rf"{shelf}.* (0 ·|· 1)$", whole, re.MULTILINE) for shelf in SHELVES]
    homes = [mark and mark[1] for mark in marks]
    assert None not in homes and homes[0] == homes[2] != homes[1] == homes[3], whole
    assert re.search(r"^replica 1: ready, \d+ of 32,768 tokens cached$", whole, re.MULTILINE)
    alone = shown("--replica", "1")
    assert "locks" in alone and "replica" not in alone
    assert [shelf in alone for shelf in SHELVES] == [home == "· 1" for home in homes]
    assert json.loads(shown("--json"))["replicas"][1]["state"] == "ready"
    assert "lock_ref" in json.loads(shown("--json", "--replica", "0"))["nodes"][0]
    assert main(["tree", "--endpoint", server.endpoint, "--replica", "5"]) == 1
    assert "replica=5" in capsys.readouterr().err


def test_the_tree_over_http_is_of_all_unless_one_is_named(server: ServerProcess) -> None:
    whole = get(server, "/tree")
    holders = {frozenset(row["holders"]) for row in whole["nodes"]}
    assert holders == {frozenset("0"), frozenset("1"), frozenset("01")}
    assert whole["total_tokens"] == 2 * 32768
    assert "holders" not in get(server, "/tree?replica=1")["nodes"][0]
    assert len(get(server, "/tree?max_nodes=1")["nodes"]) == 2


def events(server: ServerProcess, query: str) -> list[tuple[str, dict[str, Any]]]:
    reply = httpx.get(f"{server.url}/watch?{query}", timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    blocks = [block.split("\n") for block in reply.text.strip().split("\n\n")]
    return [(b[0].removeprefix("event: "), json.loads(b[1].removeprefix("data: "))) for b in blocks]


def test_who_watches_one_replica_is_told_of_all(server: ServerProcess) -> None:
    for query, number in (("replica=1", 1), ("replica=0", 0), ("", 0)):
        told = events(server, f"{query}&events=7")
        fleets = [data for kind, data in told if kind == "fleet"]
        seen = [data for kind, data in told if kind == "state"]
        assert seen[0]["is_whole"] and {each["replica"] for each in seen} == {number}
        assert [each["replica"] for each in fleets[0]["replicas"]] == [0, 1]
        told_of = fleets[0]["replicas"][number]
        assert told_of["total_tokens"] == seen[0]["engine"]["total_tokens"]
        assert told_of["cached_tokens"] == seen[0]["engine"]["cached_tokens"]
        assert told_of["state"] == "ready" and told_of["rates"]["output_tokens"] >= 0
        assert "stats" not in told_of
    refused = httpx.get(f"{server.url}/watch?replica=9", timeout=PATIENCE_S)
    assert refused.status_code == 400 and "one of [0, 1]" in refused.text


def test_every_series_of_replicas_that_the_dashboard_names_is_there(server: ServerProcess) -> None:
    names = {name for name, _ in metrics(server)}
    asked = set(re.findall(r"\b(stemma_replica_[a-z0-9_]+)", DASHBOARD.read_text()))
    assert asked and asked <= names, asked - names


def test_series_of_replicas_add_up_to_the_sums(server: ServerProcess) -> None:
    told = metrics(server)
    for name in ("prompt_tokens", "cached_prompt_tokens", "generated_tokens", "computed_tokens"):
        parts = [told[f"stemma_replica_{name}_total", number] for number in "01"]
        assert sum(parts) == told[f"stemma_{name}_total", ""], name
    assert told["stemma_replica_kv_tokens", "1"] == 32768
    assert told["stemma_replica_state", "0"] == told["stemma_replica_state", "1"] == 1
    placed = [told["stemma_replica_programs_placed_total", number] for number in "01"]
    assert min(placed) >= 2


def test_counters_go_on_when_a_replica_is_killed(server: ServerProcess) -> None:
    before = metrics(server)
    (victim, *_) = children(server.engine_pid)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: sum(_of(server, "stemma_replica_losses_total").values()) == 1)
    seen = [metrics(server)]
    wait_until(lambda: states(server) == ["ready", "ready"])
    seen.append(metrics(server))
    for after in seen:
        for place, value in before.items():
            if place[0].endswith(("_total", "_count", "_sum", "_bucket")):
                assert after[place] >= value, place
    restarts = _of(server, "stemma_replica_restarts_total")
    assert sorted(restarts.values()) == [0, 1] and restarts == _of(
        server, "stemma_replica_losses_total"
    )


def _of(server: ServerProcess, name: str) -> dict[str, float]:
    """A series by replica."""
    return {replica: value for (each, replica), value in metrics(server).items() if each == name}

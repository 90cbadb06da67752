"""Adapters loaded and unloaded again and again beside a hostile neighbour: nothing leaks, and
those who use other adapters are told what they are always told.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from adapters import make_adapter
from http_server import http_server
from process_memory import growth_of, rss_mb
from raw_http import WAYS_TO_GO, RawClient
from waiting import PATIENCE_S, wait_until

import stemma as st
from stemma.kernels.native.bindings import why_not_native
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL

NUM_VARIANTS = 5  # folders that are loaded in turns, each another adapter
MOST_GROWTH_MB = 4.0


@dataclass
class Shop:
    """A server with two adapters that stay, and two slots for all."""

    url: str
    engine: st.Engine
    http: httpx.Client

    def said(self, model: str) -> str:
        body = {"prompt": "The adapters say", "model": model, "max_tokens": 8, "temperature": 0}
        answer = self.http.post("/v1/completions", json={**body, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def load(self, name: str, folder: str) -> int:
        body = {"lora_name": name, "lora_path": folder}
        return self.http.post("/load_lora_adapter", json=body).status_code

    def unload(self, name: str) -> int:
        return self.http.post("/unload_lora_adapter", json={"lora_name": name}).status_code


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    for number in range(NUM_VARIANTS):
        make_adapter(tmp_path / f"variant{number}", EMBEDDED_MODEL, seed=number + 9, std=0.4)
    paths = {
        name: make_adapter(tmp_path / name, EMBEDDED_MODEL, seed=seed, std=0.4)
        for seed, name in enumerate(("first", "second"))
    }
    make_adapter(tmp_path / "cut", EMBEDDED_MODEL, seed=7)
    os.truncate(tmp_path / "cut" / "adapter_model.safetensors", 1000)
    make_adapter(tmp_path / "large", EMBEDDED_MODEL, rank=64)
    options: dict[str, Any] = {"max_loras_per_batch": 2, "max_total_tokens": 2048}
    options["deterministic"] = (
        why_not_native(torch.bfloat16) is None
    )  # random adapters decide by a hair
    with st.Engine(lora_paths=paths, lora_root=tmp_path, **options) as engine:
        with http_server(engine) as url, httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            yield Shop(url, engine, http)


def test_adapters_that_come_and_go_beside_a_hostile_neighbour_leave_nothing(shop: Shop) -> None:
    churn(shop, num_rounds=12)


@pytest.mark.slow
def test_thousands_of_adapters_that_come_and_go_leave_nothing(shop: Shop) -> None:
    sizes = churn(shop, num_rounds=2000)
    growth = growth_of(sizes[len(sizes) // 4 :])
    assert growth < MOST_GROWTH_MB, f"grew by {growth:.1f} MB: {sizes}"


def churn(shop: Shop, num_rounds: int) -> list[float]:
    """The engine's memory after each tenth round. Raises what anyone was surprised by."""
    names = ("stemma-tiny", "first", "second")
    said = [shop.said(name) for name in names]
    models = shop.http.get("/v1/models").json()["data"]
    is_over = threading.Event()
    sizes = []
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(be_hostile, shop, is_over)
        try:
            variants: dict[int, str] = {}
            for number in range(num_rounds):
                variant = number % NUM_VARIANTS
                assert shop.load("new", f"variant{variant}") == 200
                text = shop.said("new")
                assert variants.setdefault(variant, text) == text
                assert shop.unload("new") == 200
                if number % 3 == 0:
                    assert [shop.said(name) for name in names] == said
                if number % 10 == 9:
                    sizes.append(rss_mb(shop.engine.pid))
        finally:
            is_over.set()
        neighbour.result()
    assert len(set(variants.values()) | set(said)) == NUM_VARIANTS + 3
    assert [shop.said(name) for name in names] == said
    assert_nothing_is_held(shop, models)
    return sizes


def assert_nothing_is_held(shop: Shop, models: list[dict[str, Any]]) -> None:
    shop.unload("his")
    wait_until(lambda: shop.engine.get_server_info()["num_programs"] == 0)
    info = shop.engine.get_server_info()
    assert info["free_tokens"] + info["cached_tokens"] == info["total_tokens"]
    assert info["evictable_tokens"] == info["cached_tokens"]
    assert (info["num_running"], info["num_waiting"]) == (0, 0)
    assert info["lora"]["num_in_use"] == 0 and info["lora"]["num_slots"] == 2
    assert info["lora"]["num_evictions"] > 0, "nobody ever waited for a slot"
    strip = ("id", "root", "parent", "revision")
    found = shop.http.get("/v1/models").json()["data"]
    assert [[m.get(k) for k in strip] for m in found] == [[m.get(k) for k in strip] for m in models]


def be_hostile(shop: Shop, is_over: threading.Event) -> None:
    rng = random.Random(1)
    for number in itertools.count():
        if is_over.is_set():
            return
        rng.choice(TRICKS)(shop, number)


def leave_a_stream(shop: Shop, number: int) -> None:
    """Of an adapter that may be unloaded at this moment."""
    client = RawClient(shop.url)
    model = ("first", "second", "new", "his")[number % 4]
    body = {"prompt": f"Left {number}", "model": model, "max_tokens": 300, "ignore_eos": True}
    client.post("/v1/completions", {**body, "stream": True, "n": 3})
    if number % 2:
        client.read_until(b"\r\n\r\n")  # of a stream, or of a 404 on a connection that is kept
    list(WAYS_TO_GO.values())[number % len(WAYS_TO_GO)](client)
    client.close()


def load_what_cannot_be_loaded(shop: Shop, number: int) -> None:
    for folder in ("cut", "large", "nowhere", ".."):
        assert shop.load("his", folder) == 400
    assert shop.load("first", "variant0") == 400  # taken


def load_and_leave(shop: Shop, number: int) -> None:
    """One of the adapters that the other loads, too, under a name of his own."""
    assert shop.load("his", f"variant{number % NUM_VARIANTS}") in (200, 400)
    shop.http.post("/v1/completions", json={"prompt": "a", "model": "his", "max_tokens": 2})
    assert shop.unload("his") in (200, 404)


def unload_what_is_not_there(shop: Shop, number: int) -> None:
    assert shop.unload(f"nobody{number}") == 404


TRICKS: tuple[Callable[[Shop, int], None], ...] = (
    leave_a_stream,
    load_what_cannot_be_loaded,
    load_and_leave,
    unload_what_is_not_there,
)

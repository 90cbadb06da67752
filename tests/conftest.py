"""Fixtures that several test files share: one random checkpoint and one engine for the session."""

from __future__ import annotations

import functools
import gc
import os
import sys

# Before anything imports triton: GPU kernels run in its interpreter here.
os.environ["TRITON_INTERPRET"] = "1"
# Each of the hundreds of engines and servers that tests start would else compile Stemma anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_byte_tokenizer, make_checkpoint
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from httpx._transports import default as transports
from hypothesis import HealthCheck, settings

import stemma as st
from stemma.runtime.tokenizer.chat_template import ChatTemplate
from stemma.runtime.tokenizer.tokenizer import Tokenizer

sys.dont_write_bytecode = False
gc.disable()  # until all tests are known, see below

# A shared machine may take its time over an example; that is no failure of what is tested.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

# Nor is it a failure that an answer takes longer than httpx waits unless it is told, 5 s.
for part in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, part, 120.0)

# Each `httpx.get` would read all authorities' certificates, which takes 40 ms.
transports.create_ssl_context = functools.cache(transports.create_ssl_context)


def pytest_collection_finish() -> None:
    """What has been imported stays: to look through it for garbage again and again takes a tenth of
    a worker's time."""
    if "triton" in sys.modules:
        from triton_interpreter import spare_repeated_work

        spare_repeated_work()
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Whatever torch allocates is filled with NaN or the largest integer
    (`torch.utils.deterministic`, which does so while deterministic algorithms are asked for)."""
    import torch

    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with a byte tokenizer and no chat template."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return make_checkpoint(folder, init_std=0.3, seed=11, max_position_embeddings=4096)


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte."""
    return Tokenizer(make_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")), vocab_size=260)


@pytest.fixture(scope="session")
def fallback_template(
    byte_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> ChatTemplate:
    """Labelled turns: what a checkpoint without a template gets."""
    return ChatTemplate(tmp_path_factory.mktemp("no_template"), byte_tokenizer)


@pytest.fixture(scope="session")
def engine(checkpoint: Path) -> Iterator[st.Engine]:
    """A real engine in a process of its own, over ipc. Tests that break it start their own."""
    with st.Engine(
        checkpoint, dtype="float32", max_total_tokens=16384, max_running_requests=32, num_threads=1
    ) as started:
        yield started

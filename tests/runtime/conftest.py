"""Fixtures of the runtime's tests."""

from __future__ import annotations

import itertools

import pytest
from fakes import FakeQueue
from program_stage import Stage

from stemma.runtime.programs.context import Defaults, Replays, World
from stemma.runtime.tokenizer.chat_template import ChatTemplate
from stemma.runtime.tokenizer.tokenizer import Tokenizer


@pytest.fixture
def world(byte_tokenizer: Tokenizer, fallback_template: ChatTemplate) -> World:
    return World(
        tokenizer=byte_tokenizer,
        vocab_size=260,
        template=fallback_template,
        defaults=Defaults(eos_token_ids=(257,)),
        queue=FakeQueue(),
        next_request_id=itertools.count(1).__next__,
        replays=Replays(),
    )


@pytest.fixture
def stage(world: World) -> Stage:
    return Stage(world)

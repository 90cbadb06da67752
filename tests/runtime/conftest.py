"""Fixtures of the runtime's tests."""

from __future__ import annotations

import itertools

import pytest
from fakes import FakeQueue
from program_harness import ProgramHarness

from stemma.runtime.programs.context import AssistantTurnCache, Defaults, ProgramContext
from stemma.runtime.tokenizer.chat_template import ChatTemplate
from stemma.runtime.tokenizer.tokenizer import Tokenizer


@pytest.fixture
def context(byte_tokenizer: Tokenizer, fallback_template: ChatTemplate) -> ProgramContext:
    return ProgramContext(
        tokenizer=byte_tokenizer,
        vocab_size=260,
        template=fallback_template,
        defaults=Defaults(eos_token_ids=(257,)),
        queue=FakeQueue(),
        next_request_id=itertools.count(1).__next__,
        assistant_turns=AssistantTurnCache(),
    )


@pytest.fixture
def harness(context: ProgramContext) -> ProgramHarness:
    return ProgramHarness(context)

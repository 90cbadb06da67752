"""What tests of programs use: the session's engine as the default, and no test that hangs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dsl_programs import deadline

import stemma as st


@pytest.fixture(scope="module")
def default_engine(engine: st.Engine) -> Iterator[st.Engine]:
    """The session's engine runs every program that names no backend."""
    st.set_default_backend(engine)
    yield engine
    st.set_default_backend(None)


@pytest.fixture
def no_test_hangs() -> Iterator[None]:
    """Fails a test after three minutes."""
    with deadline(180):
        yield

"""SGLang's `global_config`."""

from __future__ import annotations

import pytest

import stemma as st


def test_its_default_backend_is_that_of_every_run(engine: st.Engine) -> None:
    st.global_config.default_backend = engine
    try:
        assert st.global_config.default_backend is engine
        assert st.get_server_info()["model"] == engine.get_server_info()["model"]
        st.set_default_backend(None)
        assert st.global_config.default_backend is None
    finally:
        st.set_default_backend(None)


def test_sglangs_fields_are_there_and_others_are_refused() -> None:
    st.global_config.verbosity = 2
    assert st.global_config.verbosity == 2
    st.global_config.verbosity = 0
    st.global_config.skip_special_tokens_in_output = True
    with pytest.raises(st.InvalidRequest, match="skip_special_tokens_in_output=False"):
        st.global_config.skip_special_tokens_in_output = False
    with pytest.raises(st.InvalidRequest, match="verbose=1 is not allowed"):
        st.global_config.verbose = 1
    with pytest.raises(AttributeError, match="no 'verbose'"):
        _ = st.global_config.verbose
    assert "enable_precache_with_tracing" in dir(st.global_config)

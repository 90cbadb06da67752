"""The public names: a contract. Adding one is fine and is added here; losing one is a break."""

from __future__ import annotations

import stemma as st

NAMES = """
    function gen gen_int gen_string select tokens system user assistant system_begin system_end
    user_begin user_end assistant_begin assistant_end set_default_backend Engine Runtime OpenAI
    RuntimeEndpoint flush_cache get_server_info Function Forks ProgramState StemmaError
    InvalidRequest
    InvalidProgram InvalidGrammar UnsupportedSchema PromptTooLong ModelLoadError ModelNotFound
    ProtocolError
    EngineError ProgramError BatchError __version__ tool Tool first image video separate_reasoning
    role Evaluation evaluate choose_examples BatchStream Prices Result
    tool_loop ToolLoop MaxTurnsExceeded
    ChoicesDecision ChoicesSamplingMethod global_config
    cascade agree mean_logprob Answer
    KVPolicy h2o snapkv streaming text
    token_length_normalized greedy_token_selection unconditional_likelihood_normalized
"""


def test_public_names_are_the_contract() -> None:
    assert sorted(st.__all__) == sorted(NAMES.split())


def test_every_public_name_is_there_and_documented() -> None:
    for name in st.__all__:
        value = getattr(st, name)
        assert name == "__version__" or value.__doc__, name


def test_dir_shows_the_public_names() -> None:
    assert set(st.__all__) <= set(dir(st))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(st, "no_such_name")


def test_functions_offer_the_contract() -> None:
    @st.function
    def program(s: st.ProgramState) -> None:
        """Nothing."""

    for name in [
        "run",
        "run_batch",
        "stream",
        "bind",
        "trace",
        "cache",
        "arun",
        "arun_batch",
        "astream",
    ]:
        assert callable(getattr(program, name))
    for name in [
        "var",
        "text",
        "messages",
        "fork",
        "copy",
        "text_iter",
        "get_meta_info",
        "error",
        "sync",
        "var_scope",
        "pause",
        "call",
        "acall",
        "pin",
        "retain",
        "demote",
        "prefetch",
        "share",
        "report",
        "aget",
        "atext",
        "amessages",
        "adone",
        "aget_meta_info",
        "text_async_iter",
    ]:
        assert callable(getattr(st.ProgramState, name))

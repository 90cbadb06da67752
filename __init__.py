"""Stemma: a runtime for structured LLM programs.

    import stemma as st

    @st.function
    def trip(s, city):
        s += st.user(f"Tell me about {city}.") + st.assistant(st.gen("answer", max_tokens=64))

    print(trip.run("Lisbon")["answer"])

The names below are loaded when first used, so `import stemma` is light and never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .errors import (
        BatchError,
        EngineError,
        InvalidGrammar,
        InvalidProgram,
        InvalidRequest,
        MaxTurnsExceeded,
        ModelLoadError,
        ModelNotFound,
        ProgramError,
        PromptTooLong,
        ProtocolError,
        StemmaError,
        UnsupportedSchema,
    )
    from .frontend.backend import (
        Engine,
        Runtime,
        flush_cache,
        get_server_info,
        set_default_backend,
    )
    from .frontend.cascade.acceptance import Answer, agree, mean_logprob
    from .frontend.cascade.backend import cascade
    from .frontend.dsl.batch_stream import BatchStream, Prices
    from .frontend.dsl.choices_method import ChoicesDecision, ChoicesSamplingMethod
    from .frontend.dsl.evaluation import Evaluation, evaluate
    from .frontend.dsl.expr import (
        assistant,
        assistant_begin,
        assistant_end,
        image,
        role,
        separate_reasoning,
        system,
        system_begin,
        system_end,
        text,
        tokens,
        user,
        user_begin,
        user_end,
        video,
    )
    from .frontend.dsl.few_shot import choose_examples
    from .frontend.dsl.forks import Forks, first
    from .frontend.dsl.function import Function, function
    from .frontend.dsl.generation import (
        gen,
        gen_int,
        gen_string,
        greedy_token_selection,
        select,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )
    from .frontend.dsl.result import Result
    from .frontend.dsl.state import ProgramState
    from .frontend.dsl.tool import Tool, tool
    from .frontend.dsl.tool_loop import ToolLoop, tool_loop
    from .frontend.global_config import global_config
    from .frontend.openai.backend import OpenAI, RuntimeEndpoint
    from .frontend.protocol.kv_policy import KVPolicy, h2o, snapkv, streaming

_ROOMS = {
    "errors": (
        "BatchError",
        "EngineError",
        "InvalidGrammar",
        "InvalidProgram",
        "InvalidRequest",
        "MaxTurnsExceeded",
        "ModelLoadError",
        "ModelNotFound",
        "ProgramError",
        "PromptTooLong",
        "ProtocolError",
        "StemmaError",
        "UnsupportedSchema",
    ),
    "frontend.backend": (
        "Engine",
        "Runtime",
        "flush_cache",
        "get_server_info",
        "set_default_backend",
    ),
    "frontend.cascade.acceptance": ("Answer", "agree", "mean_logprob"),
    "frontend.cascade.backend": ("cascade",),
    "frontend.dsl.batch_stream": ("BatchStream", "Prices"),
    "frontend.dsl.evaluation": ("Evaluation", "evaluate"),
    "frontend.dsl.few_shot": ("choose_examples",),
    "frontend.dsl.choices_method": ("ChoicesDecision", "ChoicesSamplingMethod"),
    "frontend.dsl.expr": (
        "assistant",
        "assistant_begin",
        "assistant_end",
        "image",
        "role",
        "separate_reasoning",
        "system",
        "system_begin",
        "system_end",
        "text",
        "tokens",
        "user",
        "user_begin",
        "user_end",
        "video",
    ),
    "frontend.dsl.forks": ("Forks", "first"),
    "frontend.dsl.function": ("Function", "function"),
    "frontend.dsl.generation": (
        "gen",
        "gen_int",
        "gen_string",
        "greedy_token_selection",
        "select",
        "token_length_normalized",
        "unconditional_likelihood_normalized",
    ),
    "frontend.global_config": ("global_config",),
    "frontend.openai.backend": ("OpenAI", "RuntimeEndpoint"),
    "frontend.protocol.kv_policy": ("KVPolicy", "h2o", "snapkv", "streaming"),
    "frontend.dsl.result": ("Result",),
    "frontend.dsl.state": ("ProgramState",),
    "frontend.dsl.tool": ("Tool", "tool"),
    "frontend.dsl.tool_loop": ("ToolLoop", "tool_loop"),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "Answer",
    "BatchError",
    "BatchStream",
    "ChoicesDecision",
    "ChoicesSamplingMethod",
    "Engine",
    "EngineError",
    "Evaluation",
    "Forks",
    "Function",
    "InvalidGrammar",
    "InvalidProgram",
    "InvalidRequest",
    "KVPolicy",
    "MaxTurnsExceeded",
    "ModelLoadError",
    "ModelNotFound",
    "OpenAI",
    "Prices",
    "ProgramError",
    "ProgramState",
    "PromptTooLong",
    "ProtocolError",
    "Result",
    "Runtime",
    "RuntimeEndpoint",
    "StemmaError",
    "Tool",
    "ToolLoop",
    "UnsupportedSchema",
    "__version__",
    "agree",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "cascade",
    "choose_examples",
    "evaluate",
    "first",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "h2o",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "mean_logprob",
    "role",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "snapkv",
    "streaming",
    "system",
    "system_begin",
    "system_end",
    "text",
    "token_length_normalized",
    "tokens",
    "tool",
    "tool_loop",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stemma' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

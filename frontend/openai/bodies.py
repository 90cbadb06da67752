"""What a gen asks for, as the body of a request to one flavor of endpoint.

Each field of `GenParams` is worded here, carried out on this side (`stop_regex`, `deadline_s`), or
refused with what could be done instead.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ...errors import InvalidProgram
from ..protocol.constraint import Constraint
from ..protocol.ir import GenParams
from ..protocol.numbers import RANGES
from .client_transcript import Prompt
from .flavors import Flavor

DEFAULT_MAX_TOKENS = 128  # as the runtime's
# Models that think first and count that, too, as completion tokens.
_REASONING = re.compile(r"(^|/)(o\d|gpt-5)")
_SHARED = ("temperature", "top_p", "frequency_penalty", "presence_penalty")
# Values that ask for nothing: no endpoint needs to know the field for them.
_NEUTRAL: dict[str, object] = {
    "min_p": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": (),
    "lora_path": "",
    "top_k": -1,
}
_INSTEAD = {
    "beam": "calls over HTTP draw their tokens; use a runtime over ZeroMQ",
    "length_penalty": "only together with beam, over ZeroMQ",
    "early_stopping": "only together with beam, over ZeroMQ",
    "priority": "calls over HTTP have none; use a runtime over ZeroMQ",
    "logprob_start": "the API gives no log probabilities of prompts; use a runtime over ZeroMQ",
}


def gen_body(
    flavor: Flavor, model: str, prompt: Prompt, params: GenParams, seed: int
) -> dict[str, Any]:
    """The body of a call. Raises InvalidProgram naming what the endpoint does not understand."""
    _refuse_unknown(flavor, params)
    if params.max_tokens == 0 and (prompt.is_chat or flavor.name != "stemma"):
        raise InvalidProgram.of("max_tokens", 0, "at least 1 on this endpoint")
    body = {**prompt_fields(flavor, model, prompt), "seed": seed}
    for name in (*_SHARED, *flavor.extras):
        if (value := getattr(params, name)) is not None:
            body[name] = list(value) if isinstance(value, tuple) else value
    max_tokens = DEFAULT_MAX_TOKENS if params.max_tokens is None else params.max_tokens
    body[_max_tokens_field(model, prompt)] = max_tokens
    if params.stop:
        body["stop"] = list(params.stop[: flavor.max_stops])
    if params.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    if params.prediction is not None and _takes_prediction(flavor, model, prompt, params):
        body["prediction"] = {"type": "content", "content": params.prediction}
    if params.n is not None:
        body["n"] = RANGES["n"].checked("n", params.n)
    if params.logprobs is not None:
        body |= _logprob_fields(prompt, params.logprobs)
    if params.constraint is not None:
        body |= constraint_fields(flavor, params.constraint, is_chat=prompt.is_chat)
    if params.kv_policy is not None:
        if flavor.name != "stemma":
            raise _unknown(flavor, "kv_policy")
        body["kv_policy"] = params.kv_policy.to_wire()
    return body


def prompt_fields(flavor: Flavor, model: str, prompt: Prompt) -> dict[str, Any]:
    """Model and prompt. Raises InvalidProgram where an answer cannot be gone on with."""
    if not prompt.is_chat:
        return {"model": model, "prompt": prompt.text}
    messages = [message.body() for message in prompt.messages]
    if not prompt.answer:
        tools = {} if prompt.tools is None else {"tools": json.loads(prompt.tools)}
        return {"model": model, "messages": messages, **tools}
    if flavor.continuation is None:
        raise InvalidProgram(
            "this chat endpoint begins a new message with each call; it cannot go on after "
            f"{prompt.answer[-40:]!r}. gen must be right after assistant_begin, or the program a "
            "@function(num_api_spec_tokens=...)"
        )
    messages.append({"role": "assistant", "content": prompt.answer})
    return {"model": model, "messages": messages, **flavor.continuation}


def constraint_fields(flavor: Flavor, constraint: Constraint, *, is_chat: bool) -> dict[str, Any]:
    """A constraint in the flavor's words. Raises InvalidProgram."""
    kind = constraint.kind
    if kind not in flavor.constraints or (flavor.name == "openai" and not is_chat):
        raise InvalidProgram(
            f"{kind}: an endpoint of flavor {flavor.name!r} cannot be held to it"
            + _constraint_instead(flavor, kind, is_chat),
            kind,
        )
    if flavor.name == "stemma":
        return _stemma_constraint(constraint)
    _refuse_own_options(flavor, constraint)
    if flavor.name == "vllm":
        return {"structured_outputs": _vllm_constraint(constraint)}
    if flavor.name == "sglang" and kind in ("regex", "ebnf", "choices"):
        return _sglang_constraint(constraint)
    if kind == "structural_tag":
        return {"response_format": json.loads(constraint.source)}
    return {"response_format": _response_format(constraint)}


def _refuse_unknown(flavor: Flavor, params: GenParams) -> None:
    for name, instead in _INSTEAD.items():
        if getattr(params, name) is not None:
            raise InvalidProgram(f"{name}: {instead}", name)
    for name, neutral in _NEUTRAL.items():
        value = getattr(params, name)
        if value is not None and value != neutral and name not in flavor.extras:
            raise _unknown(flavor, name)


def _unknown(flavor: Flavor, name: str) -> InvalidProgram:
    return InvalidProgram(
        f"{name}: an endpoint of flavor {flavor.name!r} does not know it; leave it out, or say "
        "flavor= if the server is Stemma, vLLM or SGLang",
        name,
    )


def _takes_prediction(flavor: Flavor, model: str, prompt: Prompt, params: GenParams) -> bool:
    """Whether a prediction is no error in this call; it is left out elsewhere, as no output depends
    on it."""
    if flavor.name != "openai" or not prompt.is_chat or _REASONING.search(model):
        return flavor.name == "stemma"
    num_samples, penalties = params.n or 1, (params.presence_penalty, params.frequency_penalty)
    return num_samples == 1 and params.logprobs is None and not any(penalties)


def _max_tokens_field(model: str, prompt: Prompt) -> str:
    is_reasoning = prompt.is_chat and _REASONING.search(model)
    return "max_completion_tokens" if is_reasoning else "max_tokens"


def _logprob_fields(prompt: Prompt, num: int) -> dict[str, Any]:
    return {"logprobs": True, "top_logprobs": num} if prompt.is_chat else {"logprobs": num}


def _constraint_instead(flavor: Flavor, kind: str, is_chat: bool) -> str:
    if flavor.name != "openai":
        return ""
    if kind in flavor.constraints:
        return f"; on a chat endpoint {kind} works" if not is_chat else ""
    return "; use json_schema or select, or say flavor= if the server is Stemma, vLLM or SGLang"


def _refuse_own_options(flavor: Flavor, constraint: Constraint) -> None:
    default = Constraint(constraint.kind)
    for name, field in (
        ("property_order", "property_order"),
        ("is_lenient", "lenient"),
        ("formats", "formats"),
    ):
        if getattr(constraint, name) != getattr(default, name):
            raise _unknown(flavor, field)


def _stemma_constraint(constraint: Constraint) -> dict[str, Any]:
    source, default = constraint.source, Constraint(constraint.kind)
    options: dict[str, Any] = {
        name: getattr(constraint, name)
        for name in ("whitespace", "property_order", "formats")
        if getattr(constraint, name) != getattr(default, name)
    }
    if constraint.is_lenient:
        options["lenient"] = True
    match constraint.kind:
        case "regex" | "ebnf":
            return {constraint.kind: source}
        case "choices":
            return {"structured_outputs": {"choice": json.loads(source)}}
        case "json_object":
            return {"response_format": {"type": "json_object"}, **options}
        case _:
            return {constraint.kind: json.loads(source), **options}


def _vllm_constraint(constraint: Constraint) -> dict[str, Any]:
    source = constraint.source
    match constraint.kind:
        case "regex":
            return {"regex": source}
        case "ebnf":
            return {"grammar": source}
        case "choices":
            return {"choice": json.loads(source)}
        case "json_object":
            return {"json_object": True}
        case "structural_tag":
            return {"structural_tag": source}
        case _:
            return {"json": json.loads(source)}


def _sglang_constraint(constraint: Constraint) -> dict[str, Any]:
    if constraint.kind == "choices":
        return {"regex": f"({'|'.join(map(re.escape, json.loads(constraint.source)))})"}
    return {constraint.kind: constraint.source}


def _response_format(constraint: Constraint) -> dict[str, Any]:
    if constraint.kind == "json_object":
        return {"type": "json_object"}
    schema = {"name": "output", "schema": json.loads(constraint.source), "strict": True}
    return {"type": "json_schema", "json_schema": schema}

"""Fields of OpenAI's, SGLang's and vLLM's APIs that have no effect or are not supported here.

A field that would have changed the output is refused unless it asks for what happens anyhow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field

from ....errors import InvalidRequest

_NO_LIST: tuple[Any, ...] = (None, [], {})
_OFF = (None, False)
_LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class _Only:
    """What may be asked for, and the same in words."""

    harmless: tuple[Any, ...]
    allowed: str


def _only(harmless: tuple[Any, ...], allowed: str) -> Any:
    info: Any = Field(default=None)
    info.metadata.append(_Only(harmless, allowed))
    return info


class OtherFields(BaseModel):
    """Known by name and of no effect, or refused by `refuse_others`."""

    # No effect on what is generated.
    user: Any = None
    safety_identifier: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    request_id: Any = None
    spaces_between_special_tokens: Any = None
    guided_decoding_backend: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    images_config: Any = None
    custom_labels: Any = None
    stream_interval: Any = None
    routed_dp_rank: Any = None
    data_parallel_rank: Any = None

    # Of no effect for one value, and refused with any other.
    audio: Any = _only((None,), "left out: the model makes text only")
    modalities: Any = _only((None, [], ["text"]), '["text"]')
    web_search_options: Any = _only((None,), "left out: there is no search")
    moderation: Any = _only((None,), "left out: there is no moderation")
    functions: Any = _only(_NO_LIST, "left out: tools is today's name")
    function_call: Any = _only((None, "none"), "left out: tool_choice is today's name")
    suffix: Any = _only((None, ""), "left out: text cannot be filled in before a suffix")
    prompt_embeds: Any = _only(_NO_LIST, _LEFT_OUT)
    skip_special_tokens: Any = _only((None, True), "true")
    detokenize: Any = _only((None, True), "true")
    truncate_prompt_tokens: Any = _only((None,), "left out: a prompt is taken whole or refused")
    allowed_token_ids: Any = _only(_NO_LIST, "left out; see logit_bias and the constraints")
    bad_words: Any = _only(_NO_LIST, "left out; see logit_bias and the constraints")
    logits_processors: Any = _only(_NO_LIST, _LEFT_OUT)
    custom_logit_processor: Any = _only((None,), _LEFT_OUT)
    custom_params: Any = _only(_NO_LIST, _LEFT_OUT)
    repetition_detection: Any = _only(_NO_LIST, _LEFT_OUT)
    kv_transfer_params: Any = _only(_NO_LIST, _LEFT_OUT)
    vllm_xargs: Any = _only(_NO_LIST, _LEFT_OUT)
    documents: Any = _only(_NO_LIST, "left out: give them in a message")
    chat_template: Any = _only((None,), "left out: the model's own is used")
    session_params: Any = _only(_NO_LIST, "left out: a shared prefix is found without")
    return_hidden_states: Any = _only(_OFF, "false")
    return_tokens_as_token_ids: Any = _only(_OFF, "false; see return_token_ids")
    return_routed_experts: Any = _only(_OFF, "false")
    return_prompt_text: Any = _only(_OFF, "false")
    return_meta_info: Any = _only(_OFF, "false; see include_timing")
    return_cached_tokens_details: Any = _only(_OFF, "false; usage tells of cached tokens")
    input_ids: Any = _only(_NO_LIST, "left out: /v1/completions takes token ids")
    truncation_side: Any = _only((None,), "left out: a prompt is taken whole or refused")
    logprob_token_ids: Any = _only(_NO_LIST, "left out; see top_logprobs")
    watermarking: Any = _only(_OFF, "false")
    extra_key: Any = _only((None, ""), "left out; see cache_salt")
    ec_transfer_params: Any = _only(_NO_LIST, _LEFT_OUT)
    bootstrap_host: Any = _only((None,), _LEFT_OUT)
    bootstrap_port: Any = _only((None,), _LEFT_OUT)
    bootstrap_room: Any = _only((None,), _LEFT_OUT)
    task: Any = _only((None,), _LEFT_OUT)

    def refuse_others(self) -> None:
        """Raises InvalidRequest naming a field that cannot be honoured."""
        for name in self.model_fields_set & _REFUSED.keys():
            value, only = getattr(self, name), _REFUSED[name]
            if not any(type(value) is type(item) and value == item for item in only.harmless):
                raise InvalidRequest.of(name, value, only.allowed)


_REFUSED = {
    name: only
    for name, info in OtherFields.model_fields.items()
    for only in info.metadata
    if isinstance(only, _Only)
}

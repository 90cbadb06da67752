"""Fields of OpenAI's, SGLang's and vLLM's APIs that have no effect or are not supported here.

A field that would have changed the output is refused unless it asks for what happens anyhow.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from ....errors import InvalidRequest

_NO_LIST: tuple[Any, ...] = (None, [], {})
_OFF = (None, False)
_LEFT_OUT = "left out"

# The allowed values, and the same in words.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((None,), "left out: the model makes text only"),
    "modalities": ((None, [], ["text"]), '["text"]'),
    "web_search_options": ((None,), "left out: there is no search"),
    "moderation": ((None,), "left out: there is no moderation"),
    "functions": (_NO_LIST, "left out: tools is today's name"),
    "function_call": ((None, "none"), "left out: tool_choice is today's name"),
    "suffix": ((None, ""), "left out: text cannot be filled in before a suffix"),
    "prompt_embeds": (_NO_LIST, _LEFT_OUT),
    "skip_special_tokens": ((None, True), "true"),
    "detokenize": ((None, True), "true"),
    "use_beam_search": (_OFF, "false"),
    "early_stopping": (_OFF, "false"),
    "length_penalty": ((None, 1, 1.0), "1"),
    "truncate_prompt_tokens": ((None,), "left out: a prompt is taken whole or refused"),
    "allowed_token_ids": (_NO_LIST, "left out; see logit_bias and the constraints"),
    "bad_words": (_NO_LIST, "left out; see logit_bias and the constraints"),
    "logits_processors": (_NO_LIST, _LEFT_OUT),
    "custom_logit_processor": ((None,), _LEFT_OUT),
    "custom_params": (_NO_LIST, _LEFT_OUT),
    "repetition_detection": (_NO_LIST, _LEFT_OUT),
    "kv_transfer_params": (_NO_LIST, _LEFT_OUT),
    "vllm_xargs": (_NO_LIST, _LEFT_OUT),
    "documents": (_NO_LIST, "left out: give them in a message"),
    "chat_template": ((None,), "left out: the model's own is used"),
    "session_params": (_NO_LIST, "left out: a shared prefix is found without"),
    "return_hidden_states": (_OFF, "false"),
    "return_tokens_as_token_ids": (_OFF, "false; see return_token_ids"),
    "return_routed_experts": (_OFF, "false"),
    "return_prompt_text": (_OFF, "false"),
    "return_meta_info": (_OFF, "false; see include_timing"),
    "return_cached_tokens_details": (_OFF, "false; usage tells of cached tokens"),
    "input_ids": (_NO_LIST, "left out: /v1/completions takes token ids"),
    "truncation_side": ((None,), "left out: a prompt is taken whole or refused"),
    "logprob_token_ids": (_NO_LIST, "left out; see top_logprobs"),
    "watermarking": (_OFF, "false"),
    "extra_key": ((None, ""), "left out; see cache_salt"),
    "ec_transfer_params": (_NO_LIST, _LEFT_OUT),
    "bootstrap_host": ((None,), _LEFT_OUT),
    "bootstrap_port": ((None,), _LEFT_OUT),
    "bootstrap_room": ((None,), _LEFT_OUT),
    "task": ((None,), _LEFT_OUT),
}


class OtherFields(BaseModel):
    """Known by name and of no effect, or refused by `refuse_others`."""

    # No effect on what is generated.
    user: Any = None
    safety_identifier: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
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
    session_id: Any = None
    custom_labels: Any = None
    stream_interval: Any = None
    routed_dp_rank: Any = None
    data_parallel_rank: Any = None

    # No effect for one value, and refused with any other: see _REFUSED.
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None
    moderation: Any = None
    functions: Any = None
    function_call: Any = None
    suffix: Any = None
    prompt_embeds: Any = None
    skip_special_tokens: Any = None
    detokenize: Any = None
    use_beam_search: Any = None
    early_stopping: Any = None
    length_penalty: Any = None
    truncate_prompt_tokens: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    logits_processors: Any = None
    custom_logit_processor: Any = None
    custom_params: Any = None
    repetition_detection: Any = None
    kv_transfer_params: Any = None
    vllm_xargs: Any = None
    documents: Any = None
    chat_template: Any = None
    session_params: Any = None
    return_hidden_states: Any = None
    return_tokens_as_token_ids: Any = None
    return_routed_experts: Any = None
    return_prompt_text: Any = None
    return_meta_info: Any = None
    return_cached_tokens_details: Any = None
    input_ids: Any = None
    truncation_side: Any = None
    logprob_token_ids: Any = None
    watermarking: Any = None
    extra_key: Any = None
    ec_transfer_params: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    task: Any = None

    def refuse_others(self) -> None:
        """Raises InvalidRequest naming a field that cannot be honoured."""
        for name in self.model_fields_set & _REFUSED.keys():
            value = getattr(self, name)
            harmless, allowed = _REFUSED[name]
            if not any(type(value) is type(item) and value == item for item in harmless):
                raise InvalidRequest.of(name, value, allowed)

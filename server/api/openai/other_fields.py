"""Fields of OpenAI's, SGLang's and vLLM's APIs that have no effect or are not supported here.

A field that would have changed the output is refused unless it asks for what happens anyhow.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from ...protocol.fixed_fields import only, refuse_others

_NO_LIST: tuple[Any, ...] = (None, [], {})
_OFF = (None, False)
_LEFT_OUT = "left out"


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
    audio: Any = only((None,), "left out: the model makes text only")
    modalities: Any = only((None, [], ["text"]), '["text"]')
    web_search_options: Any = only((None,), "left out: there is no search")
    moderation: Any = only((None,), "left out: there is no moderation")
    functions: Any = only(_NO_LIST, "left out: tools is today's name")
    function_call: Any = only((None, "none"), "left out: tool_choice is today's name")
    suffix: Any = only((None, ""), "left out: text cannot be filled in before a suffix")
    prompt_embeds: Any = only(_NO_LIST, _LEFT_OUT)
    skip_special_tokens: Any = only((None, True), "true")
    detokenize: Any = only((None, True), "true")
    truncate_prompt_tokens: Any = only((None,), "left out: a prompt is taken whole or refused")
    allowed_token_ids: Any = only(_NO_LIST, "left out; see logit_bias and the constraints")
    bad_words: Any = only(_NO_LIST, "left out; see logit_bias and the constraints")
    logits_processors: Any = only(_NO_LIST, _LEFT_OUT)
    custom_logit_processor: Any = only((None,), _LEFT_OUT)
    custom_params: Any = only(_NO_LIST, _LEFT_OUT)
    repetition_detection: Any = only(_NO_LIST, _LEFT_OUT)
    kv_transfer_params: Any = only(_NO_LIST, _LEFT_OUT)
    vllm_xargs: Any = only(_NO_LIST, _LEFT_OUT)
    documents: Any = only(_NO_LIST, "left out: give them in a message")
    chat_template: Any = only((None,), "left out: the model's own is used")
    session_params: Any = only(_NO_LIST, "left out: a shared prefix is found without")
    return_hidden_states: Any = only(_OFF, "false")
    return_tokens_as_token_ids: Any = only(_OFF, "false; see return_token_ids")
    return_routed_experts: Any = only(_OFF, "false")
    return_prompt_text: Any = only(_OFF, "false")
    return_meta_info: Any = only(_OFF, "false; see include_timing")
    return_cached_tokens_details: Any = only(_OFF, "false; usage tells of cached tokens")
    input_ids: Any = only(_NO_LIST, "left out: /v1/completions takes token ids")
    truncation_side: Any = only((None,), "left out: a prompt is taken whole or refused")
    logprob_token_ids: Any = only(_NO_LIST, "left out; see top_logprobs")
    watermarking: Any = only(_OFF, "false")
    extra_key: Any = only((None, ""), "left out; see cache_salt")
    ec_transfer_params: Any = only(_NO_LIST, _LEFT_OUT)
    bootstrap_host: Any = only((None,), _LEFT_OUT)
    bootstrap_port: Any = only((None,), _LEFT_OUT)
    bootstrap_room: Any = only((None,), _LEFT_OUT)
    task: Any = only((None,), _LEFT_OUT)

    def refuse_others(self) -> None:
        """Raises InvalidRequest naming a field that cannot be honoured."""
        refuse_others(self)

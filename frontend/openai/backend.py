"""Backends on endpoints with OpenAI's API: any of them, or a known kind of server at an address."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ...errors import EngineError, InvalidRequest
from ..client.backend import Backend
from ..protocol.numbers import Range
from .calls import TokenUsage
from .channel import OpenAIChannel, models_of
from .flavors import FLAVORS, Flavor, flavor_of
from .http_client import Endpoint

_RATES = Range(0, 1e12, is_above=True)
DEFAULT_BASE_URL = "https://api.openai.com/v1"
_ENVIRONMENT = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
# Models that OpenAI serves at the completions endpoint; all others use chat.
_TEXT_MODELS = re.compile(r"-instruct(-\d+)?$|^(davinci|babbage)-002$")


class OpenAI(Backend):
    """A model behind an OpenAI-compatible endpoint. Programs run in this process, call by call;
    what the endpoint does not support is refused where the program waits.

    Args:
        model_name: the endpoint's name of the model.
        is_chat_model: True: chat completions, messages only. False: completions, text only. None:
            by the name for OpenAI's own models; both for servers that have both.
        chat_template: must be None: the endpoint applies its template (an argument of SGLang's).
        is_azure: an Azure deployment called `model_name`, at `azure_endpoint` under `api_version`.
        base_url: up to and including "/v1" (default: $OPENAI_BASE_URL, else OpenAI's).
        api_key: default $OPENAI_API_KEY (Azure: $AZURE_OPENAI_API_KEY).
        flavor: "openai" (plain, the default), "stemma", "vllm" or "sglang": what the endpoint
            supports beyond OpenAI's API; "auto" detects it by its list of models.
        organization: default $OPENAI_ORG_ID.
        project: default $OPENAI_PROJECT_ID.
        default_headers: sent with each call.
        default_query: sent with each call.
        timeout: seconds of silence after which a call counts as lost.
        max_retries: further attempts after 429, 5xx, timeouts and broken connections.
        max_concurrency: concurrent calls; further ones wait.
        requests_per_minute: above 0; further calls wait. None: no limit.
        tokens_per_minute: the same for tokens of prompts (estimated) and `max_tokens`.

    Raises InvalidRequest for arguments that are not allowed, with "auto" also EngineError.
    """

    channel: OpenAIChannel

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: None = None,
        is_azure: bool = False,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        flavor: str = "openai",
        organization: str | None = None,
        project: str | None = None,
        default_headers: Mapping[str, str] | None = None,
        default_query: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        max_retries: int = 4,
        max_concurrency: int = 256,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        azure_endpoint: str | None = None,
        api_version: str | None = None,
    ) -> None:
        if not isinstance(model_name, str) or not model_name:
            raise InvalidRequest.of("model_name", model_name, "the endpoint's name of a model")
        if chat_template is not None:
            allowed = "None; the endpoint applies the model's own"
            raise InvalidRequest.of("chat_template", chat_template, allowed)
        if max_concurrency < 1:
            raise InvalidRequest.of("max_concurrency", max_concurrency, "an integer >= 1")
        rates = {
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
        }
        for name, rate in rates.items():
            if rate is not None:
                _RATES.require(name, rate)
        if is_azure:
            url, headers, query = _azure(model_name, azure_endpoint, api_key, api_version)
        else:
            url, headers, query = _openai(base_url), {}, {}
            headers |= _authorization(url, api_key)
            headers |= _account(organization, project)
        endpoint = Endpoint(
            url,
            {**headers, **(default_headers or {})},
            {**query, **(default_query or {})},
            timeout,
            max_retries,
            max_concurrency,
            requests_per_minute,
            tokens_per_minute,
        )
        known = _detected(endpoint, model_name) if flavor == "auto" else flavor_of(flavor)
        has_text, has_chat = _endpoints(model_name, known, is_chat_model)
        super().__init__(
            OpenAIChannel(endpoint, model_name, known, has_text=has_text, has_chat=has_chat)
        )

    @property
    def token_usage(self) -> TokenUsage:
        """Prompt tokens, completion tokens and calls so far, as the endpoint counts them."""
        return self.channel.usage

    def get_server_info(self) -> dict[str, Any]:
        """Model and address: an endpoint reports no more."""
        return {**self.channel.info, "base_url": self.channel.base_url}


class RuntimeEndpoint(Backend):
    """SGLang's name for a server at an HTTP address: `stemma serve`, or an SGLang or vLLM server,
    detected by the owner of its one model.

    Args:
        base_url: "http://HOST:PORT".
        api_key: sent with each call.
        chat_template_name: must be None: the server applies the model's own (an argument of
        SGLang's).

    Raises EngineError where none of them responds.
    """

    channel: OpenAIChannel

    def __init__(
        self, base_url: str, api_key: str | None = None, chat_template_name: None = None
    ) -> None:
        if chat_template_name is not None:
            allowed = "None; the server applies the model's own"
            raise InvalidRequest.of("chat_template_name", chat_template_name, allowed)
        url = f"{_openai(base_url).removesuffix('/v1')}/v1"
        endpoint = Endpoint(url, {"Authorization": f"Bearer {api_key}"} if api_key else {})
        models = [
            m for m in models_of(endpoint) if m.get("owned_by") in FLAVORS.keys() - {"openai"}
        ]
        if len(models) != 1:
            raise EngineError(f"{base_url} serves no one model of its own; see st.OpenAI")
        flavor = FLAVORS[models[0]["owned_by"]]
        name = models[0]["id"]
        super().__init__(OpenAIChannel(endpoint, name, flavor, has_text=True, has_chat=True))

    def get_server_info(self) -> dict[str, Any]:
        """Model and address."""
        return {**self.channel.info, "base_url": self.channel.base_url}


def _openai(base_url: str | None) -> str:
    url = base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE_URL
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise InvalidRequest.of("base_url", url, 'an address "http://..." or "https://..."')
    return url.rstrip("/")


def _authorization(url: str, api_key: str | None) -> dict[str, str]:
    """One's own server often needs no key; OpenAI always does."""
    key = api_key or os.environ.get("OPENAI_API_KEY")
    if not key and url == DEFAULT_BASE_URL:
        raise InvalidRequest.of("api_key", key, "OpenAI's; give it or set OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _account(organization: str | None, project: str | None) -> dict[str, str]:
    given = {"OpenAI-Organization": organization, "OpenAI-Project": project}
    found = {name: given[name] or os.environ.get(env) for name, env in _ENVIRONMENT.items()}
    return {name: value for name, value in found.items() if value}


def _azure(
    deployment: str, azure_endpoint: str | None, api_key: str | None, api_version: str | None
) -> tuple[str, dict[str, str], dict[str, str]]:
    """Address, headers and query of a deployment. Raises InvalidRequest for missing arguments."""
    given = {
        "azure_endpoint": azure_endpoint or os.environ.get("AZURE_OPENAI_ENDPOINT"),
        "api_key": api_key or os.environ.get("AZURE_OPENAI_API_KEY"),
        "api_version": api_version or os.environ.get("OPENAI_API_VERSION"),
    }
    for name, value in given.items():
        if not value:
            raise InvalidRequest.of(name, value, "given where is_azure is true")
    url = f"{str(given['azure_endpoint']).rstrip('/')}/openai/deployments/{deployment}"
    return url, {"api-key": str(given["api_key"])}, {"api-version": str(given["api_version"])}


def _detected(endpoint: Endpoint, model: str) -> Flavor:
    """By the model's owner, as the model lists of Stemma, vLLM and SGLang name it."""
    owners = {item["id"]: item.get("owned_by") for item in models_of(endpoint)}
    return FLAVORS.get(str(owners.get(model)), FLAVORS["openai"])


def _endpoints(model: str, flavor: Flavor, is_chat_model: bool | None) -> tuple[bool, bool]:
    """Whether the model is served at completions, and at chat completions."""
    if is_chat_model is not None:
        return not is_chat_model, is_chat_model
    if flavor.has_both:
        return True, True
    is_text = _TEXT_MODELS.search(model) is not None
    return is_text, not is_text

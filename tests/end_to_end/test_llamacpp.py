"""llama.cpp's own endpoints over HTTP, on the embedded model and on one that can infill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from engine_thread import engine_in_thread
from http_server import http_client
from waiting import wait_until

import stemma as st
from stemma.runtime.checkpoint.location import EMBEDDED_MODEL

MODEL = "stemma-tiny"
KITE = {"prompt": "Nora has a red", "n_predict": 8, "temperature": 0}


@pytest.fixture
def http(served: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def infilling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server of a model whose tokenizer has Qwen's tokens for it."""
    folder = tmp_path_factory.mktemp("model") / "coder"
    shutil.copytree(EMBEDDED_MODEL, folder)
    path = folder / "tokenizer.json"
    text = path.read_text("utf-8")
    for number, name in enumerate(("fim_prefix", "fim_suffix", "fim_middle", "endoftext")):
        text = text.replace(f"<|reserved_{number}|>", f"<|{name}|>")
    path.write_text(text, "utf-8")
    with engine_in_thread(folder, max_total_tokens=4096) as engine:
        with http_client(engine) as client:
            yield client


def ask(http: httpx.Client, **body: Any) -> Any:
    reply = http.post("/completion", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in reply.text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def error_of(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


# --- /completion ----------------------------------------------------------------------------------


def test_a_completion_is_that_of_the_other_apis_with_figures(http: httpx.Client) -> None:
    answer = ask(http, **KITE, return_tokens=True)
    asked = {"prompt": KITE["prompt"], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    (choice,) = http.post("/v1/completions", json=asked).json()["choices"]
    assert (answer["content"], answer["tokens"]) == (choice["text"], choice["token_ids"])
    assert (answer["stop"], answer["prompt"], answer["model"]) == (True, KITE["prompt"], MODEL)
    assert answer["tokens_predicted"] == len(answer["tokens"])
    assert answer["generation_settings"].items() >= {"n_predict": 8, "n_ctx": 2048}.items()
    timings = answer["timings"]
    assert timings["predicted_n"] == answer["tokens_predicted"] and timings["predicted_ms"] > 0
    assert timings["prompt_n"] + timings["cache_n"] == answer["tokens_evaluated"]
    assert ask(http, **KITE)["tokens"] == []


def test_a_stream_adds_up_and_ends_with_the_figures(http: httpx.Client) -> None:
    whole = ask(http, **KITE, return_tokens=True, n_probs=2)
    *parts, last = events(http.post("/completion", json={**KITE, "stream": True, "n_probs": 2}))
    assert [part["stop"] for part in parts] == [False] * len(parts) and last["stop"]
    assert "".join(part["content"] for part in [*parts, last]) == whole["content"]
    assert [i for part in [*parts, last] for i in part["tokens"]] == whole["tokens"]
    told = [e for part in [*parts, last] for e in part.get("completion_probabilities", ())]
    assert [e["id"] for e in told] == [e["id"] for e in whole["completion_probabilities"]]
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in told)
    assert last["stop_type"] == whole["stop_type"]
    assert last["timings"]["predicted_n"] == whole["tokens_predicted"]


def test_several_prompts_and_samples_are_a_list(http: httpx.Client) -> None:
    ids = http.post("/tokenize", json={"content": "Nora has a red", "add_special": True})
    both = ask(http, **{**KITE, "prompt": [KITE["prompt"], ids.json()["tokens"]]})
    assert both[0]["content"] == both[1]["content"] == ask(http, **KITE)["content"]
    assert [each["prompt"] for each in both] == [KITE["prompt"], ""]
    samples = ask(http, prompt="x", n_predict=4, temperature=2.0, seed=1, n_cmpl=3)
    assert [each["index"] for each in samples] == [0, 1, 2]
    assert len({each["content"] for each in samples}) > 1


def test_ids_and_texts_make_one_prompt(http: httpx.Client) -> None:
    def ids(text: str) -> list[int]:
        found: list[int] = http.post("/tokenize", json={"content": text}).json()["tokens"]
        return found

    mixed = ask(http, **{**KITE, "prompt": ["Nora", *ids(" has a"), " red"]})
    assert mixed["content"] == ask(http, **KITE)["content"]
    assert mixed["tokens_evaluated"] == 1 + len(ids("Nora has a red"))
    assert ask(http, **{**KITE, "prompt": {"prompt_string": "Nora has a red"}})["content"]


def test_why_it_stopped_is_told(http: httpx.Client) -> None:
    text = ask(http, **KITE, ignore_eos=True)["content"]
    word = ask(http, **KITE, ignore_eos=True, stop=[text[2:4]])
    assert (word["stop_type"], word["stopping_word"]) == ("word", text[2:4])
    assert ask(http, **{**KITE, "n_predict": 1})["stop_type"] == "limit"
    chat = http.post("/apply-template", json={"messages": [{"role": "user", "content": "Hi"}]})
    ended = ask(http, prompt="x", grammar='root ::= "yes" | "no"')
    assert ended["content"] in ("yes", "no") and ended["stop_type"] == "eos"
    assert chat.json() == {"prompt": "<|user|>Hi<|end|><|assistant|>"}


def test_a_schema_is_kept_and_a_bias_heeded(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    assert json.loads(ask(http, prompt="x", json_schema=schema)["content"]) == {"a": 7}
    first = ask(http, **KITE, return_tokens=True)["tokens"][0]
    for bias in ([[first, False]], {str(first): -100}):
        assert ask(http, **KITE, return_tokens=True, logit_bias=bias)["tokens"][0] != first


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_are_made_where_none_are_asked_for(http: httpx.Client, stream: bool) -> None:
    prompt = f"Only to be cached{' now' if stream else ''}."
    reply = http.post("/completion", json={"prompt": prompt, "n_predict": 0, "stream": stream})
    told = events(reply)[-1] if stream else reply.json()
    assert (told["content"], told["tokens_predicted"], told["tokens"]) == ("", 0, [])
    again = ask(http, prompt=prompt, n_predict=1)
    assert again["tokens_cached"] >= again["tokens_evaluated"] - 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"repeat_penalty": 1.2, "repeat_last_n": 64}, "repeat_last_n"),
        ({"logit_bias": [["kite", -1]]}, "logit_bias"),
        ({"n_predict": -3}, "n_predict"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [5, {"prompt_string": "x"}]}, "prompt"),
        ({"prompt": [5, [6, 7]]}, "prompt"),
        ({"prompt": [5, *["x"] * 1025]}, "prompt"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["AA=="]}}, "prompt.multimodal_data"),
        ({"grammar": 'root ::= "', "n_predict": 2}, "grammar"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    assert error_of(http.post("/completion", json={**KITE, **fields}))["param"] == param


def test_a_client_that_leaves_a_stream_stops_its_decoding(served: Any) -> None:
    body = {"prompt": "x", "n_predict": 1500, "ignore_eos": True, "stream": True, "seed": 1}
    with st.Runtime(served.endpoint) as runtime:
        url = f"{served.url}/completion"
        with httpx.stream("POST", url, json={**body, "temperature": 3.0}) as reply:
            lines = reply.iter_lines()
            next(lines)
            assert runtime.get_server_info()["num_running"] == 1
        wait_until(lambda: not runtime.get_server_info()["num_running"])


# --- /infill --------------------------------------------------------------------------------------


def test_text_is_filled_in_by_a_model_that_has_the_tokens(infilling: httpx.Client) -> None:
    def ids(text: str) -> list[int]:
        found: list[int] = infilling.post("/tokenize", json={"content": text}).json()["tokens"]
        return found

    asked = {"input_prefix": "def f(", "input_suffix": "): pass", "n_predict": 6, "temperature": 0}
    filled = infilling.post("/infill", json=asked).json()
    prompt = [1, 6, *ids("def f("), 7, *ids("): pass"), 8]
    plain = infilling.post("/completion", json={**KITE, "n_predict": 6, "prompt": prompt}).json()
    assert filled["content"] == plain["content"]
    assert filled["tokens_evaluated"] == len(prompt)
    extra = {"input_extra": [{"filename": "a.py", "text": "x = 1"}], "prompt": "a"}
    longer = infilling.post("/infill", json={**asked, **extra}).json()
    assert longer["tokens_evaluated"] == len(prompt) + len(ids("x = 1\n")) + len(ids("a"))
    assert events(infilling.post("/infill", json={**asked, "stream": True}))[-1]["stop"]


def test_ollamas_suffix_is_the_same(infilling: httpx.Client) -> None:
    asked = {"input_prefix": "def f(", "input_suffix": "): pass", "n_predict": 6, "temperature": 0}
    filled = infilling.post("/infill", json=asked).json()
    options = {"num_predict": 6, "temperature": 0}
    body = {"prompt": "def f(", "suffix": "): pass", "stream": False, "options": options}
    assert infilling.post("/api/generate", json=body).json()["response"] == filled["content"]
    assert "insert" in infilling.post("/api/show", json={}).json()["capabilities"]


def test_other_models_refuse_it_with_the_reason(http: httpx.Client) -> None:
    error = error_of(http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"}))
    assert error["param"] == "input_suffix" and "no tokens" in error["message"]


# --- the server -----------------------------------------------------------------------------------


def test_its_properties_and_slots_are_told(http: httpx.Client) -> None:
    props = http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert (props["bos_token"], props["eos_token"]) == ("<|begin|>", "<|end|>")
    assert "message['role']" in props["chat_template"]
    slots = http.get("/slots?fail_on_no_slot=1").json()
    assert len(slots) == props["total_slots"] and not any(s["is_processing"] for s in slots)
    assert http.get("/v1/health").json() == {"status": "ok"}


def test_tokens_come_as_its_clients_ask_for_them(http: httpx.Client) -> None:
    pieces = http.post("/tokenize", json={"content": "a red kite", "with_pieces": True}).json()
    assert "".join(token["piece"] for token in pieces["tokens"]) == "a red kite"
    ids = [token["id"] for token in pieces["tokens"]]
    assert http.post("/detokenize", json={"tokens": ids}).json()["content"] == "a red kite"
    special = http.post("/tokenize", json={"content": "a red kite", "add_special": True}).json()
    assert special["tokens"] == [1, *ids]

"""Images over HTTP, in the words of several APIs, and in programs: on a small random model."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from engine_thread import Backend, engine_in_thread
from http_server import http_server
from image_models import IMAGE, make_image_model, png
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from PIL import Image as Pillow
from waiting import PATIENCE_S

import stemma as st

MODEL = "qwen3-vl"
OPTIONS: dict[str, Any] = {"max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    folder = make_image_model(tmp_path_factory.mktemp("model") / MODEL, MODEL)
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_images": 4}
    with engine_in_thread(folder, max_total_tokens=8192, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "a.png").write_bytes(png(40, 50, 8))
    return folder


@pytest.fixture(scope="module")
def url(engine: Backend, root: Path) -> Iterator[str]:
    with http_server(engine, image_root=str(root), image_hosts=("127.0.0.1", "localhost")) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{_base64(data)}"


def shown(*parts: str | bytes) -> list[Any]:
    """A user's message: texts, URLs of what is no image's bytes, images."""
    return [{"role": "user", "content": [_part(part) for part in parts]}]


def _part(part: str | bytes) -> dict[str, Any]:
    if isinstance(part, bytes):
        return {"type": "image_url", "image_url": {"url": data_url(part), "detail": "high"}}
    if part.startswith(("file:", "http")):
        return {"type": "image_url", "image_url": {"url": part}}
    return {"type": "text", "text": part}


def chat(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **{**OPTIONS, **fields})


def test_an_image_counts_as_its_tokens_and_is_found_again(client: openai.OpenAI) -> None:
    """40 x 50 pixels of a model with 8 to a token: 5 x 6 of them."""
    text = chat(client, shown("What is ", "?"))
    first = chat(client, shown("What is ", png(40, 50, 1), "?"))
    assert first.usage.prompt_tokens == text.usage.prompt_tokens + 5 * 6 + 2
    again = chat(client, shown("What is ", png(40, 50, 1), "?"))
    assert again.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1
    assert again.choices[0].message.content == first.choices[0].message.content
    other = chat(client, shown("What is ", png(40, 50, 2), "?"))
    head = text.usage.prompt_tokens_details.cached_tokens
    assert other.usage.prompt_tokens_details.cached_tokens <= head + 30
    assert other.usage.prompt_tokens_details.cached_tokens < first.usage.prompt_tokens - 30
    assert other.choices[0].message.content != first.choices[0].message.content


def test_a_turn_behind_an_image_is_found_again(client: openai.OpenAI) -> None:
    messages = shown("Look: ", png(33, 60, 3))
    first = chat(client, messages)
    said = first.choices[0].message.content
    turn = [*messages, {"role": "assistant", "content": said}, *shown(png(20, 20, 4), "And this?")]
    second = chat(client, turn)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    messages = shown(png(40, 50, 5), "What?", png(24, 24, 6))
    whole = chat(client, messages).choices[0].message.content
    chunks = list(chat(client, messages, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole


def test_images_are_read_in_system_and_tool_messages(client: openai.OpenAI) -> None:
    picture = [_part(png(40, 50, 7))]
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Style: "}, *picture]},
        {"role": "user", "content": "Go."},
    ]
    assert chat(client, messages).usage.prompt_tokens > 30
    answered = [
        *messages,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": picture},
    ]
    with pytest.raises(openai.BadRequestError, match="image in a tool's message"):
        chat(client, answered)  # its template knows no results of tools


def test_a_program_and_the_api_share_an_image(engine: Backend, client: openai.OpenAI) -> None:
    picture = png(48, 48, 9)

    @st.function
    def ask(s: Any) -> None:
        s += st.user("See " + st.image(picture) + "!")
        s += st.assistant(st.gen("a", max_tokens=6, temperature=0))

    state = ask.run(backend=engine)
    found = chat(client, shown("See ", picture, "!"))
    assert found.choices[0].message.content == state["a"]
    assert found.usage.prompt_tokens_details.cached_tokens > 36


def test_forks_behind_an_image_share_it(engine: Backend) -> None:
    @st.function
    def ask(s: Any) -> None:
        s += st.user("Of " + st.image(png(48, 40, 10)) + ":")
        branches = s.fork(3)
        for index, branch in enumerate(branches):
            branch += st.assistant(f"{index}" + st.gen("a", max_tokens=4, temperature=0))
        s.set_values = [branch.get_meta_info("a") for branch in branches]

    before = engine.get_server_info()["images"]["encoded"]
    state = ask.run(backend=engine)
    cached = [meta["cached_tokens"] for meta in state.set_values]
    assert max(cached) > 30 and engine.get_server_info()["images"]["encoded"] == before + 1


def test_others_words_for_images(url: str) -> None:
    """Anthropic's, Ollama's and OpenAI's responses, and LangChain's content blocks."""
    picture = png(40, 50, 11)
    data = base64.b64encode(picture).decode()
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    source: Any = {"type": "base64", "media_type": "image/png", "data": data}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
    said = claude.messages.create(
        model=MODEL,
        max_tokens=6,
        messages=[{"role": "user", "content": blocks}],
        extra_body={"temperature": 0},
    )
    assert said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0) > 30
    parts = [
        {"type": "input_image", "image_url": data_url(picture)},
        {"type": "input_text", "text": "What?"},
    ]
    body = {"model": MODEL, "input": [{"role": "user", "content": parts}], "max_output_tokens": 6}
    told = httpx.post(f"{url}/v1/responses", json={**body, "temperature": 0}, timeout=PATIENCE_S)
    assert told.status_code == 200, told.text
    assert told.json()["output"][0]["content"][0]["text"] == said.content[0].text  # type: ignore[union-attr]
    assert told.json()["usage"]["input_tokens_details"]["cached_tokens"] > 30
    asked = {"role": "user", "content": "What?", "images": [data]}
    options = {"temperature": 0, "num_predict": 6}
    body = {"model": MODEL, "messages": [asked], "stream": False, "options": options}
    llama = httpx.post(f"{url}/api/chat", json=body, timeout=PATIENCE_S)
    assert llama.json()["message"]["content"] == said.content[0].text  # type: ignore[union-attr]
    chain = ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=MODEL, temperature=0)
    block = {"type": "image", "base64": data, "mime_type": "image/png"}
    message = HumanMessage(content=[block, {"type": "text", "text": "What?"}])
    assert chain.invoke([message], max_tokens=6).content == said.content[0].text  # type: ignore[union-attr]


def test_tokens_of_images_are_counted_as_prompts_have_them(url: str, client: openai.OpenAI) -> None:
    """Turned upright first, wherever its bytes are."""
    exif = Pillow.Exif()
    exif[0x0112] = 6
    written = io.BytesIO()
    Pillow.new("RGB", (90, 20)).save(written, "JPEG", exif=exif)
    messages = shown("Of ", png(40, 50, 1), " and ", written.getvalue(), "?")
    usage = chat(client, messages).usage
    counted = httpx.post(f"{url}/tokenize", json={"messages": messages}, timeout=PATIENCE_S).json()
    assert counted["count"] == usage.prompt_tokens == len(counted["tokens"])
    assert counted["tokens"].count(IMAGE) == 5 * 6 + 11 * 2
    rendered = httpx.post(
        f"{url}/apply-template", json={"messages": messages}, timeout=PATIENCE_S
    ).json()["prompt"]
    assert rendered.count("<|image_pad|>") == 52 and rendered.endswith("assistant\n")
    source = {"type": "base64", "media_type": "image/png", "data": _base64(png(40, 50, 1))}
    told: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    made = claude.messages.create(model=MODEL, max_tokens=1, messages=told).usage
    found = claude.messages.count_tokens(model=MODEL, messages=told).input_tokens
    assert found == made.input_tokens + (made.cache_read_input_tokens or 0) > 30
    bad = shown("Of ", b"GIF87a")
    refused = httpx.post(f"{url}/tokenize", json={"messages": bad}, timeout=PATIENCE_S)
    assert refused.status_code == 400 and "a PNG, JPEG" in refused.text


def test_clients_that_ask_are_told_that_the_model_sees(url: str) -> None:
    told = httpx.post(f"{url}/api/show", json={"model": MODEL}, timeout=PATIENCE_S).json()
    assert "vision" in told["capabilities"]
    props = httpx.get(f"{url}/props", timeout=PATIENCE_S).json()
    assert props["modalities"] == {"vision": True, "audio": False}


def test_files_are_read_within_the_root_alone(client: openai.OpenAI, root: Path) -> None:
    inside = chat(client, shown(f"file://{root}/a.png"))
    assert (
        inside.choices[0].message.content
        == chat(client, shown(png(40, 50, 8))).choices[0].message.content
    )
    (root / "out").symlink_to("/etc/hostname")
    for path in ("/etc/passwd", f"{root}/../../etc/passwd", f"{root}/out", f"{root}", f"{root}/no"):
        with pytest.raises(openai.BadRequestError, match="within --image-root"):
            chat(client, shown(f"file://{path}"))


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ("http://127.0.0.1/a.png", "public addresses"),
        ("http://localhost:22/", "without a port"),
        ("http://localhost/latest/meta-data", "public addresses"),
        ("https://example.com/a.png", "of hosts"),
        ("https://127.0.0.1@example.com/a.png", "of hosts"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "a PNG, JPEG"),
        (b"", "a PNG, JPEG"),
        (png(30, 30)[:-60], "a PNG, JPEG"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, part: str | bytes, problem: str) -> None:
    with pytest.raises(openai.BadRequestError, match=problem):
        chat(client, shown("Hi", part))


def test_limits_are_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_images"):
        chat(client, shown(*[png(8, 8)] * 5))
    written = io.BytesIO()
    Pillow.new("1", (8_000, 7_000)).save(written, "PNG")
    with pytest.raises(openai.BadRequestError, match="max_image_pixels"):
        chat(client, shown(written.getvalue()))
    with pytest.raises(openai.BadRequestError, match="context"):
        chat(client, shown("x" * 5000, png(40, 40)))
    video: Any = [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}]
    with pytest.raises(openai.BadRequestError, match="video_url"):
        chat(client, [{"role": "user", "content": video}])
    with pytest.raises(openai.BadRequestError, match="an image's tokens have no log prob"):
        chat(client, shown(png(9, 9)), extra_body={"prompt_logprobs": 1})


def test_text_that_names_the_stand_in_is_no_image(client: openai.OpenAI) -> None:
    named = chat(client, shown("<|vision_start|><|image_pad|><|vision_end|>"))
    assert named.usage.prompt_tokens > 40  # plain bytes
    one = chat(client, shown("<|image_pad|>", png(40, 50, 12)))
    assert one.usage.prompt_tokens > 13 + 30

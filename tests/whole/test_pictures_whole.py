"""Images over the whole way, by the clients that people use: a served model in one process, whose answers are
transformers'."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai import OpenAI

from tests.support.seeing_models import SeeingOracle, asks, data_url, pattern, png, write_qwen3_vl
from tests.support.served_cluster import Serving, serving

COUNT = 6
FILE = png(pattern(60, 40))
MESSAGES: list[Any] = [asks("see ", FILE, " it, and ", png(pattern(16, 63)))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_vl(tmp_path_factory.mktemp("seer") / "seer")


@pytest.fixture(scope="module")
def shop() -> Iterator[int]:
    """The port of a server of images on this machine."""

    class Shop(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/one.png" else 404)
            self.end_headers()
            self.wfile.write(FILE)

        def log_message(self, *about: object) -> None:
            """Nothing is written."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Shop) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory, shop: int) -> Iterator[Serving]:
    router = {"max_image_pixels": 1 << 20, "image_urls": f"localhost:{shop}", "image_url_networks": "127.0.0.0/8, ::1"}
    sections: dict[str, Any] = {"transfer": {"plane": "local"}, "router": router}
    with serving(folder, tmp_path_factory.mktemp("run"), sections=sections) as found:
        yield found
        found.settle()


@pytest.fixture(scope="module")
def client(cluster: Serving) -> Iterator[Any]:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def wanted(folder: Path) -> tuple[int, str]:
    """How many tokens transformers makes of the prompt, and the text of its answer."""
    oracle = SeeingOracle(folder)
    prompt, tokens = oracle.generate(MESSAGES, COUNT)
    return len(prompt), oracle.parts[0].decode(tokens, skip_special_tokens=True)


OPTIONS: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.mark.slow
def test_chats_with_images_get_transformers_answers(client: OpenAI, wanted: tuple[int, str]) -> None:
    chat = client.chat.completions.create(model="seer", messages=MESSAGES, max_completion_tokens=COUNT, **OPTIONS)
    assert (chat.usage and chat.usage.prompt_tokens, chat.choices[0].message.content) == wanted
    stream = client.chat.completions.create(
        model="seer", messages=MESSAGES, max_completion_tokens=COUNT, stream=True, **OPTIONS
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == wanted[1]


@pytest.mark.slow
def test_an_image_by_its_url_gets_the_same_as_its_data(client: OpenAI, wanted: tuple[int, str], shop: int) -> None:
    named: Any = json.loads(json.dumps(MESSAGES))
    named[0]["content"][1]["image_url"]["url"] = f"http://localhost:{shop}/one.png"
    chat = client.chat.completions.create(model="seer", messages=named, max_completion_tokens=COUNT, **OPTIONS)
    assert (chat.usage and chat.usage.prompt_tokens, chat.choices[0].message.content) == wanted
    named[0]["content"][1]["image_url"]["url"] = f"http://localhost:{shop}/two.png"
    with pytest.raises(openai.BadRequestError, match="answered with status 404"):
        client.chat.completions.create(model="seer", messages=named, max_completion_tokens=COUNT, **OPTIONS)


@pytest.mark.slow
def test_responses_with_images_get_the_same(client: OpenAI, wanted: tuple[int, str]) -> None:
    parts = [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
        for part in MESSAGES[0]["content"]
    ]
    asked: Any = [{"role": "user", "content": parts}]
    found = client.responses.create(model="seer", input=asked, max_output_tokens=COUNT, **OPTIONS)
    assert (found.usage and found.usage.input_tokens, found.output_text) == wanted


@pytest.mark.slow
def test_anthropics_blocks_get_the_same(cluster: Serving, wanted: tuple[int, str]) -> None:
    blocks: list[Any] = []
    for part in MESSAGES[0]["content"]:
        if part["type"] == "text":
            blocks.append({"type": "text", "text": part["text"]})
        else:
            source = {"type": "base64", "media_type": "image/png", "data": part["image_url"]["url"].partition(",")[2]}
            blocks.append({"type": "image", "source": source})
    assert base64.b64decode(blocks[1]["source"]["data"]) == FILE
    with anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0) as client:
        said = client.messages.create(
            model="seer",
            messages=[{"role": "user", "content": blocks}],
            max_tokens=COUNT,
            extra_body={"ignore_eos": True, "temperature": 0},
        )
    text = "".join(block.text for block in said.content if block.type == "text")
    assert (said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0), text) == wanted


@pytest.mark.slow
def test_what_is_no_image_gets_a_400_and_nobody_else_notices(client: OpenAI, wanted: tuple[int, str]) -> None:
    large = png(pattern(1025, 1024))
    for url, words in (
        (data_url(b"hello"), "no image"),
        (data_url(large), "at most"),
        ("http://x/y.png", "from that host"),
    ):
        messages: list[Any] = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(model="seer", messages=messages, max_completion_tokens=1)
    chat = client.chat.completions.create(model="seer", messages=MESSAGES, max_completion_tokens=COUNT, **OPTIONS)
    assert chat.choices[0].message.content == wanted[1]


@pytest.mark.slow
def test_models_say_that_images_are_taken(cluster: Serving) -> None:
    assert httpx.get(f"{cluster.url}/v1/models").json()["data"][0]["images"] is True

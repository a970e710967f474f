"""What clients of other servers ask for and isn't here is refused with the reason."""

from __future__ import annotations

import openai
import pytest
from openai import OpenAI

from tests.router.http_server import Server


@pytest.mark.parametrize(
    ("method", "path", "why"),
    [
        ("POST", "/embeddings", "embeddings are at /v1/embeddings"),
        ("POST", "/load_lora_adapter", "adapters"),
        ("POST", "/v1/images/generations", "images"),
        ("POST", "/v1/audio/transcriptions", "audio"),
        ("GET", "/v1/uploads/upload-1", "stored"),
        ("POST", "/pooling", "vectors are at /v1/embeddings, and classes at /classify"),
        ("GET", "/v1/unknown", "no such endpoint"),
        ("GET", "/unknown", "no such endpoint"),
    ],
)
def test_an_absent_endpoint_says_why(server: Server, method: str, path: str, why: str) -> None:
    answer = server.client.request(method, path)
    assert answer.status_code == 404
    assert why in answer.json()["error"]["message"]


def test_clients_get_their_own_class_of_error(server: Server) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="nothing is moderated here"):
        client.moderations.create(input="x")
    with pytest.raises(openai.NotFoundError, match="adapters"):
        client.chat.completions.create(model="demo-lora", messages=[{"role": "user", "content": "x"}])
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(openai.BadRequestError, match="this server takes no images"):
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": [image]}])  # type: ignore[list-item,misc]

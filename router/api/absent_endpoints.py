"""Endpoints of other servers that clients ask for and that aren't here, each with the reason."""

from __future__ import annotations

_WHY = {
    "this server generates text and makes no embeddings, scores or classes": (
        "/v1/embeddings", "/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/pooling",
        "/classify", "/v1/moderations",
    ),
    "adapters (LoRA) are not supported: there is one set of weights": (
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter",
    ),
    "only text is taken and answered: there are no images and no audio": (
        "/v1/images", "/v1/audio", "/v1/videos", "/v1/realtime",
    ),
    "nothing is stored here: send each request with its whole conversation": (
        "/v1/files", "/v1/uploads", "/v1/batches", "/v1/conversations", "/v1/threads", "/v1/assistants",
        "/v1/vector_stores", "/v1/containers",
    ),
    "models aren't trained here": ("/v1/fine_tuning", "/v1/evals"),
}  # fmt: skip
_BY_PATH = {path: why for why, paths in _WHY.items() for path in paths}


def why_absent(path: str) -> str:
    """Return why an endpoint of a known API isn't here, empty for any other path."""
    parts = path.split("/")
    return next((_BY_PATH[head] for size in (3, 2) if (head := "/".join(parts[:size])) in _BY_PATH), "")

"""Traces of requests, as the Mooncake project publishes them: one JSON object a line, without any text.

``{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [one for each 512 tokens of the prompt]}``; equal
ids are equal content.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from twinpool.contracts.outside_data import read_json

TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceLine:
    """One request of a trace. `at_s` is in the trace's own time."""

    at_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None) -> list[TraceLine]:
    """The first `limit` requests. Raises `ValueError` naming the file and line that is not a request."""
    lines = []
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(islice(file, limit), 1):
            try:
                line = _trace_line(read_json(text))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is not a trace request: {error!r}") from None
            lines.append(line)
    if not lines:
        raise ValueError(f"{path} holds no requests")
    return lines


def _trace_line(raw: dict[str, Any]) -> TraceLine:
    line = TraceLine(raw["timestamp"] / 1000, raw["input_length"], raw["output_length"], tuple(raw["hash_ids"]))
    needed = -(-line.input_length // TRACE_BLOCK_TOKENS)
    if line.input_length < 1 or line.output_length < 1 or len(line.hash_ids) < needed:
        raise ValueError(f"{line.input_length} tokens in, {line.output_length} out, {len(line.hash_ids)} hash ids")
    return line


def scaled_lengths(line: TraceLine, scale: float, max_context: int | None) -> tuple[int, int]:
    """Tokens of a line's prompt and answer, multiplied by `scale`. To fit `max_context`, answers are cut to half of it
    and prompts to the rest."""
    output = max(1, round(line.output_length * scale))
    length = max(1, round(line.input_length * scale))
    if max_context is not None:
        output = min(output, max(1, max_context // 2))
        length = min(length, max_context - output)
    return length, output

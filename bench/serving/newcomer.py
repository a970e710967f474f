"""What a newcomer gets from `twinpool serve --model smollm2`: the time to the first answer, and tokens a second.

    python -m bench.serving.newcomer
    python -m bench.serving.newcomer --llama-cpp VENV/bin/python --transformers

The first start finds nothing: no model, no compiled kernels (both go into a folder of the bench's); the second finds
both. Then one client and eight at a time have answers of a set length to passages of novels, over HTTP. Beside it, on
the same file: llama.cpp's server, which computes on the four bits themselves (an environment of its own with
`xllamacpp`, which has it compiled; `llama-cpp-python` has to be, and serves one request at a time), and transformers'
`generate` on its reading of the file in bfloat16, called directly, with eight prompts as one batch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.common.bench_cluster import serving
from bench.common.child_server import child_server, free_port
from bench.common.machine import headline
from bench.common.section_figures import write_figures
from twinpool.cluster.models.wheel_model import SMOLLM2, VARIABLE

_PROSE = Path(__file__).parents[1] / "demo_model" / "heldout.txt"
_CHAT = {
    "model": SMOLLM2.name,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 40,
}
_ASK_TIMEOUT_S = 900.0
_LLAMA_CPP = """
import os, sys, threading
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_parallel, params.n_ctx, params.kv_unified = 8, 8192, True
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
server = xllamacpp.Server(params)
threading.Event().wait()
"""
_ALONE, _TOGETHER = 2, 8
"""Prompts of one measurement of one client, and of eight at a time."""


def passages(count: int) -> list[str]:
    """Passages of 600 characters, about 150 tokens, each another."""
    text = " ".join(_PROSE.read_text().split())
    return [text[at * 700 : at * 700 + 600] for at in range(count)]


def first_answer_s() -> tuple[float, float, str]:
    """Start the cluster; returns seconds until it was ready and until its first answer came, and the answer."""
    began = time.perf_counter()
    with serving(SMOLLM2.name) as url:
        ready = time.perf_counter()
        answer = httpx.post(f"{url}/v1/chat/completions", json=_CHAT, timeout=_ASK_TIMEOUT_S).json()
        ended = time.perf_counter()
    return ready - began, ended - began, answer["choices"][0]["message"]["content"]


async def tokens_per_s(url: str, at_once: int, tokens: int, prompts: list[str], extra: dict[str, Any]) -> float:
    """Tokens a second of all clients together, each prompt asked once."""
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=_ASK_TIMEOUT_S) as client:

        async def ask(prompt: str) -> int:
            body = {"model": SMOLLM2.name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **extra}
            async with gate:
                answer = await client.post("/v1/completions", json=body)
            return int(answer.raise_for_status().json()["usage"]["completion_tokens"])

        began = time.perf_counter()
        made = sum(await asyncio.gather(*[ask(prompt) for prompt in prompts]))
        return made / (time.perf_counter() - began)


@dataclass
class OverHttp:
    """A server that is asked by one client, or by eight at a time."""

    url: str
    extra: dict[str, Any]
    """What it must be told so that no answer ends early."""

    def __call__(self, at_once: int, tokens: int, prompts: list[str]) -> float:
        return asyncio.run(tokens_per_s(self.url, at_once, tokens, prompts, self.extra))


@contextmanager
def llama_cpp(python: str, file: Path) -> Iterator[str]:
    """llama.cpp's server of the file, eight requests at a time, in its own environment; yields its URL, and ends it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with child_server([python, "-c", _LLAMA_CPP, str(file), str(port)], f"{url}/health"):
        yield url


class ByTransformers:
    """`generate` in this process, greedy; the prompts of one measurement are one batch."""

    def __init__(self, file: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        read = {"gguf_file": file.name}
        plain = {"quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
        torch.set_num_threads(1)  # As the workers have on two cores; on a busy machine two wait for each other.
        self._model = AutoModelForCausalLM.from_pretrained(file.parent, **plain, **read).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(file.parent, padding_side="left", **read)

    def __call__(self, at_once: int, tokens: int, prompts: list[str]) -> float:
        began = time.perf_counter()
        for first in range(0, len(prompts), at_once):
            given = self._tokenizer(prompts[first : first + at_once], return_tensors="pt", padding=True)
            given.pop("token_type_ids", None)
            self._model.generate(**given, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False)
        return len(prompts) * tokens / (time.perf_counter() - began)


Side = Callable[[int, int, list[str]], float]
"""Gives tokens a second: how many at a time, tokens an answer, prompts."""


def compared(sides: dict[str, Side], tokens: int, rounds: int) -> dict[str, dict[int, list[float]]]:
    """Measure all sides in turns, so that they share the machine's noise; each prompt is asked once."""
    prompts = passages(rounds * (_ALONE + _TOGETHER) + 1)
    found: dict[str, dict[int, list[float]]] = {name: {1: [], _TOGETHER: []} for name in sides}
    for side in sides.values():
        side(1, 8, prompts[-1:])  # What a first request warms up.
    for number in range(rounds):
        mine = prompts[number * (_ALONE + _TOGETHER) :]
        for name, side in sides.items():
            alone = side(1, tokens, mine[:_ALONE])
            together = side(_TOGETHER, tokens, mine[_ALONE : _ALONE + _TOGETHER])
            print(f"  {name}: {alone:.1f} alone, {together:.1f} at {_TOGETHER} at a time", flush=True)
            found[name][1].append(alone)
            found[name][_TOGETHER].append(together)
    return found


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _sides(stack: ExitStack, options: argparse.Namespace) -> dict[str, Side]:
    endless, settings = {"ignore_eos": True}, ("cache.device_tokens=16384",)
    sides: dict[str, Side] = {}
    for name, flags in (("twinpool", ()), ("twinpool --colocate", ("--colocate",))):
        sides[name] = OverHttp(stack.enter_context(serving(SMOLLM2.name, settings, flags)), endless)
    if options.llama_cpp:
        url = stack.enter_context(llama_cpp(options.llama_cpp, SMOLLM2.place))
        sides["llama.cpp"] = OverHttp(url, endless)
    if options.transformers:
        sides["transformers generate"] = ByTransformers(SMOLLM2.place)
    return sides


def main() -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="the interpreter of an environment with xllamacpp")
    parser.add_argument("--transformers", action="store_true", help="measure transformers' generate, too")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each figure; the middle one is shown")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    figures: dict[str, Any] = {"machine": headline()}
    print(figures["machine"])
    with tempfile.TemporaryDirectory() as nothing:
        os.environ |= {VARIABLE: f"{nothing}/models", "XDG_CACHE_HOME": f"{nothing}/cache"}
        for name in ("the first start", "the second"):
            ready, answered, answer = first_answer_s()
            figures[name] = {"ready_s": ready, "answered_s": answered, "answer": answer}
            print(f"{name}: ready after {ready:.1f} s, first answer after {answered:.1f} s: {answer}", flush=True)
        with ExitStack() as stack:
            sides = _sides(stack, options)
            results = compared(sides, options.tokens, options.rounds)
    for side, found in results.items():
        figures[side] = {str(at_once): values for at_once, values in found.items()}
        shown = ", ".join(f"{_middle(values):.0f} at {at_once} at a time" for at_once, values in found.items())
        print(f"{side}: tokens a second {shown}")
    write_figures(options.output, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

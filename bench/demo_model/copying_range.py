"""How far back can the model copy a made-up name?

    python -m bench.demo_model.copying_range --tokenizer MODEL_DIR --url http://HOST:PORT
    python -m bench.demo_model.copying_range --tokenizer MODEL_DIR --local MODEL_DIR

Each prompt states a name, goes on with prose and ends just before the name is due again. Names and prose are not in
the training data. The distance is the number of tokens between the two places.
"""

from __future__ import annotations

import concurrent.futures
import json
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.common.bench_report import flag_parser
from bench.demo_model.made_up_names import THINGS, held_out_names

DISTANCES = (50, 100, 200, 300, 400, 500, 600, 700)


FILLER = Path(__file__).parent / "heldout.txt"


COMPLETION_TOKENS = 10
_LEAD_IN_TOKENS = 24
_FILLER_STRIDE = 331

Complete = Callable[[list[str]], list[str]]


@dataclass(frozen=True)
class Prompt:
    """One question: the text, the name that should come next, and how far back it stands."""

    text: str
    name: str
    distance: int


@dataclass(frozen=True)
class Point:
    """One point of the curve."""

    distance: int
    mean_tokens: float
    copied: int
    asked: int

    @property
    def share(self) -> float:
        return self.copied / self.asked


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    """The length of a text for the model."""
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def take_words(words: list[str], start: int, tokens: int, tokenizer: Tokenizer) -> str:
    """Words from ``start`` on (wrapping around), at least ``tokens`` tokens of them."""
    taken: list[str] = []
    total = 0
    position = start
    while total < tokens:
        word = " " + words[position % len(words)]
        total += count_tokens(tokenizer, word)
        taken.append(word)
        position += 1
    return "".join(taken)


def build_prompt(name: str, index: int, distance: int, words: list[str], tokenizer: Tokenizer) -> Prompt:
    """State ``name``, add filler, and ask for it again ``distance`` tokens later (or a few more)."""
    query = f" The secret name of the {THINGS[index * 7 % len(THINGS)]} is"
    start = index * _FILLER_STRIDE
    lead_in = take_words(words, start, _LEAD_IN_TOKENS, tokenizer).rstrip(" .,;:-").lstrip() + "."
    wanted = max(distance - count_tokens(tokenizer, "." + query) - 1, 0)
    filler = take_words(words, start + 100, wanted, tokenizer).rstrip(" .,;:-") + "."
    between = f".{filler}{query}"
    return Prompt(f"{lead_in}{query} {name}{between}", name, count_tokens(tokenizer, between))


def build_prompts(
    distance: int, words: list[str], tokenizer: Tokenizer, names: Iterable[str] | None = None
) -> list[Prompt]:
    """One prompt for each held-out name."""
    chosen = held_out_names() if names is None else names
    return [build_prompt(name, index, distance, words, tokenizer) for index, name in enumerate(chosen)]


def is_copied(prompt: Prompt, completion: str) -> bool:
    """The completion begins with exactly the name (and not with a longer word)."""
    text = completion.lstrip()
    return text.startswith(prompt.name) and not text[len(prompt.name) : len(prompt.name) + 1].isalnum()


def measure(complete: Complete, words: list[str], tokenizer: Tokenizer, distances: Iterable[int]) -> list[Point]:
    """The whole curve."""
    points: list[Point] = []
    for distance in distances:
        prompts = build_prompts(distance, words, tokenizer)
        completions = complete([prompt.text for prompt in prompts])
        copied = sum(is_copied(*pair) for pair in zip(prompts, completions, strict=True))
        mean = sum(prompt.distance for prompt in prompts) / len(prompts)
        points.append(Point(distance, round(mean, 1), copied, len(prompts)))
    return points


def _call(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.load(reply)


def over_http(url: str, model: str | None, workers: int) -> Complete:
    """Complete through an OpenAI-compatible server."""
    base = url.rstrip("/").removesuffix("/v1") + "/v1"
    chosen = model or str(_call(f"{base}/models")["data"][0]["id"])

    def one(text: str) -> str:
        body = {"model": chosen, "prompt": text, "max_tokens": COMPLETION_TOKENS, "temperature": 0}
        return str(_call(f"{base}/completions", body)["choices"][0]["text"])

    def complete(texts: list[str]) -> list[str]:
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            return list(pool.map(one, texts))

    return complete


def with_transformers(folder: Path) -> Complete:
    """Complete with transformers in this process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    loader: Any = AutoModelForCausalLM
    model: Any = loader.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def one(text: str) -> str:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=COMPLETION_TOKENS
            )
        return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))

    return lambda texts: [one(text) for text in texts]


def table(points: list[Point]) -> str:
    """The curve as a Markdown table."""
    rows = ["| distance (tokens) | mean | copied | share |", "| ---: | ---: | ---: | ---: |"]
    rows += [
        f"| {point.distance} | {point.mean_tokens:.1f} | {point.copied}/{point.asked} | {point.share:.0%} |"
        for point in points
    ]
    return "\n".join(rows)


def main() -> None:
    parser = flag_parser(__doc__, json_file=False)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--url", help="address of an OpenAI-compatible server")
    target.add_argument("--local", type=Path, help="model folder to load with transformers")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder that holds tokenizer.json")
    parser.add_argument("--model", help="model name to send (default: the first one the server lists)")
    parser.add_argument("--filler", type=Path, default=FILLER, help="text for the filler")
    parser.add_argument("--distances", type=int, nargs="+", default=list(DISTANCES))
    parser.add_argument("--workers", type=int, default=4, help="requests in flight")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json"))
    words = arguments.filler.read_text(encoding="utf-8").split()
    if arguments.local is not None:
        complete = with_transformers(arguments.local)
    else:
        complete = over_http(arguments.url, arguments.model, arguments.workers)
    points = measure(complete, words, tokenizer, arguments.distances)
    print(json.dumps([asdict(point) for point in points], indent=2) if arguments.json else table(points))


if __name__ == "__main__":
    main()

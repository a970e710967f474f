"""Three models behind one endpoint, in real clusters: answers, a drain, kills of a worker and of a whole model, one
that sleeps by demand, and a batch with lines for all of them.

Every answer is compared with transformers' greedy answer by the weights of the model that the request names.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.support.checkpoints import Oracle, make_checkpoint
from tests.support.served_cluster import Serving, serving, until

pytestmark = pytest.mark.slow
PROMPTS = tuple([7 + 3 * n, 40, 41, 42 + n, 43, 44, 45] * 6 for n in range(6))
TOKENS = 12
MODELS = ("first", "second")
NIGHT = "night"
"""The model that sleeps when nobody asks."""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[list[int]]]]:
    """Of each model its checkpoint and its greedy answers."""
    root, found = tmp_path_factory.mktemp("models"), {}
    for seed, name in enumerate((*MODELS, NIGHT)):
        folder = make_checkpoint(root / name, eos=None, seed=seed)
        found[name] = folder, [Oracle(folder).generate(prompt, TOKENS) for prompt in PROMPTS]
    assert len({str(answers) for _, answers in found.values()}) == len(found)
    return found


@pytest.fixture
def served(oracle: dict[str, tuple[Path, list[list[int]]]], tmp_path: Path) -> Iterator[Serving]:
    models: dict[str, dict[str, Any]] = {
        name: {"launch": {"model": str(folder)}} for name, (folder, _) in oracle.items()
    }
    models["second"]["pools"] = {"decode": 2}
    models[NIGHT] |= {"pools": {"colocated": 1}, "cluster": {"sleep_after_s": 5.0, "sleep_level": 2}}
    file, batch = tmp_path / "models.yaml", {"folder": str(tmp_path / "batches"), "free_bytes": 0}
    common = {"engine": {"threads": 1}, "cache": {"device_tokens": 4096}, "cluster": {"host_memory_share": 0.05}}
    file.write_text(yaml.safe_dump({**common, "batch": batch, "models": models}))
    with serving(None, tmp_path / "run", "--config", str(file)) as running:
        yield running


def ask_all(served: Serving, oracle: dict[str, tuple[Path, list[list[int]]]], *models: str) -> None:
    """Ask each prompt of these models at once: each answer must be its own model's."""

    def one(asked: tuple[str, int]) -> list[int]:
        model, number = asked
        return served.complete(PROMPTS[number], model=model, max_tokens=TOKENS).tokens

    asked = [(model, number) for number in range(len(PROMPTS)) for model in models]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, asked))
    assert found == [oracle[model][1][number] for model, number in asked]


def batch_all(served: Serving, oracle: dict[str, tuple[Path, list[list[int]]]], *models: str) -> None:
    """Have the command answer each prompt of these models in one batch: each answer must be its own model's."""
    sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    lines = [
        {
            "custom_id": f"{model} {number}",
            "url": "/v1/completions",
            "body": {"model": model, "prompt": prompt, **sampling},
        }
        for number, prompt in enumerate(PROMPTS)
        for model in models
    ]
    source, target = served.runtime / "lines.jsonl", served.runtime / "answers.jsonl"
    source.write_text("".join(json.dumps({"method": "POST", **line}) + "\n" for line in lines))
    done = served.twinpool("batch", str(source), "--output", str(target), timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, target.read_text().splitlines())}
    assert {name: body["choices"][0]["token_ids"] for name, body in found.items()} == {
        f"{model} {number}": oracle[model][1][number] for model in models for number in range(len(PROMPTS))
    }


def worker_of(served: Serving, model: str, name: str) -> dict[str, Any]:
    """A worker's row."""
    rows = httpx.get(f"{served.url}/cluster/status", params={"model": model}, timeout=60).json()["workers"]
    return next(dict(row) for row in rows if row["name"] == name)


def serves(served: Serving, model: str, name: str) -> bool:
    return worker_of(served, model, name)["state"] in ("ready", "draining")


def state_of(served: Serving, model: str) -> str:
    return str(httpx.get(f"{served.url}/v1/models/{model}", timeout=60).json()["state"])


def health(served: Serving) -> str:
    return str(httpx.get(f"{served.url}/health", timeout=60).json()["status"])


def test_each_model_answers_by_itself_through_drains_and_kills(
    served: Serving, oracle: dict[str, tuple[Path, list[list[int]]]]
) -> None:
    ask_all(served, oracle, *MODELS)

    drained = served.twinpool("drain", "decode-1", "--model-name", "second")
    assert drained.returncode == 0, drained.stderr
    assert served.twinpool("status").returncode == 1
    ask_all(served, oracle, *MODELS)

    os.kill(worker_of(served, "first", "decode-0")["pid"], signal.SIGKILL)
    ask_all(served, oracle, *MODELS)

    (process,) = (
        one
        for one in psutil.Process(served.process.pid).children(recursive=True)
        if "twinpool.cluster.serve.model_cluster" in one.cmdline() and any("/second/" in word for word in one.cmdline())
    )
    process.kill()
    until(lambda: health(served) == "degraded", "the model's death to be seen")
    ask_all(served, oracle, "first")
    until(lambda: health(served) == "ok", "the model to come back", timeout=400)
    ask_all(served, oracle, *MODELS)
    until(lambda: state_of(served, NIGHT) == "asleep", "the model that nobody asks to fall asleep")
    until(lambda: not serves(served, NIGHT, "colocated-0"), "its worker to leave")
    ask_all(served, oracle, *MODELS, NIGHT)
    batch_all(served, oracle, *MODELS, NIGHT)
    assert served.metric("twinpool_wakes_total", model=NIGHT) >= 1
    for model in MODELS:
        checked = served.twinpool("check", "--model-name", model)
        assert checked.returncode == 0, checked.stdout

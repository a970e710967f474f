"""Weights that change while a real cluster serves: over HTTP, with the `openai` client, by the commands, through kills.

Every answer is compared with transformers' greedy answer by the weights whose version it names.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.support.changed_weights import (
    PROMPTS,
    Answers,
    Clients,
    ask,
    greedy_answers,
    in_one_version,
    make_versions,
    shown,
    update,
)
from tests.support.served_cluster import Serving, serving, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_versions(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def oracle(folders: dict[str, Path]) -> dict[str, Answers]:
    return greedy_answers(folders)


def cluster(folders: dict[str, Path], runtime: Path, *flags: str, **sections: dict[str, Any]) -> Any:
    roots = str(folders["step-0"].parent)
    told = {"engine": {"weight_roots": roots, "threads": 1}, "cluster": {"heartbeat_s": 0.2}, **sections}
    return serving(folders["step-0"], runtime, *flags, sections=told)


@pytest.fixture
def serving_cluster(folders: dict[str, Path], tmp_path: Path) -> Iterator[Serving]:
    with cluster(folders, tmp_path / "run", "--prefill", "1", "--decode", "1") as serving:
        yield serving


def test_weights_change_under_load_and_each_answer_is_of_the_version_that_it_names(
    serving_cluster: Serving, folders: dict[str, Path], oracle: dict[str, Answers], tmp_path: Path
) -> None:
    serving = serving_cluster
    first = httpx.get(f"{serving.url}/v1/models").json()["data"][0]["weights_version"]
    oracle = {**oracle, first: oracle["step-0"]}
    pids = {row["pid"] for row in serving.status().values()}
    with Clients(serving, oracle) as clients:
        for version in ("step-1", "step-2", "step-3", "step-0", "step-1"):
            told = update(serving, folders[version], version)
            assert (told.status_code, told.json()["weights_version"]) == (200, version), told.text
    assert clients.wrong == clients.failed == []
    assert set(clients.seen) >= {"step-1"}
    # In place: the processes are those that there were.
    assert {row["pid"] for row in serving.status().values()} == pids
    answer = httpx.post(f"{serving.url}/v1/completions", json={"model": serving.model, "prompt": "a", "max_tokens": 1})
    assert answer.headers["x-twinpool-weights-version"] == answer.json()["weights_version"] == "step-1"
    assert httpx.get(f"{serving.url}/v1/models").json()["data"][0]["weights_version"] == "step-1"
    assert 'twinpool_weights_info{version="step-1"} 1.0' in httpx.get(f"{serving.url}/metrics").text
    # What is wrong is refused in words, and changes nothing.
    wrong = wrong_folders(folders)
    for name, words in {
        "lacking": "lacks the tensor", "shape": "the checkpoint's is", "nan": "aren't finite", "none": "has no model",
    }.items():  # fmt: skip
        told = update(serving, wrong[name], name)
        assert told.status_code == 409, (name, told.text)
        assert words in told.json()["error"]["message"], told.text
    outside = update(serving, tmp_path, "x")
    assert outside.status_code == 409
    assert "engine.weight_roots" in outside.json()["error"]["message"]
    same = update(serving, folders["step-2"], "step-1")
    assert same.status_code == 409
    assert "names one set of weights" in same.json()["error"]["message"]
    # Two at once: one of them is refused.
    begun = update(serving, folders["step-2"], "step-2", wait=False)
    second = update(serving, folders["step-3"], "step-3", wait=False)
    assert (begun.status_code, second.status_code) == (202, 409)
    until(lambda: shown(serving)["weights_version"] == "step-2" and not shown(serving)["behind"], "the change ends")
    # The way back to the checkpoint, under the name that it had, and no further.
    for code in (0, 1):
        done = serving.twinpool("weights", "revert")
        assert (done.returncode, "checkpoint" in done.stdout + done.stderr) == (code, True)
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=120)
    assert ask(client, serving.model, 0) == (first, oracle[first][0])
    assert {row["pid"] for row in serving.status().values()} == pids
    serving.settle()


def wrong_folders(folders: dict[str, Path]) -> dict[str, Path]:
    """Folders that can't be changed to, by what is wrong with them."""
    root, made = folders["step-0"].parent, {}
    tensors = load_file(folders["step-3"] / "model.safetensors")
    name = next(name for name in tensors if "down_proj" in name)
    for what in ("lacking", "shape", "nan", "none"):
        made[what] = root / what
        made[what].mkdir(exist_ok=True)
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        if what == "lacking":
            del changed[name]
        elif what == "shape":
            changed[name] = changed[name][:, :-1].contiguous()
        elif what == "nan":
            changed[name][3, 5] = float("nan")
        if what != "none":
            save_file(changed, made[what] / "model.safetensors", metadata={"format": "pt"})
    return made


def rss(serving: Serving) -> int:
    """Resident bytes of its workers' processes."""
    pids = {row["pid"] for row in serving.status().values() if row["pid"]}
    return sum(psutil.Process(pid).memory_info().rss for pid in pids if psutil.pid_exists(pid))


def post(serving: Serving, name: str, **body: Any) -> dict[str, Any]:
    told = httpx.post(f"{serving.url}/v1/{name}", json=body, timeout=300)
    assert told.status_code == 200, told.text
    shown: dict[str, Any] = told.json()
    return shown


def test_pauses_flushes_sleep_and_rolling_changes_by_http_and_by_the_commands(
    serving_cluster: Serving, folders: dict[str, Path], oracle: dict[str, Answers]
) -> None:
    serving = serving_cluster
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=120)
    pids = {row["pid"] for row in serving.status().values()}
    done = serving.twinpool("weights", "update", str(folders["step-1"]), "--version", "step-1")
    assert done.returncode == 0, done.stderr
    assert ask(client, serving.model, 0) == ("step-1", oracle["step-1"][0])
    # A pause keeps requests, and says so.
    post(serving, "pause")
    health = httpx.get(f"{serving.url}/health")
    assert (health.status_code, "paused" in health.text) == (503, True)
    got: list[tuple[str, list[int]]] = []
    waits = threading.Thread(target=lambda: got.append(ask(client, serving.model, 1)))
    waits.start()
    waits.join(1.5)
    assert got == []
    post(serving, "resume")
    waits.join(60)
    assert got == [("step-1", oracle["step-1"][1])]
    # After a flush nothing of before is found.
    body = {"model": serving.model, "prompt": PROMPTS[2], "max_tokens": 2, "temperature": 0}

    def cached() -> int:
        told = httpx.post(f"{serving.url}/v1/completions", json=body, timeout=60).json()
        return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert (cached(), cached() > 0) == (0, True)
    post(serving, "flush")
    assert (cached(), cached() > 0) == (0, True)
    # Asleep at level 1 processes keep their weights, and give the rest back; at level 2 they are gone.
    awake = rss(serving)
    asleep = post(serving, "sleep", level=1)
    assert asleep["asleep"] == 1
    assert all(psutil.pid_exists(pid) for pid in pids)
    slept = sum(psutil.Process(pid).memory_info().rss for pid in pids)
    assert slept < awake, (slept, awake)
    refused = httpx.post(f"{serving.url}/v1/completions", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "asleep")
    assert int(refused.headers["retry-after"]) > 0
    assert serving.twinpool("wake").returncode == 0
    assert ask(client, serving.model, 3) == ("step-1", oracle["step-1"][3])
    assert {row["pid"] for row in serving.status().values()} == pids
    assert serving.twinpool("sleep", "--level", "2").returncode == 0
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "processes to end")
    post(serving, "wake")
    assert ask(client, serving.model, 4) == ("step-1", oracle["step-1"][4])
    # One worker after the other.
    with Clients(serving, oracle, count=2) as clients:
        assert serving.twinpool(
            "weights", "update", str(folders["step-2"]), "--version", "step-2", "--rolling"
        ).returncode == 0  # fmt: skip
    assert clients.wrong == clients.failed == []
    assert ask(client, serving.model, 5) == ("step-2", oracle["step-2"][5])
    serving.settle()


@pytest.mark.parametrize("when", ["while they read", "while they follow"])
def test_a_worker_that_is_killed_in_a_change_leaves_the_cluster_in_one_version(
    serving_cluster: Serving, folders: dict[str, Path], oracle: dict[str, Answers], when: str
) -> None:
    serving = serving_cluster
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=120)
    update(serving, folders["step-1"], "step-1")
    rows = serving.status()
    assert update(serving, folders["step-2"], "step-2", wait=False).status_code == 202
    if when == "while they follow":
        until(lambda: shown(serving)["weights"]["version"] == "step-2", "the change")
    os.kill(rows["decode-0"]["pid"], signal.SIGKILL)
    until(lambda: in_one_version(shown(serving)), "one version")
    version, tokens = ask(client, serving.model, 6)
    assert version in ("step-1", "step-2")
    assert tokens == oracle[version][6]
    if when == "while they follow":
        assert version == "step-2"
    serving.settle()

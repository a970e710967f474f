"""Weights that are pushed to a real cluster, by the client's call and by plain HTTP.

Every answer is compared with transformers' greedy answer by the tensors that were pushed.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest
import torch
from safetensors.torch import load_file, save

from tests.support.changed_weights import PROMPTS, TOKENS, ask, in_one_version, make_versions, shown, transformer
from tests.support.served_cluster import Serving, serving, until
from twinpool import push_weights
from twinpool.cli.operator.push_weights import PushRefused

pytestmark = pytest.mark.slow


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder in memory."""
    made = Path(tempfile.mkdtemp(prefix="twinpool-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def greedy(model: Any, prompt: list[int]) -> list[int]:
    told = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)
    answer: list[int] = told[0][len(prompt) :].tolist()
    return answer


def pushed(root: Path) -> set[Path]:
    return set(root.iterdir())


def files_without_name(serving: Serving, root: Path) -> list[str]:
    """Files below `root` that processes of the cluster have open, and that no folder names."""
    found = []
    for process in psutil.Process(serving.process.pid).children(recursive=True):
        folder = Path(f"/proc/{process.pid}/fd")
        for one in folder.iterdir():
            target = os.readlink(one) if one.is_symlink() else ""
            if target.startswith(str(root)) and target.endswith("(deleted)"):
                found.append(target)
    return found


def test_pushed_tensors_are_served_and_leave_nothing_behind(root: Path, tmp_path: Path) -> None:
    folders = make_versions(tmp_path / "models", 3)
    tensors = {version: load_file(folder / "model.safetensors") for version, folder in folders.items()}
    sections = {"engine": {"weight_roots": str(root), "threads": 1}, "cluster": {"heartbeat_s": 0.2}}
    with serving(folders["step-0"], tmp_path / "run", "--prefill", "1", "--decode", "1", sections=sections) as cluster:
        client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120)

        def expect(version: str, model: Any) -> None:
            for which in (0, 5):
                assert ask(client, cluster.model, which) == (version, greedy(model, PROMPTS[which]))

        # Over HTTP, of the model that is being trained.
        trained = transformer(folders["step-1"])
        told = push_weights(cluster.url, trained.state_dict(), "one")
        assert told["weights_version"] == "one"
        expect("one", trained)
        (first,) = pushed(root)
        # By memory that both share; what it takes the place of goes.
        trained = transformer(folders["step-2"])
        push_weights(cluster.url, trained.named_parameters(), "two", root=root)
        expect("two", trained)
        until(lambda: first not in pushed(root), "the first to go")
        # A part of them.
        part = {name: tensor for name, tensor in tensors["step-1"].items() if ".1.mlp." in name}
        push_weights(cluster.url, part, "part", partial=True)
        trained.load_state_dict(part, strict=False)
        expect("part", trained)
        refuse_what_is_wrong(cluster, root, tensors["step-2"])
        assert shown(cluster)["weights_version"] == "part"
        cut_off(cluster, save(tensors["step-2"]))
        until(lambda: not files_without_name(cluster, root), "what had come to go")
        # A worker that starts again has them.
        os.kill(cluster.status()["decode-0"]["pid"], signal.SIGKILL)
        until(lambda: in_one_version(shown(cluster)), "the worker")
        expect("part", trained)
        assert len(pushed(root)) == 1
        cluster.settle()
    assert not pushed(root)


def refuse_what_is_wrong(cluster: Serving, root: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Whatever is wrong is said in words, by the tensor's name, and nothing stays of it."""
    name = next(name for name in tensors if "down_proj" in name)
    nan = tensors[name].clone()
    nan[3, 5] = float("nan")
    before = pushed(root)
    for changed, partial, words in (
        ({name: tensors[name][:, :-1]}, True, f"the tensor {name} is F32 [64, 127]"),
        ({name: tensors[name].bfloat16()}, True, f"the tensor {name} is BF16"),
        ({f"{name}.x": tensors[name]}, True, f"has the tensor {name}.x, which the checkpoint lacks"),
        ({name: tensors[name]}, False, "lacks the tensor"),
        ({name: nan}, True, "aren't finite"),
    ):
        for where in ("", root)[: 1 if changed.get(name) is nan else 2]:
            with pytest.raises(PushRefused, match=words.replace("[", r"\[")) as refused:
                push_weights(cluster.url, changed, "wrong", partial=partial, root=where)
            assert refused.value.status == 409
    raw = save(tensors)
    digest = f"sha-256=:{base64.b64encode(bytes(32)).decode()}:"
    for body, headers, words in (
        (raw, {"Content-Digest": digest}, "another SHA-256"),
        (raw[:-1], {}, "cut off"),
        (raw + b"x", {}, "longer than"),
        (b"GGUF" * 100, {}, "no safetensors file"),
        (bytes(1 << 24), {}, "limit"),
    ):
        told = httpx.post(f"{cluster.url}/v1/weights/push", content=body, headers=headers, timeout=60)
        assert told.status_code in (409, 413), told.text
        assert words in told.json()["error"]["message"]
    assert httpx.post(f"{cluster.url}/v1/weights/push?rolling=yes", content=raw, timeout=60).status_code == 400
    until(lambda: pushed(root) == before, "what was refused to go")


def cut_off(cluster: Serving, raw: bytes) -> None:
    """A client that dies half-way."""
    parts = urlsplit(cluster.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), 10) as client:
        head = f"POST /v1/weights/push HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(raw)}\r\n\r\n"
        client.sendall(head.encode() + raw[: len(raw) // 2])

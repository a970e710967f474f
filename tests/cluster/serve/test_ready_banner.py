"""What `serve` says once it serves: three short lines, what to try, the URL last; the tables are in the report."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from twinpool.cluster.serve.preflight import ServeOptions, ServePlan, prepare
from twinpool.cluster.serve.terminal import Terminal, ask_line, summary, ways_in
from twinpool.contracts.checkpoint.model_spec import Pooling
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.ids import PAIR, Incarnation, Role, WorkerName
from twinpool.contracts.messages.fingerprint import Fingerprint
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView

NATIVE = "invariant:cpu/x86_64/native-x86-64-v4/torch-2.13.0+cpu/" + "bits-1/" * 25


def views(pages: int = 100, count: int = 2) -> list[WorkerView]:
    found = []
    for role in PAIR:
        for number in range(count):
            name = WorkerName(f"{role}-{number}")
            mark = Fingerprint(3, "layout", NATIVE, "weights")
            record = WorkerRecord(name, role, Incarnation(1), 77, "a-node", "e", "c", WorkerLimits(1, 1), "", mark)
            status = WorkerStatus(name, role, "ready", 77, "a-node", Incarnation(1), 0, 0, pages, pages, plane="shm")
            found.append(WorkerView(record, status))
    return found


@pytest.fixture(scope="module")
def demo() -> ServePlan:
    return prepare(ServeOptions(port=8123, assignments=("cache.page_tokens=16",)), 8 << 30)


def test_a_line_each_for_model_workers_and_memory_and_none_is_long(demo: ServePlan) -> None:
    lines = summary(demo, views(count=30))
    told = dict(lines)
    assert [what for what, _ in lines] == ["model", "workers", "memory"]
    assert max(len(text) for text in told.values()) < 140
    assert told["workers"].startswith("30 prefill, 30 decode on a-node; threads of each: ")
    assert "kernels: C++; pages go by shm" in told["workers"]
    assert told["memory"].startswith(f"room for: prefill {30 * 100 * 16:,} tokens, decode {30 * 100 * 16:,} tokens; ")


def test_the_demo_says_what_it_is_and_another_model_does_not(demo: ServePlan, tmp_path: Path) -> None:
    assert "words make little sense; --model smollm2 answers questions" in dict(summary(demo, views()))["model"]
    other = prepare(ServeOptions(str(make_checkpoint(tmp_path / "tiny", "qwen3", seed=1)), port=8123), 8 << 30)
    assert "little sense" not in dict(summary(other, views()))["model"]


def test_the_url_comes_last_and_tables_go_to_the_report_alone(demo: ServePlan, tmp_path: Path) -> None:
    for verbose in (False, True):
        out, report = io.StringIO(), tmp_path / f"start-{verbose}.txt"
        terminal = Terminal(ManualClock(), out, 0.0, report=report, verbose=verbose)
        terminal.nodes(demo)
        terminal.table(demo, views())
        terminal.ready("http://127.0.0.1:8123", summary(demo, views()), ways_in(demo))
        lines = out.getvalue().splitlines()
        assert lines[-1] == "Twinpool is ready: http://127.0.0.1:8123"
        assert (NATIVE in out.getvalue()) is verbose
        told = report.read_text()
        assert f"numerics of all: {NATIVE}" in told, "on one line, however long"
        for word in ("prefill-1", "decode-1", "host budget", "activations"):
            assert word in told


def test_without_a_tokenizer_it_says_so_and_its_curl_line_sends_token_ids(tmp_path: Path, demo: ServePlan) -> None:
    folder = make_checkpoint(tmp_path / "tiny", "qwen3", seed=1)
    with_text = prepare(ServeOptions(str(folder), port=8123), 8 << 30)
    assert "no text" not in dict(summary(with_text, views()))
    (folder / "tokenizer.json").unlink()
    plan = prepare(ServeOptions(str(folder), port=8123), 8 << 30)
    assert dict(summary(plan, views()))["no text"].startswith(
        "the checkpoint has no tokenizer.json: prompts are token ids"
    )
    words = shlex.split(ask_line(plan))
    body: dict[str, Any] = json.loads(words[words.index("-d") + 1])
    assert words[1] == "http://127.0.0.1:8123/v1/completions"
    assert body["return_token_ids"] is True
    assert len(body["prompt"]) == 4
    assert all(0 <= token < plan.spec.vocab_size for token in body["prompt"])
    assert not set(body["prompt"]) & set(plan.spec.eos_token_ids)
    assert isinstance(json.loads(shlex.split(ask_line(demo))[-1])["prompt"], str)


def test_of_a_model_that_tells_classes_the_curl_line_asks_for_one(demo: ServePlan) -> None:
    words = shlex.split(ask_line(replace(demo, spec=replace(demo.spec, pooling=Pooling(labels=("good",))))))
    assert words[1] == "http://127.0.0.1:8123/classify"
    assert json.loads(words[-1]) == {"model": demo.spec.name, "input": "It was a fine morning"}


def test_a_role_of_its_own_page_size_is_counted_by_it(demo: ServePlan) -> None:
    config = replace(
        demo.config, decode=replace(demo.config.decode, cache=replace(demo.config.decode.cache, page_tokens=32))
    )
    told = dict(summary(replace(demo, config=config), views(count=1)))["memory"]
    assert f"{Role.PREFILL} 1,600 tokens, {Role.DECODE} 3,200 tokens" in told

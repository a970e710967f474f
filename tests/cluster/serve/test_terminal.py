"""What `serve` shows of its workers: the kernels that each computes with, and why where they aren't the C++ ones."""

from __future__ import annotations

import io
import logging
import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from twinpool.cluster.serve.terminal import Screen, Terminal, kernel_lines, kernels_of, worker_table
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import PAIR, Incarnation, Role, WorkerName
from twinpool.contracts.messages.fingerprint import Fingerprint
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from twinpool.engine.native.compile_kernels import NativeUnavailable

NATIVE = "invariant:cpu/x86_64/native-x86-64-v4/torch-2.13.0+cpu/bits-1"
TORCH = "invariant:cpu/x86_64/torch/torch-2.13.0+cpu/bits-2"
CUDA = "invariant:cuda/sm_90/triton-3.6"


def view(name: str, numerics: str | None) -> WorkerView:
    mark = None if numerics is None else Fingerprint(3, "layout", numerics, "weights")
    role = Role(name.partition("-")[0])
    record = WorkerRecord(
        WorkerName(name), role, Incarnation(1), 77, "a node", "e", "c", WorkerLimits(1, 1), "id", mark
    )
    status = WorkerStatus(record.name, role, "ready", 77, "a node", Incarnation(1), 0, 0, 46, 46, plane="staged")
    return WorkerView(record, status)


def prepared(config: Config, ray_address: str | None = None) -> Any:
    plan = SimpleNamespace(nbytes=2**20)
    share = SimpleNamespace(threads=3, copy_threads=False, plans={role: plan for role in PAIR})
    options = SimpleNamespace(ray_address=ray_address)
    return SimpleNamespace(config=config, options=options, weights=5 * 2**20, shares={}, share_of=lambda node: share)


@pytest.mark.parametrize(
    ("numerics", "kernels"), [(NATIVE, "C++"), (TORCH, "torch"), (CUDA, "triton"), ("", "-"), (None, "-")]
)
def test_kernels_are_named_by_the_workers_own_word(numerics: str | None, kernels: str) -> None:
    assert kernels_of(view("decode-0", numerics).record) == kernels


def test_the_table_of_workers_has_the_kernels_and_the_plane_of_each() -> None:
    out = io.StringIO()
    table: Any = worker_table(prepared(Config()), [view("prefill-0", NATIVE), view("decode-0", TORCH)])
    Console(file=out, width=200).print(table)
    rows = {cells[0]: cells for line in out.getvalue().splitlines() if (cells := re.split(r"\s{2,}", line.strip()))}
    assert rows["worker"][:6] == ["worker", "node", "pid", "threads", "kernels", "plane"]
    assert rows["prefill-0"][:6] == ["prefill-0", "a node", "77", "3", "C++", "staged"]
    assert rows["decode-0"][:6] == ["decode-0", "a node", "77", "3", "torch", "staged"]


def test_one_class_is_one_line_and_of_several_each_says_whose_it_is() -> None:
    one = [view("prefill-0", NATIVE), view("decode-0", NATIVE)]
    assert kernel_lines(prepared(Config()), one) == [f"numerics of all: {NATIVE}"]
    two = [view("prefill-0", NATIVE), view("decode-0", CUDA), view("decode-1", None)]
    lines = kernel_lines(prepared(Config()), two)
    assert lines == [f"numerics of prefill-0: {NATIVE}", f"numerics of decode-0: {CUDA}"]


def test_where_torch_alone_computes_the_line_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(level: str) -> None:
        raise NativeUnavailable("no C++ compiler was found: install g++")

    monkeypatch.setattr("twinpool.engine.native.current_kernels.available", missing)
    workers = [view("decode-0", TORCH)]
    _, reason = kernel_lines(prepared(Config()), workers)
    assert reason.strip().startswith("torch alone computes, several times slower")
    assert reason.endswith("no C++ compiler was found: install g++")
    _, elsewhere = kernel_lines(prepared(Config(), ray_address="auto"), workers)
    assert elsewhere.endswith("see decode-0's log on a node")
    _, asked = kernel_lines(prepared(config_from_dict({"engine": {"attention": "torch"}})), workers)
    assert "as engine.attention=torch asks for" in asked
    assert "slower" not in asked


def test_a_screen_that_goes_away_ends_nothing_and_the_log_has_what_it_would_have_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in `twinpool serve | head`: SIGTERM's line was its end, and so it never ended."""
    reader, writer = os.pipe()
    out = io.TextIOWrapper(io.BufferedWriter(Screen(writer, "w")))
    terminal = Terminal(ManualClock(), out)
    terminal.line("shown")
    assert os.read(reader, 100) == b"shown\n"
    os.close(reader)
    with caplog.at_level(logging.INFO, "twinpool.serve"):
        terminal.line("decode-0 died")
        terminal.line("answers have ended")
    out.close()
    assert [record.getMessage() for record in caplog.records] == [
        "nobody reads what serve prints any more (Broken pipe)", "decode-0 died", "answers have ended",
    ]  # fmt: skip

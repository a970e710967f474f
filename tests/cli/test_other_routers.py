"""Routers that no supervisor keeps: two are started by hand beside a controller, and operators are told of them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.free_ports import free_port
from tests.support.served_cluster import ROOT, until
from twinpool.cli.admin_client import AdminClient, ClusterNotFound, CommandRefused
from twinpool.cli.operator.cluster_rows import left_alone, router_lines, routers_of, wanted_marks
from twinpool.cli.operator.status_command import status_view
from twinpool.cluster.controller.controller import Controller
from twinpool.cluster.controller.controller_process import ControllerServer
from twinpool.cluster.controller.leadership import MemoryLedger
from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.cluster_config import ClusterConfig, Config
from twinpool.contracts.config.load_config import load_config
from twinpool.contracts.config.setting_effects import routers_digest

OLD, NEW = "0.1.0+old", "0.1.0+new"


def router_row(name: str, **changes: Any) -> dict[str, Any]:
    row = {
        "name": name, "node": "host-a", "pid": 1, "address": "10.0.0.1:8000", "build": NEW, "settings": "s1",
        "kept": True, "in_flight": 0,
    }  # fmt: skip
    return row | changes


BY_HAND = router_row("by-hand", node="host-b", address="10.0.0.2:8000", kept=False)


def test_a_router_that_nobody_keeps_is_named_with_host_marks_and_what_to_do() -> None:
    said = left_alone([router_row("router-0"), replace_row(BY_HAND, build=OLD)], "build", NEW)
    for part in ("by-hand at 10.0.0.2:8000 on host-b", f"build {OLD}", "settings s1", "not replaced", "--take-over"):
        assert part in said
    assert left_alone([router_row("router-0", build=OLD), BY_HAND], "build", NEW) == ""


def replace_row(row: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return row | changes


def test_status_flags_those_that_differ_from_the_ones_that_serve_keeps() -> None:
    mine = [router_row("router-0"), router_row("router-1")]
    assert router_lines(mine) == []
    (first, second, line) = router_lines([*mine, replace_row(BY_HAND, settings="s2")])
    assert first.endswith("settings s1)")
    assert second.endswith("settings s1)")
    assert line.endswith(": another settings than the others; not kept by serve: upgrade and apply don't replace it")
    assert wanted_marks([BY_HAND, BY_HAND, replace_row(BY_HAND, build=OLD)]) == (NEW, "s1"), "without any that is kept"
    assert wanted_marks([]) == ("", "")
    by_hand = [replace_row(BY_HAND, build=OLD, settings="s2")] * 3
    assert wanted_marks([*by_hand, *mine]) == (NEW, "s1"), "more of them decide nothing"


@pytest.fixture
def controller() -> Iterator[ControllerServer]:
    core, ended = Controller(SystemClock(), ClusterConfig(), MemoryLedger()), threading.Event()
    server = ControllerServer(core)

    def tick() -> None:
        while not ended.wait(0.05):
            server.tick()

    ticking = threading.Thread(target=tick)
    ticking.start()
    yield server
    ended.set()
    ticking.join()
    server.close()


@pytest.mark.slow
def test_routers_started_by_hand_are_in_status_with_their_marks(tmp_path: Path, controller: ControllerServer) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3")
    configs = {"kept": Config(), "by-hand": load_config(None, ["router.write_timeout_s=77"])}
    started, ports = [], {name: free_port() for name in configs}
    for name, config in configs.items():
        settings = tmp_path / f"{name}.json"
        settings.write_text(json.dumps(config.to_dict()))
        command = [
            *(sys.executable, "-m", "twinpool.router.main", "--model", str(model), "--controller", controller.endpoint),
            *("--port", str(ports[name]), "--name", name, "--config-json", str(settings)),
            *("--handover-socket", str(tmp_path / f"{name}.socket")),
            *(("--kept",) if name == "kept" else ()),
        ]
        started.append(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL))
    try:
        client = AdminClient(f"http://127.0.0.1:{ports['kept']}")

        def rows() -> dict[str, dict[str, Any]]:
            try:
                return {row["name"]: dict(row) for row in routers_of(client)}
            except (ClusterNotFound, CommandRefused):
                return {}

        until(lambda: len(rows()) == 2, "both routers to be told of", 60)
        found = rows()
        for name, config in configs.items():
            assert found[name]["address"] == f"127.0.0.1:{ports[name]}"
            assert found[name]["build"] == build_id()
            assert found[name]["settings"] == routers_digest(config)
            assert found[name]["kept"] == (name == "kept")
        assert left_alone(list(found.values()), "settings", wanted_marks(list(found.values()))[1])
        shown = client.status()
        assert {row["name"] for row in shown["routers"]} == set(configs)
        assert status_view(shown) is not None
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)

"""The doctor against problems that were really planted, and against a machine without any."""

from __future__ import annotations

import ast
import inspect
import io
import json
import os
import re
import resource
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.certificates import TestAuthority
from tests.support.free_ports import free_port
from tests.support.redis_servers import LedgerServer
from tests.support.served_cluster import ROOT
from twinpool.cli import command_line
from twinpool.cli import commands as cli
from twinpool.cli.credential_commands import new_key
from twinpool.cli.launch_commands import CheckProgress
from twinpool.cluster.assembly.node_shares import CardFacts
from twinpool.cluster.doctor.doctor_case import DoctorCase, DoctorHost, Finding, Severity, sized
from twinpool.cluster.doctor.examine import BESIDE, CHECKS, examine, exit_code
from twinpool.cluster.models import DEMO
from twinpool.cluster.processes.run_folder import write_run_file
from twinpool.cluster.ray_nodes.ray_facts import RayFacts, RayNode
from twinpool.cluster.serve import preflight
from twinpool.cluster.serve.memory_fit import CUDA_WORKER_BYTES
from twinpool.cluster.serve.preflight import ServeOptions
from twinpool.contracts.checkpoint.safetensors_headers import INDEX, SINGLE, read_headers


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Folders of runs and logs that other tests don't write to."""
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def host(tmp_path: Path, **changes: Any) -> DoctorHost:
    """This machine, but for temporary folders and segments, which other tests make and leave to be removed."""
    apart: dict[str, Any] = {name: tmp_path / name for name in ("temporary", "shm", "cgroup")}
    for folder in apart.values():
        folder.mkdir(exist_ok=True)
    return replace(DoctorHost(**apart), **changes)


def case(tmp_path: Path, *settings: str, at: DoctorHost | None = None, **flags: Any) -> DoctorCase:
    options = replace(ServeOptions(port=0), assignments=settings, **flags)
    return DoctorCase(options, at or host(tmp_path))


def look(check: str, examined: DoctorCase) -> list[Finding]:
    """What a check finds that isn't fine."""
    found = list(CHECKS[check](examined))
    assert found, "a check says what it saw"
    return [finding for finding in found if finding.severity is not Severity.FINE]


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    assert findings[0].advice, "a finding says what to do"
    return findings[0]


def test_a_context_that_the_model_does_not_have_is_found(tmp_path: Path) -> None:
    found = only(look("model", case(tmp_path, "engine.context=4096")))
    assert "engine.context=4096 is more than the 2048 tokens" in found.found
    assert '"rope_scaling":{"rope_type":"yarn","factor":2.0,' in found.advice


@pytest.mark.slow
def test_a_healthy_machine_has_nothing_to_do_and_each_check_says_what_it_saw(tmp_path: Path) -> None:
    found = examine(case(tmp_path))
    assert [finding for finding in found if finding.severity is not Severity.FINE] == []
    assert {finding.check for finding in found} == CHECKS.keys()
    assert all(finding.found for finding in found)
    assert exit_code(found) == 0


def test_a_taken_port_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = only(look("ports", case(tmp_path, port=port)))
    assert found.severity is Severity.ERROR
    assert str(port) in found.found


def test_a_taken_operators_port_of_any_router_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = look("ports", case(tmp_path, f"security.admin_port={port - 2}", routers=3))
    assert any(one.found.startswith(f"security.admin_port {port}:") for one in found)


def test_a_port_that_a_cluster_of_ones_own_has_is_told_with_its_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        write_run_file(url, tmp_path, "demo")
        found = only(look("ports", case(tmp_path, port=taken.getsockname()[1])))
    assert f"twinpool down --url {url}" in found.advice


def test_the_port_of_the_cluster_that_the_file_is_for_is_no_problem(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file.write_text(f"launch: {{port: {port}}}\n")
        examined = case(tmp_path, config=file, port=port)
        assert len(look("ports", examined)) == 1
        write_run_file(f"http://127.0.0.1:{port}", tmp_path, "demo", config=str(file))
        assert look("ports", examined) == []


def test_without_torch_the_other_checks_are_made() -> None:
    """Nothing imports it before the checks that need it."""
    script = (
        "import sys, twinpool.cluster.doctor.examine; print([name for name in ('torch', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_taken_port_of_one_workers_events_is_found(tmp_path: Path) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        found = only(look("ports", case(tmp_path, f"cache.events.endpoint=tcp://127.0.0.1:{port - 3}", decode=2)))
    assert str(port) in found.found, "decode-1 has the endpoint's port and 3"


def sharded(folder: Path) -> list[Path]:
    """A copy of the demo model in three shards with an index; returns the shards."""
    shutil.copytree(DEMO, folder)
    headers, whole = read_headers(DEMO), (DEMO / SINGLE).read_bytes()
    (folder / SINGLE).unlink()
    shards, table = [], {}
    for number in range(3):
        mine, at, body = {}, 0, b""
        for name in sorted(headers)[number::3]:
            header = headers[name]
            body += whole[header.begin : header.end]
            mine[name] = {"dtype": header.dtype, "shape": header.shape, "data_offsets": [at, len(body)]}
            at = len(body)
            table[name] = f"part-{number}.safetensors"
        head = json.dumps(mine).encode()
        path = folder / f"part-{number}.safetensors"
        path.write_bytes(len(head).to_bytes(8, "little") + head + body)
        shards.append(path)
    (folder / INDEX).write_text(json.dumps({"weight_map": table}))
    return shards


def test_every_broken_shard_is_named(tmp_path: Path) -> None:
    shards, model = sharded(tmp_path / "model"), str(tmp_path / "model")
    assert look("model", case(tmp_path, model=model)) == []
    os.truncate(shards[0], shards[0].stat().st_size - 100)
    shards[2].unlink()
    cut, missing = look("model", case(tmp_path, model=model))
    assert "part-0.safetensors is truncated" in cut.found
    assert "part-2.safetensors is missing" in missing.found
    assert exit_code([cut, missing]) == 2


def test_a_shard_without_a_tensor_that_the_index_names_is_found(tmp_path: Path) -> None:
    sharded(tmp_path / "model")
    index = json.loads((tmp_path / "model" / INDEX).read_text())
    name = next(name for name, file in index["weight_map"].items() if file == "part-1.safetensors")
    index["weight_map"][name] = "part-0.safetensors"
    (tmp_path / "model" / INDEX).write_text(json.dumps(index))
    assert (
        f"lacks 1 tensors that the index says it has, {name}"
        in only(look("model", case(tmp_path, model=str(tmp_path / "model")))).found
    )


def test_a_model_of_an_unknown_kind_is_found(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "model")
    described = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(described | {"architectures": ["OddForCausalLM"]}))
    assert "OddForCausalLM" in only(look("model", case(tmp_path, model=str(tmp_path / "model")))).found


def test_a_lost_chat_template_and_a_lost_tokenizer_are_found(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "no chat template" in only(look("tokenizer", case(tmp_path, model=str(model)))).found
    (model / "tokenizer.json").unlink()
    assert "no tokenizer.json" in only(look("tokenizer", case(tmp_path, model=str(model)))).found


@pytest.mark.slow
def test_a_model_that_is_not_here_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINPOOL_MODELS", str(tmp_path / "models"))
    for name in ("smollm2", "nobody-at-all/no-such-model"):
        examined = case(tmp_path, model=name)
        assert look("model", examined) == []
        assert examined.model.path is None
        assert look("memory", examined) == look("tokenizer", examined) == []
    assert not (tmp_path / "models").exists()


def test_an_expired_certificate_and_one_that_ends_soon_are_found(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path / "certs")

    def https(files: Any) -> list[Finding]:
        return look("credentials", case(tmp_path, f"security.tls_cert={files.cert}", f"security.tls_key={files.key}"))

    assert https(authority.node("good", days=60)) == []
    assert "expired" in only(https(authority.expired())).found
    soon = only(https(authority.node("soon", days=5)))
    assert (soon.severity, "ends in 4 days" in soon.found) == (Severity.WARNING, True)


@pytest.mark.parametrize("whose", ["keys_file", "admin_keys_file"])
def test_secrets_that_others_may_read_and_keys_that_ran_out_are_found(tmp_path: Path, whose: str) -> None:
    keys = tmp_path / "keys.json"
    new_key(keys, "acme", "1m")
    setting = f"security.{whose}={keys}"
    assert look("credentials", case(tmp_path, setting)) == []
    keys.chmod(0o644)
    assert "mode 644" in only(look("credentials", case(tmp_path, setting))).found
    keys.chmod(0o600)
    later = host(tmp_path, now=lambda: datetime.now(UTC) + timedelta(hours=1))
    assert "all 1 keys have run out" in only(look("credentials", case(tmp_path, setting, at=later))).found


def test_a_mistake_in_the_file_is_found_and_the_machine_is_examined_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("engine: {theads: 1}\n")
    found = examine(case(tmp_path, config=file))
    wrong = only([finding for finding in found if finding.severity is not Severity.FINE])
    assert (wrong.check, "did you mean engine.threads" in wrong.found + wrong.advice) == ("configuration", True)
    assert {finding.check for finding in found} == CHECKS.keys()


def test_settings_that_can_not_be_together_are_found(tmp_path: Path) -> None:
    assert "--routers" in only(look("configuration", case(tmp_path, "transfer.plane=local", routers=2))).advice
    assert "prefill.tp=3" in only(look("memory", case(tmp_path, "prefill.tp=3"))).found


def test_pools_larger_than_the_memory_of_the_control_group_are_found(tmp_path: Path) -> None:
    group = tmp_path / "group"
    group.mkdir()
    (group / "memory.max").write_text(str(1 << 30))
    (group / "memory.current").write_text(str(512 << 20))
    found = only(look("memory", case(tmp_path, at=host(tmp_path, cgroup=group))))
    assert "512 MiB are free" in found.found + found.advice


def test_strict_overcommit_and_swap_in_use_are_found(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "sys/vm").mkdir(parents=True)
    (proc / "sys/vm/overcommit_memory").write_text("2\n")
    (proc / "meminfo").write_text("CommitLimit: 1000 kB\nCommitted_AS: 900 kB\nSwapTotal: 1000 kB\nSwapFree: 100 kB\n")
    examined = case(tmp_path, at=host(tmp_path, proc=proc))
    assert "overcommit_memory=2" in only(look("memory", examined)).found
    assert "swap are in use" in only(look("swap", examined)).found


@pytest.mark.parametrize(("shared", "copies"), [("off", 3), ("on", 1)])
def test_the_memory_that_is_needed_has_the_weights_as_often_as_there_are_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: str, copies: int
) -> None:
    def needed(weights: int) -> int:
        monkeypatch.setattr(preflight, "weight_bytes", lambda spec, config: weights)
        settings = (f"engine.share_weights={shared}", "cache.device_tokens=64", "cache.host_bytes=1048576")
        (found,) = CHECKS["memory"](case(tmp_path, *settings, decode=2))
        number = re.match(r"about ([\d,]+) MiB needed", found.found)
        assert number is not None, found
        return int(number[1].replace(",", ""))

    assert needed(200 << 20) - needed(0) == 200 * copies


def test_the_memory_that_is_needed_beside_gpus_has_that_of_the_processes(tmp_path: Path) -> None:
    card = CardFacts(0, "card", 40 << 30, 40 << 30, 90, ())
    for count in (1, 2):
        at = host(tmp_path, cards=lambda device: (card,))
        settings = ("cluster.host_memory_share=0", "cluster.host_memory_bytes=0", "engine.attention=torch")
        (found,) = CHECKS["memory"](case(tmp_path, *settings, at=at, decode=count))
        assert found.found.startswith(f"about {sized((1 + count) * CUDA_WORKER_BYTES)} needed, 0 MiB of it host tiers")


@pytest.fixture
def few_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_files")
def test_a_small_limit_on_open_files_is_found(tmp_path: Path) -> None:
    found = only(look("open files", case(tmp_path)))
    assert (found.severity, "512 files" in found.found) == (Severity.ERROR, True)


def test_small_limits_of_the_control_group_are_found(tmp_path: Path) -> None:
    group = host(tmp_path).cgroup
    (group / "pids.max").write_text("400")
    (group / "pids.current").write_text("100")
    (group / "cpu.max").write_text("150000 100000")
    assert "300 processes" in only(look("processes", case(tmp_path))).found
    assert "1.5 cores" in only(look("processors", case(tmp_path))).found
    (group / "cpu.max").write_text("200000 100000")
    assert look("processors", case(tmp_path)) == []
    assert "9 ranks compute on" in only(look("processors", case(tmp_path, decode=8))).found


IN_A_SMALL_SHM = """
import sys
from pathlib import Path
from twinpool.cluster.doctor.device_checks import check_shared_memory
from twinpool.cluster.doctor.doctor_case import DoctorCase
from twinpool.cluster.serve import preflight
from twinpool.cluster.serve.memory_fit import CUDA_WORKER_BYTES
from twinpool.cluster.serve.preflight import ServeOptions
for finding in check_shared_memory(DoctorCase(ServeOptions(port=0))):
    print(finding.severity, finding.found)
"""


@pytest.mark.slow
def test_a_small_shared_memory_is_found_by_a_mount_of_its_own() -> None:
    script = 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    done = subprocess.run(
        [*inside, sys.executable, "-c", IN_A_SMALL_SHM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("no namespaces here")
    assert done.stdout.startswith("warning /dev/shm has 16 MiB free"), done.stdout + done.stderr


def ray(ours: str, python: str, *nodes: RayNode) -> Callable[[str], RayFacts]:
    return lambda address: RayFacts(ours, python, nodes)


def test_a_ray_of_another_version_and_one_without_places_are_found(tmp_path: Path) -> None:
    python = ".".join(map(str, sys.version_info[:3]))
    node = RayNode("other", {"twinpool_prefill": 1, "twinpool_decode": 1})
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"

        def joined(asked: Callable[[str], RayFacts], **flags: Any) -> list[Finding]:
            return look("Ray", case(tmp_path, at=host(tmp_path, ask_ray=asked), ray_address=address, **flags))

        assert joined(ray(version("ray"), python, node)) == []
        assert "that Ray is 1.2.3" in only(joined(ray("1.2.3", python, node))).found
        assert "runs Python 3.1.4" in only(joined(ray(version("ray"), "3.1.4", node))).found
        assert "none of its 1 nodes" in only(joined(ray(version("ray"), python, RayNode("bare")))).found
        few = only(joined(ray(version("ray"), python, node), decode=3))
        assert "1 of 3 twinpool_decode" in few.found


def test_a_ray_that_is_away_is_found(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    found = only(look("Ray", case(tmp_path, ray_address=address)))
    assert f"can't reach Ray at {address}" in found.found
    assert (
        "no Ray runs" in only(look("Ray", case(tmp_path, at=host(tmp_path, environment={}), ray_address="auto"))).found
    )


@pytest.mark.slow
def test_a_ledger_that_can_not_be_written_is_found(tmp_path: Path) -> None:
    def ledger(path: Path) -> list[Finding]:
        return look("ledger", case(tmp_path, f"cluster.ledger={path}"))

    assert ledger(tmp_path / "new.db") == []
    assert not (tmp_path / "new.db").exists(), "nothing that stays is written"
    assert "isn't there" in only(ledger(tmp_path / "nowhere" / "new.db")).found
    (tmp_path / "text.db").write_text("not a table, " * 100)
    assert "not a database" in only(ledger(tmp_path / "text.db")).found
    store = sqlite3.connect(tmp_path / "busy.db", isolation_level=None)
    store.execute("CREATE TABLE kept (key TEXT)")
    assert ledger(tmp_path / "busy.db") == []
    store.execute("BEGIN EXCLUSIVE")
    assert "locked" in only(ledger(tmp_path / "busy.db")).found
    store.close()


def test_what_a_real_server_may_lose_and_its_clock_are_found(tmp_path: Path) -> None:
    server = LedgerServer(tmp_path, "--maxmemory", "100mb", "--maxmemory-policy", "noeviction", "--save", "")
    server.start()
    try:
        keys = ("cluster.name=c", "cache.storage.backend=redis")
        settings = (f"cluster.ledger={server.url}", f"cache.storage.url={server.url}", *keys)
        examined = case(tmp_path, *settings)
        loss = look("ledger", examined)[0]
        assert (loss.severity, "may lose" in loss.found or "disk" in loss.found) == (Severity.WARNING, True)
        assert "evicts nothing" in only(look("storage", examined)).found
        assert look("clock", examined) == []
        late = host(tmp_path, now=lambda: datetime.now(UTC) - timedelta(hours=1))
        assert "3600.0 s behind" in only(look("clock", case(tmp_path, *settings, at=late))).found
        server.client.config_set("maxmemory", "0")
        server.client.config_set("appendonly", "yes")
        server.client.config_set("appendfsync", "always")
        assert look("ledger", examined) == look("storage", examined) == []
        assert server.client.dbsize() == 0, "nothing is written"
    finally:
        server.close()


@pytest.mark.slow
def test_a_ledger_and_a_storage_on_a_server_that_is_away_are_found(tmp_path: Path) -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    examined = case(
        tmp_path, f"cluster.ledger={url}", "cluster.name=c", "cache.storage.backend=redis", f"cache.storage.url={url}"
    )
    for check in ("ledger", "storage"):
        found = only(look(check, examined))
        assert found.severity is Severity.ERROR
        assert "secret" not in found.found + found.advice + found.detail
    assert look("clock", examined) == [], "a server that is away has no clock"


def test_a_storage_folder_that_can_not_be_made_or_is_too_small_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    def storage(path: Path, *more: str) -> list[Finding]:
        return look("storage", case(tmp_path, "cache.storage.backend=file", f"cache.storage.path={path}", *more))

    assert storage(tmp_path / "pages", f"cache.storage.max_bytes={1 << 20}") == []
    assert not (tmp_path / "pages").exists()
    assert "can't be written" in only(storage(tmp_path / "file" / "pages")).found
    assert "has room for" in only(storage(tmp_path / "pages", f"cache.storage.max_bytes={1 << 60}")).found


@pytest.mark.parametrize(("most", "fits"), [(5 << 20, True), (6 << 20, False)])
def test_what_a_storage_folder_holds_already_is_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, fits: bool
) -> None:
    """Else a cache that has grown is told to be too large for its disk at the next launch."""
    for number in range(3):
        page = tmp_path / "pages" / str(number) / "page"
        page.parent.mkdir(parents=True)
        page.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=2 << 20))
    settings = (f"cache.storage.path={tmp_path / 'pages'}", f"cache.storage.max_bytes={most}")
    found = look("storage", case(tmp_path, "cache.storage.backend=file", *settings))
    assert [finding.found.partition(", ")[0] for finding in found] == (
        [] if fits else [f"{tmp_path / 'pages'} has room for 5 MiB"]
    )


def test_a_package_of_another_version_is_found(tmp_path: Path) -> None:
    old = host(tmp_path, version=lambda name: "0.1" if name == "ray" else version(name))
    found = only(look("versions", case(tmp_path, at=old)))
    assert found.found.startswith("ray 0.1 is installed; supported is >=")


@pytest.mark.slow
def test_what_dead_runs_left_is_found_and_nothing_of_those_that_live(tmp_path: Path) -> None:
    at = host(tmp_path)
    write_run_file("http://127.0.0.1:1", tmp_path, "demo")
    live = at.temporary / "twinpool-abcdef_1"
    live.mkdir()
    (live / "held").touch()
    segments = {name: at.shm / name for name in ("held", "dead")}
    for path in segments.values():
        path.write_bytes(bytes(2 << 20))
    old = time.time() - 3600
    with (
        segments["held"].open("rb"),
        subprocess.Popen(["sleep", "60"], env={**os.environ, "TWINPOOL_RUN": live.name}) as holder,
    ):
        for path in (live, *segments.values()):
            os.utime(path, (old, old))
        assert "1 files" in only(look("leftovers", case(tmp_path, at=at))).found
        segments["dead"].unlink()
        assert look("leftovers", case(tmp_path, at=at)) == []
        holder.kill()
    dead = {"pid": 2**22 + 1, "started": 1}
    (tmp_path / "runtime" / "twinpool" / "run-1.json").write_text(json.dumps(dead))
    run, folder, segment = look("leftovers", case(tmp_path, at=at))
    assert "1 run files" in run.found
    assert live.name in folder.found
    assert "2 MiB of memory" in segment.found
    assert live.exists()


def test_a_segment_that_is_mapped_and_not_open_is_in_use(tmp_path: Path) -> None:
    at = host(tmp_path)
    path, old = at.shm / "mapped", time.time() - 3600
    path.write_bytes(bytes(2 << 20))
    memory = torch.from_file(str(path), shared=True, size=2 << 20, dtype=torch.uint8)  # Closes what it maps.
    os.utime(path, (old, old))
    assert look("leftovers", case(tmp_path, at=at)) == []
    del memory
    assert str(path) in only(look("leftovers", case(tmp_path, at=at))).advice


def test_a_level_that_the_processor_lacks_and_unlike_machines_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinpool.contracts.cpu_levels.levels", lambda has=None: ("x86-64-v3",))
    assert (
        "this processor runs x86-64-v3"
        in only(look("numerics", case(tmp_path, "engine.numerics_class=x86-64-v4"))).found
    )
    assert "other bits" in only(look("numerics", case(tmp_path, ray_address="head:6379"))).found


def test_gpus_that_are_busy_old_or_behind_a_torch_without_cuda_are_found(tmp_path: Path) -> None:
    def card(free: int, capability: int) -> CardFacts:
        return CardFacts(0, "card", 80 << 30, free, capability, ())

    def gpus(*cards: CardFacts) -> list[Finding]:
        at = host(tmp_path, cards=lambda _: cards, version=lambda name: "2.13.0+cu128")
        return look("GPUs", case(tmp_path, at=at))

    assert gpus(card(79 << 30, 90)) == []
    assert "20.0 GiB of 80.0 GiB free" in only(gpus(card(20 << 30, 90))).found
    assert "compute capability 6.1" in only(gpus(card(79 << 30, 61))).found
    proc = tmp_path / "proc" / "driver" / "nvidia"
    proc.mkdir(parents=True)
    (proc / "version").write_text("NVRM version: 570.1")
    at = host(tmp_path, proc=tmp_path / "proc", version=lambda name: "2.13.0+cpu")
    assert "built without CUDA" in only(look("GPUs", case(tmp_path, at=at))).found


def test_a_driver_that_is_too_old_and_one_that_is_unloaded_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nif [ "$1" = -q ]; then echo "CUDA Version : 11.8"; else echo Disabled; fi\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("torch.version.cuda", "12.8")
    card = CardFacts(0, "card", 80 << 30, 79 << 30, 90, ())
    at = host(tmp_path, cards=lambda _: (card,), version=lambda name: "2.13.0+cu128")
    old, unloaded = look("GPUs", case(tmp_path, at=at))
    assert "built for CUDA 12.8, and the driver runs 11.8" in old.found
    assert "persistence mode is off" in unloaded.found
    tool.write_text('#!/bin/sh\nif [ "$1" = -q ]; then echo "CUDA Version : 12.9"; else echo Enabled; fi\n')
    assert look("GPUs", case(tmp_path, at=at)) == []


def test_rdma_ports_that_are_down_and_little_locked_memory_are_found(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    examined = case(tmp_path, "transfer.plane=nixl", at=host(tmp_path, sys=tmp_path / "sys"))
    found = [one for one in look("RDMA", examined) if "NIXL isn't installed" not in one.found]
    assert "mlx5_0/1 is 1: DOWN" in only(found).found
    (port / "state").write_text("4: ACTIVE\n")
    assert [one for one in look("RDMA", examined) if "NIXL isn't installed" not in one.found] == []
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, before[1]))
    try:
        assert "may lock" in only(look("locked memory", examined)).found
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_a_container_that_forbids_segments_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert "pidfd_open fails" in only(look("container", case(tmp_path))).found
    monkeypatch.setattr(os, "memfd_create", refused)
    assert "memfd_create fails" in only(look("container", case(tmp_path))).found


def test_a_check_that_fails_is_an_error_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: DoctorCase) -> Iterator[Finding]:
        raise RuntimeError("nobody thought of it")

    monkeypatch.setattr("twinpool.cluster.doctor.examine.CHECKS", {"broken": broken, "swap": CHECKS["swap"]})
    found = examine(case(tmp_path))
    assert [finding.check for finding in found] == ["broken", "swap"]
    assert "nobody thought of it" in found[0].found
    assert exit_code(found) == 2


def test_the_command_takes_serves_flags_and_a_file_and_ends_with_how_bad_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "twinpool.cluster.doctor.examine.CHECKS", {name: CHECKS[name] for name in ("configuration", "swap")}
    )

    def doctor(*arguments: str) -> int:
        return cli.run(command_line.parser().parse_args(["doctor", *arguments]))

    file = tmp_path / "cluster.yaml"
    file.write_text("pools: {decode: 3}\n")
    assert doctor(str(file), "--json", "--prefill", "2", "--port", "0") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["exit_code"] == 0
    assert "2 prefill, 3 decode" in told["findings"][0]["found"]
    assert doctor("--routers", "0", "--all") == 2
    said = capsys.readouterr().out
    assert "ERROR" in said
    assert "FINE    swap" in said
    assert "do: " in said
    with pytest.raises(SystemExit) as ended:
        doctor(str(file), "--config", str(file))
    assert ended.value.code == 2


class Told:
    """Takes down how an examination goes on."""

    def __init__(self) -> None:
        self.under_way: list[str] = []
        self.ended_checks: list[str] = []

    def begins(self, check: str) -> None:
        self.under_way.append(check)

    def ended(self, check: str, seconds: float) -> None:
        self.under_way.remove(check)
        self.ended_checks.append(check)
        assert seconds >= 0


def test_each_check_is_told_as_it_begins_and_ends_and_independent_ones_are_made_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three wait for each other: one by one they would never end. What they find is in the table's order."""
    meet = threading.Barrier(3, timeout=60)

    def waiting(asked: DoctorCase) -> Iterator[Finding]:
        meet.wait()
        yield Finding(Severity.FINE, "met")

    checks = {name: waiting for name in ("storage", "model", "container")}
    monkeypatch.setattr("twinpool.cluster.doctor.examine.CHECKS", checks)
    told = Told()
    assert [finding.check for finding in examine(case(tmp_path), told)] == list(checks)
    assert (told.under_way, sorted(told.ended_checks)) == ([], sorted(checks))


def test_what_is_made_beside_the_others_loads_nothing_that_these_load() -> None:
    """Modules that import each other in circles are half made to a second thread that loads them meanwhile."""
    known = [name for group in BESIDE for name in group]
    assert len(set(known)) == len(known)
    assert set(known) < CHECKS.keys()
    for name in known:
        source = inspect.getsource(inspect.getmodule(CHECKS[name]) or sys)
        late = [
            (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
            for function in ast.walk(ast.parse(source))
            if isinstance(function, ast.FunctionDef)
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert set(late) <= {"redis", "twinpool.contracts.wire.redis_connection"}, name


@pytest.mark.slow
def test_a_fresh_process_makes_every_check(tmp_path: Path) -> None:
    """Here all modules are loaded by the checks themselves; in this process other tests have."""
    command = [sys.executable, "-m", "twinpool.cli.commands", "doctor", "--model", str(DEMO), "--port", "0", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=dict(os.environ))
    findings = json.loads(done.stdout)["findings"]
    assert {finding["check"] for finding in findings} == CHECKS.keys()
    assert not [finding for finding in findings if "the check itself failed" in finding["found"]]


def test_in_a_pipe_a_slow_check_has_a_line_with_its_time_and_a_terminal_shows_what_is_under_way() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for out in (io.StringIO(), Terminal()):
        progress = CheckProgress(out)
        progress.begins("model")
        progress.begins("ports")
        progress.ended("ports", 0.1)
        progress.ended("model", 12.34)
        progress.close()
        said = out.getvalue()
        assert "model: 12.3 s\n" in said
        assert "ports: 0.1" not in said
        assert ("0 checks made; now: model, ports" in said) is out.isatty()


def test_looking_for_free_ports_loads_no_torch(tmp_path: Path) -> None:
    """It did, for names that only ports of KV events have: many seconds on a busy machine."""
    code = (
        "import sys\nfrom twinpool.cluster.doctor.doctor_case import DoctorCase\n"
        "from twinpool.cluster.serve.preflight import ServeOptions\n"
        "from twinpool.cluster.doctor.network_checks import check_ports\n"
        "list(check_ports(DoctorCase(ServeOptions(port=0))))\nprint('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=dict(os.environ)
    )
    assert done.stdout == "False\n"

"""What the doctor says where nothing is wrong, and problems that are none where they can't hurt."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cluster.doctor.test_doctor import case, host, look, only
from twinpool.cluster.assembly.node_shares import CardFacts
from twinpool.cluster.doctor import machine_checks
from twinpool.cluster.doctor.doctor_case import DoctorCase, Severity
from twinpool.cluster.doctor.examine import CHECKS, MIN_FREE

JOINED: dict[str, Any] = {"ray_address": "head:6379"}


@pytest.fixture(autouse=True)
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def says(check: str, examined: DoctorCase) -> str:
    """The one thing that a check says, which is that all is well."""
    (found,) = CHECKS[check](examined)
    assert found.severity is Severity.FINE, found
    return found.found


def test_a_clock_that_nobody_keeps_matters_where_there_are_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kept, alone in ((True, "synchronised"), (False, "kept by nobody, and alone"), (None, "unknown")):
        monkeypatch.setattr(machine_checks, "_synchronised", lambda kept=kept: kept)
        assert alone in says("clock", case(tmp_path))
        if kept is False:
            assert "nothing keeps this machine's clock" in only(look("clock", case(tmp_path, **JOINED))).found
        else:
            assert alone in says("clock", case(tmp_path, **JOINED))


def test_the_kernel_is_asked_whether_it_keeps_the_clock() -> None:
    """Against what it tells of itself by another way, where there is one."""
    told = machine_checks._synchronised()
    if (tool := shutil.which("adjtimex")) is None:
        assert told in (True, False, None)
        return
    said = subprocess.run([tool, "--print"], capture_output=True, text=True, check=False).stdout
    assert told is ("return value = 5" not in said)


def test_cards_are_not_looked_at_where_this_machine_computes_on_none(tmp_path: Path) -> None:
    def cards(device: str) -> Any:
        raise AssertionError("nobody asked for it")

    at = host(tmp_path, cards=cards)
    assert "engine.device=cpu" in says("GPUs", case(tmp_path, "engine.device=cpu", at=at))
    assert "each node's GPUs" in says("GPUs", case(tmp_path, at=at, **JOINED))
    assert case(tmp_path, at=at, **JOINED).cards == ()
    bare = host(tmp_path, cards=lambda device: ())
    assert f"no GPU: workers compute on the CPU (torch {version('torch')})" in says("GPUs", case(tmp_path, at=bare))

    def none(name: str) -> str:
        raise PackageNotFoundError(name)

    assert "torch isn't installed" in says("GPUs", case(tmp_path, at=host(tmp_path, version=none)))


def test_what_runs_in_one_process_has_one_card(tmp_path: Path) -> None:
    two = tuple(CardFacts(index, "card", 1 << 30, 1 << 30, 90, ()) for index in range(2))
    at = host(tmp_path, cards=lambda device: two)
    assert case(tmp_path, at=at).cards == two
    assert case(tmp_path, "transfer.plane=local", at=at).cards == two[:1]


def test_what_a_run_left_a_moment_ago_may_be_a_run_that_begins(tmp_path: Path) -> None:
    at = host(tmp_path)
    folder, segment = at.temporary / "twinpool-abcdef_1", at.shm / "segment"
    folder.mkdir()
    segment.write_bytes(bytes(2 << 20))
    assert says("leftovers", case(tmp_path, at=at)) == "nothing is left of earlier runs"
    old = time.time() - 3600
    os.utime(folder, (old, old))
    assert folder.name in only(look("leftovers", case(tmp_path, at=at))).found
    os.utime(segment, (old, old))
    assert len(look("leftovers", case(tmp_path, at=at))) == 2


def test_small_files_in_shared_memory_are_worth_no_word(tmp_path: Path) -> None:
    at, old = host(tmp_path), time.time() - 3600
    for name, size in (("small", 64 << 10), ("large", 2 << 20)):
        (at.shm / name).write_bytes(bytes(size))
        os.utime(at.shm / name, (old, old))
    assert "1 files" in only(look("leftovers", case(tmp_path, at=at))).found


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_full_disks_are_told_each_with_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, free = host(tmp_path), {"state": MIN_FREE, "temporary": MIN_FREE}
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free[Path(path).name]))
    assert "there is room" in says("disks", case(tmp_path, at=at))
    free["temporary"] -= 1
    assert "for Ray's files" in only(look("disks", case(tmp_path, at=at))).found
    free["state"] = 5 << 20
    logs, ray = look("disks", case(tmp_path, at=at))
    assert "5 MiB are free for logs" in logs.found
    assert str(at.temporary) in ray.found


def test_a_model_that_is_to_be_fetched_is_told_with_the_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINPOOL_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 3 << 30))
    said = says("model", case(tmp_path, model="smollm2"))
    assert "serve fetches it; 3,072 MiB free in" in said


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What the child process says, where that isn't what it says by itself."""
    said, line = list[str | None](), machine_checks._line

    def told(process: Any) -> str | None:
        real = line(process)
        assert real is not None
        return said[0] and said[0].replace("FD", real.split()[0]) if said else real

    monkeypatch.setattr(machine_checks, "_line", told)
    return said


def test_a_container_that_lets_nobody_read_others_memory_matters_to_plane_nixl_alone(
    tmp_path: Path, child: list[str | None]
) -> None:
    (host(tmp_path).cgroup / "memory.max").write_text(str(3 << 30))
    assert "memory limited to 3,072 MiB" in says("container", case(tmp_path, "transfer.plane=nixl"))
    child.append("FD False")
    assert "processes are watched" in says("container", case(tmp_path))
    assert "process_vm_readv" in only(look("container", case(tmp_path, "transfer.plane=nixl"))).found


@pytest.mark.parametrize(("said", "found"), [(None, "doesn't get on"), ("9999 True", "can't be opened")])
def test_a_container_in_which_a_child_does_not_get_on_or_is_not_seen_is_found(
    tmp_path: Path, child: list[str | None], said: str | None, found: str
) -> None:
    child.append(said)
    assert found in only(look("container", case(tmp_path))).found


def test_a_level_that_this_processor_has_is_fine_and_auto_on_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinpool.contracts.cpu_levels.levels", lambda has=None: ("x86-64-v3",))
    assert says("numerics", case(tmp_path)).endswith("engine.numerics_class=auto")
    pinned = says("numerics", case(tmp_path, "engine.numerics_class=x86-64-v3", **JOINED))
    assert pinned.endswith("engine.numerics_class=x86-64-v3")


@pytest.mark.parametrize(
    ("package", "settings"),
    [
        ("redis", ("cache.storage.backend=redis", "cache.storage.url=redis://h:1/0")),
        ("redis", ("cluster.ledger=redis://h:1/0", "cluster.name=c")),
        ("nixl-cu12", ("transfer.plane=nixl",)),
    ],
)
def test_packages_of_what_is_configured_alone_are_asked_for(
    tmp_path: Path, package: str, settings: tuple[str, ...]
) -> None:
    def without(name: str) -> str:
        if name == package:
            raise PackageNotFoundError(name)
        return version(name)

    at = host(tmp_path, version=without)
    assert look("versions", case(tmp_path, at=at)) == []
    assert f"{package} isn't installed" in only(look("versions", case(tmp_path, *settings, at=at))).found


def test_versions_that_are_shown_are_those_that_matter(tmp_path: Path) -> None:
    said = says("versions", case(tmp_path))
    for name in ("torch", "ray"):
        assert f"{name} {version(name)}" in said


def test_credentials_that_are_in_order_are_named(tmp_path: Path) -> None:
    assert says("credentials", case(tmp_path)) == "no certificates or keys are configured"

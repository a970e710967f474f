"""The doctor over several hosts: planted differences, and what this machine says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster.doctor.test_doctor import host, only
from tests.support.served_cluster import ROOT
from twinpool.cluster.doctor.doctor_case import DoctorCase, Finding, Severity
from twinpool.cluster.doctor.examine import CHECKS
from twinpool.cluster.doctor.network_checks import numerics_of
from twinpool.cluster.ray_nodes.host_facts import HostFacts, facts_here, offset
from twinpool.cluster.serve.preflight import ServeOptions
from twinpool.contracts.build_id import build_id
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.messages.fingerprint import PROTOCOL, Fingerprint, mismatch, numerics_class

V3, V4 = ("x86-64-v3",), ("x86-64-v3", "x86-64-v4")
PLACES = {"twinpool_prefill": 2.0, "twinpool_decode": 2.0}
ONE = HostFacts(
    "one", "x86_64", V4, "x86-64-v4+avx512_bf16", "avx512_core_bf16", "3.11.7", "2.8.0", "llguidance 1.2", "0.1+abc",
    PROTOCOL, places=PLACES,
)  # fmt: skip
OLD = replace(ONE, host="old", levels=V3, instructions="x86-64-v3", onednn="avx2")


def look(tmp_path: Path, hosts: Sequence[HostFacts], *settings: str) -> list[Finding]:
    """What the check says of these hosts, that isn't fine."""
    asked: list[tuple[str, str]] = []

    def ask(address: str, device: str) -> tuple[HostFacts, ...]:
        asked.append((address, device))
        return tuple(hosts)

    options = replace(ServeOptions(port=0), assignments=settings, ray_address="head:6379")
    case = DoctorCase(options, host(tmp_path, ask_hosts=ask), compare_hosts=True)
    found = list(CHECKS["hosts"](case))
    assert found
    assert asked == [("head:6379", case.config.engine.device)]
    return [one for one in found if one.severity is not Severity.FINE]


def test_hosts_that_are_alike_have_nothing_to_do(tmp_path: Path) -> None:
    assert look(tmp_path, [ONE, replace(ONE, host="two", clock_s=1.5)]) == []


def test_unlike_processors_are_told_the_level_that_all_of_them_run(tmp_path: Path) -> None:
    found = only(look(tmp_path, [ONE, OLD, replace(OLD, host="older")]))
    assert found.severity is Severity.WARNING, "each of the two groups can serve by itself"
    assert "these hosts can't hand over to each other: one (x86_64, x86-64-v4+avx512_bf16" in found.found
    assert "; old and older (x86_64, x86-64-v3, oneDNN avx2" in found.found
    assert found.advice.startswith("set engine.numerics_class=x86-64-v3, which all of them run")
    page = (ROOT / "docs" / "operating" / "start.md").read_text()
    pair = only(look(tmp_path, [ONE, OLD]))
    assert f"WARNING hosts: {pair.found}\n        do: {pair.advice}\n" in page
    # What it says to do is enough, and so is the other way out.
    assert look(tmp_path, [ONE, OLD], "engine.numerics_class=x86-64-v3") == []
    assert look(tmp_path, [ONE, OLD], "engine.numerics=fast") == []
    # Some extensions change bits within a level.
    plain = replace(ONE, host="plain", instructions="x86-64-v4", onednn="avx512_core")
    assert "numerics_class=x86-64-v4" in only(look(tmp_path, [ONE, plain])).advice


def test_a_group_without_a_role_of_its_own_can_not_serve(tmp_path: Path) -> None:
    prefill = replace(ONE, places={"twinpool_prefill": 1.0})
    found = only(look(tmp_path, [prefill, replace(OLD, places={"twinpool_decode": 1.0})]))
    assert found.severity is Severity.ERROR
    assert "one has no twinpool_decode" in found.detail


def test_a_level_that_a_host_does_not_run_is_an_error(tmp_path: Path) -> None:
    found = only(look(tmp_path, [ONE, OLD], "engine.numerics_class=x86-64-v4"))
    assert found.severity is Severity.ERROR
    assert "which old can't run" in found.found
    assert "engine.numerics_class=x86-64-v3" in found.advice
    arm = replace(OLD, host="arm", machine="aarch64", levels=())
    assert "take these hosts out" in only(look(tmp_path, [ONE, arm], "engine.numerics_class=x86-64-v4")).advice
    assert "one kind of processor" in only(look(tmp_path, [ONE, arm])).advice


def test_other_libraries_are_named_with_the_hosts_that_have_them(tmp_path: Path) -> None:
    other = replace(ONE, host="two", torch="2.7.1", grammar="none")
    found = only(look(tmp_path, [ONE, other], "engine.numerics_class=x86-64-v3"))
    assert "install the same torch on all of them (2.8.0 on one, 2.7.1 on two)" in found.advice
    assert "structured output on all of them (llguidance 1.2 on one, none on two)" in found.advice
    assert "numerics_class" not in found.advice, "it is set"


def test_other_gpus_are_of_other_classes_and_processors_do_not_count_there(tmp_path: Path) -> None:
    cards = [replace(ONE, cards=("H100",)), replace(OLD, cards=("H100",)), replace(OLD, host="big", cards=("H200",))]
    assert look(tmp_path, cards[:2], "engine.device=cuda") == []
    found = only(look(tmp_path, cards, "engine.device=cuda"))
    assert "one model of GPU" in found.advice
    assert "one and old (cuda, H100" in found.found


def test_builds_and_protocols_are_compared(tmp_path: Path) -> None:
    newer = replace(ONE, host="new", build="0.1+def")
    found = only(look(tmp_path, [ONE, newer]))
    assert (found.severity, found.found) == (
        Severity.WARNING, "hosts have different builds: 0.1+abc on one, 0.1+def on new"
    )  # fmt: skip
    found = only(look(tmp_path, [ONE, replace(newer, protocol=PROTOCOL + 1)]))
    assert found.severity is Severity.ERROR
    assert f"{PROTOCOL} on one, {PROTOCOL + 1} on new" in found.found


def test_clocks_count_as_apart_only_by_what_is_certain(tmp_path: Path) -> None:
    late = replace(ONE, host="late", clock_s=-3.0, clock_error_s=0.4)
    found = only(look(tmp_path, [replace(ONE, clock_s=0.1, clock_error_s=0.1), late]))
    assert found.found == "the clock of one is at least 2.6 s ahead of that of late"
    assert look(tmp_path, [ONE, replace(late, clock_error_s=1.1)]) == []


def test_a_host_that_says_nothing_and_a_ray_that_can_not_be_joined_are_errors(tmp_path: Path) -> None:
    found = only(look(tmp_path, [ONE, HostFacts("bare", silent="No module named 'cluster'")]))
    assert (found.severity, found.found) == (Severity.ERROR, "bare can't run this build: No module named 'cluster'")

    def away(address: str, device: str) -> Any:
        raise ConfigError(f"the hosts of the Ray at {address} didn't answer within 9 s")

    options = replace(ServeOptions(port=0), ray_address="head:6379")
    case = DoctorCase(options, host(tmp_path, ask_hosts=away), compare_hosts=True)
    assert only(list(CHECKS["hosts"](case))).severity is Severity.ERROR
    # Without the flag, and without a Ray, nobody is asked.
    for asked in (DoctorCase(options, host(tmp_path, ask_hosts=away)), DoctorCase(ServeOptions(port=0))):
        assert [one.severity for one in CHECKS["hosts"](asked)] == [Severity.FINE]


def test_a_clock_is_taken_to_be_read_in_the_middle_of_the_shortest_call() -> None:
    ours = iter([10.0, 14.0, 20.0, 20.5, 30.0, 33.0])
    theirs = iter([112.5, 120.25, 131.0])
    assert offset(lambda: next(theirs), lambda: next(ours)) == (100.0, 0.25)


def test_what_a_host_says_is_what_its_workers_classes_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the class that an engine of this machine has, and what workers say at the hand-over."""
    from twinpool.engine.runner.numerics_class import numerics_class as of_engine

    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)  # A host says what it has, not what one process is told.
    here = facts_here("cpu")
    assert (here.build, here.protocol) == (build_id(), PROTOCOL)
    engine = config_from_dict({"engine": {"numerics_class": "auto"}}).engine
    parts = numerics_of(here, engine, gpus=False)
    computed = of_engine(None, "auto", torch.float32, torch.device("cpu"))
    machine, _, isa, library, _ = parts
    for word in (machine, isa.replace("oneDNN ", "onednn-"), library.replace("torch ", "torch-")):
        assert word in computed.split("/"), (word, computed)

    def said(facts: HostFacts) -> Fingerprint:
        name = ", ".join(numerics_of(facts, engine, gpus=False))
        return Fingerprint(facts.protocol, "layout", numerics_class("invariant", name), "weights")

    assert mismatch(said(ONE), said(replace(ONE, host="two")), "one", "two") is None
    refused = mismatch(said(ONE), said(OLD), "one", "old")
    assert refused is not None
    assert "engine.numerics_class" in refused, "the worker's own words give the same advice"


@pytest.mark.parametrize("flags", [["--hosts"], []])
def test_the_flag_asks_for_it(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    from twinpool.cli import commands
    from twinpool.cluster.doctor import examine

    made: list[DoctorCase] = []

    def seen(case: DoctorCase, progress: examine.Progress | None = None) -> list[Finding]:
        made.append(case)
        return []

    monkeypatch.setattr(examine, "examine", seen)
    with pytest.raises(SystemExit) as ended:
        commands.main(["doctor", "--port", "0", "--ray-address", "head:6379", *flags])
    assert ended.value.code == 0
    assert [case.compare_hosts for case in made] == [bool(flags)]

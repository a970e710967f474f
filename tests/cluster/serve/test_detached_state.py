"""The state of a detached cluster: what the next supervisor reads, of this build or of another."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from twinpool.cluster.assembly.node_shares import CardFacts, NodeFacts
from twinpool.cluster.processes.keeper import end_seconds
from twinpool.cluster.processes.process_ids import start_time
from twinpool.cluster.serve.build_check import why_not
from twinpool.cluster.serve.detached_state import STATE_FILE, DetachedState, ModelsState, ServiceProcess, models_in
from twinpool.cluster.serve.models_config import plan_models
from twinpool.cluster.serve.preflight import ServeOptions, ServePlan, prepare
from twinpool.cluster.serve.shutdown_signal import END_S
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role

GIB = 1 << 30


def plan(*assignments: str, **options: Any) -> ServePlan:
    given = ("cache.device_tokens=4096", "prefill.chunk_tokens=64", "autoscaling.prefill.max_workers=7", *assignments)
    return prepare(ServeOptions(assignments=given, **{"port": 0, **options}), 8 * GIB, ())


def state(folder: Path, prepared: ServePlan) -> DetachedState:
    return DetachedState(
        folder,
        folder / "logs",
        prepared,
        secrets={"TWINPOOL_ADMIN_TOKEN": "a token"},
        secret="aa",
        arena="bb",
        report="/tmp/a.routed",
        controller_port=4711,
        standby_ports=[4712],
        ray="127.0.0.1:6379",
        ray_build="Ray 1, Python 2",
        services={"controller": ServiceProcess(7, 8, "0.1+abc")},
        marks={"router": "0.1+abc.12"},
        replaced={"router.0.1+abc.11": ServiceProcess(9, 10, "0.1+abc")},
    )


def changed(folder: Path, **changes: Any) -> None:
    path = folder / STATE_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("options", [{"prefill": 2, "decode": 3, "routers": 2, "host": "0.0.0.0"}, {"colocate": 2}])
def test_the_plan_comes_to_the_same_from_what_was_given_and_measured(tmp_path: Path, options: dict[str, Any]) -> None:
    prepared = plan("decode.retract=recompute", "security.open=true", "engine.context=512", **options)
    state(tmp_path, prepared).save()
    found = DetachedState.load(tmp_path).prepared
    told = dataclasses.replace(prepared.options, model=str(prepared.spec.path), assignments=())
    assert found == dataclasses.replace(prepared, options=told)
    assert end_seconds(tmp_path) > prepared.config.cluster.stop_timeout_s + END_S, "the keeper waits for its drain"


def test_every_other_field_is_kept_and_the_file_is_its_owners(tmp_path: Path) -> None:
    before = state(tmp_path, plan())
    before.save()
    assert stat.S_IMODE((tmp_path / STATE_FILE).stat().st_mode) == 0o600
    after = DetachedState.load(tmp_path)
    for field in dataclasses.fields(DetachedState):
        assert getattr(before, field.name) or field.name == "rest", f"{field.name} has its default here"
        if field.name != "prepared":
            assert getattr(after, field.name) == getattr(before, field.name)


def test_the_state_of_several_models_is_kept_and_says_where_their_clusters_are(tmp_path: Path) -> None:
    (file := tmp_path / "models.yaml").write_text("{launch: {port: 0, routers: 2}, models: {a: {}, b: {}}}")
    plan = plan_models(ServeOptions.of_file(file))
    assert plan is not None
    before = ModelsState(
        tmp_path,
        tmp_path / "logs",
        options=plan.options,
        port=plan.port,
        configs=dict(plan.configs),
        folders={"a": tmp_path / "t.a", "b": tmp_path / "t.b"},
        free_bytes=77,
        cards={"a": 1, "b": 3},
        carried_out="a token",
        trouble="some",
        secrets={"TWINPOOL_ADMIN_TOKEN": "a token"},
        secret="aa",
        services={"model-a": ServiceProcess(7, 8, "0.1+abc")},
        marks={"router-0": "0.1+abc.12"},
        replaced={"router-0.0.1+abc.11": ServiceProcess(9, 10, "0.1+abc")},
    )
    before.save()
    assert stat.S_IMODE((tmp_path / STATE_FILE).stat().st_mode) == 0o600
    after = ModelsState.load(tmp_path)
    for field in dataclasses.fields(ModelsState):
        assert getattr(before, field.name) or field.name == "rest", f"{field.name} has its default here"
        if field.name != "options":
            assert getattr(after, field.name) == getattr(before, field.name), field.name
    assert (after.options.routers, after.options.file) == (2, str(file))
    assert models_in(tmp_path) == before.folders
    assert "can't be read" in why_not(tmp_path) or "No such file" in why_not(tmp_path), (
        "a model's own state is looked at"
    )


def test_cards_and_nodes_are_kept_as_they_were_measured(tmp_path: Path) -> None:
    from twinpool.cluster.serve.detached_state import _facts_from_tree, _facts_to_tree

    card = CardFacts(index=1, name="a card", total=80, free=70, capability=90, peers=(0, 2))
    facts = NodeFacts("here", 8, 64, {Role.PREFILL: 1, Role.DECODE: 2}, "node-1", (card,), "no others")
    assert _facts_from_tree(json.loads(json.dumps(_facts_to_tree(facts)))) == facts


def test_what_another_build_has_in_the_file_is_left_in_it(tmp_path: Path) -> None:
    state(tmp_path, plan()).save()
    changed(tmp_path, of_a_newer_build={"a": 1})
    DetachedState.load(tmp_path).save()
    assert json.loads((tmp_path / STATE_FILE).read_text())["of_a_newer_build"] == {"a": 1}


def test_what_an_older_build_did_not_write_has_its_default(tmp_path: Path) -> None:
    state(tmp_path, plan()).save()
    path = tmp_path / STATE_FILE
    tree = json.loads(path.read_text())
    del tree["ray_build"]
    path.write_text(json.dumps(tree))
    assert DetachedState.load(tmp_path).ray_build == ""


def test_a_setting_that_this_build_does_not_take_is_named(tmp_path: Path) -> None:
    state(tmp_path, plan()).save()
    path = tmp_path / STATE_FILE
    tree = json.loads(path.read_text())
    tree["plan"]["given"]["decode"]["of_a_newer_build"] = 1
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=r"decode\.of_a_newer_build|of_a_newer_build"):
        DetachedState.load(tmp_path)
    assert "of_a_newer_build" in why_not(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"format": 99}', "format 99"),
        ('{"format": 1}', "format 1 and this build reads 3"),
        ("{}", "can't be read"),
        ("half a sta", "can't be read"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / STATE_FILE).write_text(text)
    with pytest.raises(ConfigError, match=why):
        DetachedState.load(tmp_path)


def test_a_build_with_another_ray_can_not_take_the_cluster_over(tmp_path: Path) -> None:
    own = state(tmp_path, plan())
    own.save()
    assert "has not served yet" in why_not(tmp_path)
    own.mark_ready()
    assert "Ray 1, Python 2" in why_not(tmp_path)
    own.ray_build = ""
    own.save()
    assert why_not(tmp_path) == ""
    assert "No such file" in why_not(tmp_path / "elsewhere")


def test_config_of_the_tree_is_the_one_that_was_given() -> None:
    """Round trips of settings are exact: digests of workers that run are compared with them."""
    given = plan("router.stall_s=12.5", "cache.storage.backend=file", "cache.storage.path=/tmp/x").given
    assert config_from_dict(json.loads(json.dumps(given.to_dict()))) == given


def test_a_service_runs_as_long_as_the_process_that_was_noted_for_it(tmp_path: Path) -> None:
    """Another process may have its pid by now."""
    mine = start_time(os.getpid())
    assert mine is not None
    cluster = state(tmp_path, plan())
    living = ServiceProcess(os.getpid(), mine, "0.1+abc")
    cluster.services = {"router": living, "controller": living._replace(started=mine + 1)}
    cluster.replaced = {"router.1": living, "router.0": living._replace(started=mine - 1)}
    assert cluster.running("router") == living
    assert cluster.running("controller") is None
    assert cluster.running("nobody") is None
    assert cluster.leaving == {"router.1": living}


def test_a_service_that_stays_after_all_has_its_mark_and_its_place_again(tmp_path: Path) -> None:
    cluster = state(tmp_path, plan())
    before, after = ServiceProcess(1, 2, "before"), ServiceProcess(3, 4, "after")
    cluster.started("router", before)
    cluster.marks["router"] = "before.1"
    cluster.leaves("router.before.1", before)
    cluster.marks["router"] = "after.1"
    cluster.started("router", after)
    cluster.stays("router", "router.before.1", "before.1")
    found = DetachedState.load(tmp_path)
    assert (found.services["router"], found.marks["router"]) == (before, "before.1")
    assert "router.before.1" not in found.replaced

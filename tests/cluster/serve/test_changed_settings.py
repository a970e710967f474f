"""Settings of a running cluster: what is changed, refused and kept, by the plan that `serve` starts with."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from twinpool.cluster.serve.changed_settings import SettingsChanger, digest_of, digests, replanned
from twinpool.cluster.serve.detached_state import DetachedState
from twinpool.cluster.serve.models_config import models_of
from twinpool.cluster.serve.preflight import ServeOptions, ServePlan, prepare
from twinpool.contracts.config.cluster_config import Config, LaunchConfig
from twinpool.contracts.config.load_config import config_from_dict, load_config
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.messages.pool_changes import SettingsChange

GIB = 1 << 30
SIZES = ("cache.device_tokens=4096",)
DECODE_9 = (WorkerName("decode-9"), Role.DECODE)


def plan(*assignments: str, free: int = 8 * GIB, **options: Any) -> ServePlan:
    return prepare(ServeOptions(port=0, assignments=(*SIZES, *assignments), **options), free, ())


class Keeper:
    """Keeps a plan as the supervisor does."""

    def __init__(self, plan: ServePlan, workers: list[tuple[WorkerName, Role]] | None = None, free: int = GIB) -> None:
        self.plan, self.kept = plan, 0
        self.changer = SettingsChanger(
            lambda: self.plan, self._keep, lambda: workers or [], lambda: free, stale=lambda: (2, "why"), arenas=True
        )

    def _keep(self, plan: ServePlan) -> None:
        self.plan = plan
        self.kept += 1

    def change(self, dry_run: bool = False, **sections: Any) -> Any:
        return self.changer.change(SettingsChange(json.dumps(sections), dry_run, 7))


def test_a_change_replaces_what_it_names_and_says_who_takes_it_up() -> None:
    keeper = Keeper(plan("decode.retract=recompute"))
    before = digests(keeper.plan)
    answer = keeper.change(prefill={"chunk_tokens": 64}, decode={"retract": "recompute"})
    assert (answer.number, answer.refusal) == (7, "")
    assert [(one.key, one.before, one.after, one.roles) for one in answer.changed] == [
        ("prefill.chunk_tokens", "512", "64", (Role.PREFILL,))
    ]
    assert keeper.plan.config.prefill.chunk_tokens == 64
    assert keeper.plan.config.decode.retract == "recompute"
    assert answer.digests[Role.PREFILL] != before[Role.PREFILL]
    assert answer.digests == digests(keeper.plan)


def test_a_dry_run_and_an_unchanged_file_keep_nothing() -> None:
    keeper = Keeper(plan("prefill.chunk_tokens=64"))
    assert keeper.change(dry_run=True, prefill={"chunk_tokens": 32}).changed
    same = keeper.change(
        prefill={"chunk_tokens": 64}, engine={"device": "auto"}, transfer={"plane": "auto"}, pools={"decode": 9}
    )
    assert (same.changed, same.refusal, keeper.kept) == ((), "", 0)
    assert same.digests == digests(keeper.plan), "a worker that was started by the plan is not old"


def test_a_change_that_is_taken_back_makes_nobody_old() -> None:
    keeper = Keeper(plan())
    before = digests(keeper.plan)
    assert keeper.change(decode={"max_batch_tokens": 8}).digests != before
    assert keeper.change(decode={"max_batch_tokens": 64}).digests == before


def test_the_plan_is_the_one_that_serve_makes_of_the_same_settings() -> None:
    keeper = Keeper(plan())
    keeper.change(cache={"device_tokens": 8192}, decode={"cache": {"device_tokens": 2048}}, engine={"threads": 3})
    fresh = plan("cache.device_tokens=8192", "decode.cache.device_tokens=2048", "engine.threads=3")
    assert keeper.plan.config == fresh.config
    assert {role: keeper.plan.here.sizes(role) for role in fresh.wanted} == {
        role: fresh.here.sizes(role) for role in fresh.wanted
    }
    assert digests(keeper.plan) == digests(fresh)


def test_a_share_that_another_roles_key_changes_makes_its_workers_old_too() -> None:
    keeper = Keeper(plan())
    before = digests(keeper.plan)
    answer = keeper.change(decode={"cache": {"host_bytes": 64 << 20}})
    assert keeper.plan.here.host_bytes[Role.PREFILL] == 0, "there is no common budget any more"
    assert all(answer.digests[role] != before[role] for role in before)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"engine": {"dtype": "bfloat16"}}, r"engine\.dtype can't be changed .* new cluster"),
        ({"cache": {"page_tokens": 32}}, r"cache\.page_tokens can't be changed"),
        ({"router": {"kv_index": "none"}}, r"router\.kv_index can't be changed"),
        ({"decode": {"tp": 2}}, r"decode\.tp can't be changed"),
        ({"security": {"admin_port": 9}}, r"security\.admin_port can't be changed"),
        ({"decode": {"max_batch": 3}}, r"unknown config key decode\.max_batch"),
        ({"cache": {"device_tokens": 900_000_000}}, r"are free: cache\.device_tokens=\d+ fits"),
        ({"cache": {"device_tokens": 8}}, "less than one page"),
        ({"engine": {"graphs": "on"}}, r"engine\.graphs=on needs a GPU"),
        (
            {"decode": {"max_batch_tokens": 5}, "transfer": {"plane": "zmq"}},
            r"transfer\.plane can't be changed",
        ),
    ],
)
def test_what_is_refused_changes_nothing(sections: dict[str, Any], words: str) -> None:
    keeper = Keeper(plan())
    before = keeper.plan
    answer = keeper.change(**sections)
    assert answer.refusal
    with pytest.raises(Exception, match=words):
        raise ConfigError(answer.refusal)
    assert keeper.plan is before
    assert (answer.changed, keeper.kept) == ((), 0)


def test_workers_beyond_the_plan_need_free_memory_for_larger_pools() -> None:
    small = Keeper(plan(), [DECODE_9], free=0)
    assert "more with this, and 0 MiB are free" in small.change(cache={"device_tokens": 65536}).refusal
    assert not small.change(cache={"device_tokens": 2048}).refusal, "smaller ones need none"
    assert not Keeper(plan(), [DECODE_9], free=8 * GIB).change(cache={"device_tokens": 65536}).refusal
    planned = Keeper(plan(), plan().workers, free=0)
    assert not planned.change(cache={"device_tokens": 65536}).refusal, "what they take was looked at by the division"


def test_what_serve_has_made_of_security_and_events_stays_as_it_runs() -> None:
    given = plan()
    security = replace(given.config.security, curve_key="made by serve")
    events = replace(given.config.cache.events, endpoint="tcp://127.0.0.1:0")
    config = replace(given.config, security=security, cache=replace(given.config.cache, events=events))
    changed = replanned(replace(given, config=config), '{"cache": {"device_tokens": 8192}}')
    assert (changed.config.security, changed.config.cache.events) == (security, events)
    assert changed.config.cache.device_tokens == 8192


def test_host_memory_for_workers_that_have_none_needs_agents() -> None:
    keeper = Keeper(plan("cluster.host_memory_share=0"))
    keeper.changer._arenas = False
    assert "no agents" in keeper.change(cache={"host_bytes": 1 << 26}).refusal
    assert not keeper.change(decode={"max_batch_tokens": 5}).refusal


def test_a_change_that_leaves_storage_without_host_memory_is_refused_as_serve_would_refuse_it() -> None:
    keeper = Keeper(plan("cache.storage.backend=memory"))
    answer = keeper.change(cluster={"host_memory_bytes": 4096})
    assert "cache.storage.backend=memory needs host memory" in answer.refusal
    assert (answer.changed, keeper.kept) == ((), 0)
    assert not keeper.change(cluster={"host_memory_bytes": 1 << 26}).refusal


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_settings_that_are_no_sections_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the settings"):
        replanned(plan(), text)


def test_the_next_supervisor_starts_workers_with_the_settings_of_the_change_or_of_before(tmp_path: Path) -> None:
    """It is killed while it writes the state, then after: what it had answered is kept, and nothing is half there."""
    state = DetachedState(tmp_path, tmp_path, plan())
    state.save()
    old, new = state.prepared, replanned(state.prepared, '{"decode": {"max_batch_tokens": 8}}')
    (tmp_path / "cluster.state.new").write_bytes(b"half a sta")
    assert digest_of(DetachedState.load(tmp_path).prepared, Role.DECODE) == digest_of(old, Role.DECODE)
    state.prepared = new
    state.save()
    after = DetachedState.load(tmp_path).prepared
    assert digest_of(after, Role.DECODE) == digest_of(new, Role.DECODE) != digest_of(old, Role.DECODE)
    assert after.config.decode.max_batch_tokens == 8
    assert after.given.decode.max_batch_tokens == 8


def test_pools_of_the_file_are_sizes_where_no_flag_gave_them(tmp_path: Path) -> None:
    file = tmp_path / "twinpool.yaml"
    file.write_text("pools: {prefill: 2, decode: 3}\n")
    both = frozenset(Role)
    assert plan(config=file, unsized=both).wanted == {Role.PREFILL: 2, Role.DECODE: 3}
    assert plan(config=file, prefill=5, unsized=both - {Role.PREFILL}).wanted == {Role.PREFILL: 5, Role.DECODE: 3}
    file.write_text("pools: {colocated: 2}\n")
    assert plan(config=file, unsized=both).wanted == {Role.COLOCATED: 2}

    assert config_from_dict({"pools": {"colocated": 2}}) == replace(
        config_from_dict({}), pools=replace(config_from_dict({}).pools, colocated=2)
    )


def test_a_change_that_fails_in_a_way_that_nobody_foresaw_is_refused_and_ends_nothing() -> None:
    def broken() -> list[tuple[WorkerName, Role]]:
        raise ZeroDivisionError("division by zero")

    keeper = Keeper(plan())
    keeper.changer = SettingsChanger(
        lambda: keeper.plan, keeper._keep, broken, lambda: GIB, stale=lambda: (0, ""), arenas=True
    )
    answer = keeper.change(prefill={"chunk_tokens": 64})
    assert answer.refusal == "it can't be made: ZeroDivisionError: division by zero"
    assert (answer.number, keeper.kept) == (7, 0)


def test_what_no_flag_says_is_launched_as_the_file_has_it(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text('{"launch": {"model": "demo", "host": "127.0.0.2", "routers": 3, "port": 0, "ray_address": ""}}')
    every = frozenset(one.name for one in dataclasses.fields(LaunchConfig))
    options = prepare(ServeOptions(config=file, unset=every), free_bytes=8 << 30).options
    assert (options.host, options.routers, options.port, options.ray_address) == ("127.0.0.2", 3, 0, None)
    flagged = prepare(ServeOptions(config=file, routers=2, unset=every - {"routers"}), free_bytes=8 << 30)
    assert (flagged.options.host, flagged.options.routers) == ("127.0.0.2", 2)
    assert flagged.given.launch.routers == 2, "what is applied later is compared with what it came to"


@pytest.mark.parametrize("number", range(7))
def test_the_files_that_the_operators_pages_show_are_configurations(number: int, tmp_path: Path) -> None:
    docs = Path(__file__).parents[3] / "docs"
    pages = [docs / "operating.md", *sorted((docs / "operating").glob("*.md"))]
    found = re.findall(r"```yaml\n(.*?)```", "".join(page.read_text() for page in pages), re.DOTALL)
    assert len(found) == 7
    (file := tmp_path / "cluster.yaml").write_text(found[number])
    configs = models_of(file).values() or [load_config(file)]
    assert all(config != Config() for config in configs)

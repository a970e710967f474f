"""The table of what a change of each setting takes, merging, and digests."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.config.setting_effects import (
    EFFECTS,
    Effect,
    controllers_digest,
    effect_of,
    entry_of,
    merged,
    roles_of,
    routers_digest,
    services_of,
    settings_digest,
    settings_of,
)
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role


def keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Every key, from the types of the sections."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from keys(typing.cast(type, kind), f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


KEYS = list(keys(Config))


def test_every_key_has_one_effect_and_every_entry_has_keys() -> None:
    assert list(settings_of(Config())) == KEYS
    assert {entry_of(key) for key in KEYS} == set(EFFECTS)
    with pytest.raises(KeyError):
        effect_of("nothing.of_the_kind")


def test_only_what_rolls_names_roles_and_only_what_is_refused_says_why() -> None:
    for name, entry in EFFECTS.items():
        assert bool(entry.roles) == (entry.effect is Effect.ROLLS), name
        assert bool(entry.reason) == (entry.effect is Effect.NEW_CLUSTER), name


@pytest.mark.parametrize(
    "key",
    [
        "cache.page_tokens", "prefill.cache.page_tokens", "cache.index_dtype", "cache.kv_dtype", "engine.dtype",
        "engine.models", "engine.activations", "engine.draft_model", "adapters.load", "adapters.roots",
        "engine.attention", "engine.numerics", "engine.numerics_class", "engine.device", "engine.context",
        "transfer.plane", "decode.tp", "router.kv_index",
        "security.cluster_ca", "cluster.controller_port", "cache.events.endpoint", "autoscaling.enabled",
        "disaggregation.mode", "disaggregation.step_tokens", "router.served_model_name",
        "cache.storage.backend", "cache.storage.path", "cache.storage.url", "cache.storage.group_access",
    ],
)  # fmt: skip
def test_what_workers_must_have_in_common_or_services_read_needs_a_new_cluster(key: str) -> None:
    assert effect_of(key).effect is Effect.NEW_CLUSTER


@pytest.mark.parametrize(
    ("key", "value", "services"),
    [
        ("router.stall_s", 7, "routers"),
        ("disaggregation.local_tokens", 7, "routers"),
        ("audit.fraction", 0.5, "routers"),
        ("autoscaling.max_workers", 7, "controllers"),
        ("audit.chunk_tokens", 64, ""),
        ("prefill.chunk_tokens", 64, ""),
        ("cluster.lease_s", 7, ""),
    ],
)
def test_services_are_replaced_for_what_they_read(key: str, value: float, services: str) -> None:
    assert services_of(key) == services
    section, name = key.split(".")
    before, after = Config(), config_from_dict({section: {name: value}})
    assert (routers_digest(after) != routers_digest(before)) == bool(services)
    assert (controllers_digest(after) != controllers_digest(before)) == (services == "controllers")


@pytest.mark.parametrize("key", ["prefill.chunk_tokens", "prefill.short_share", "colocate.mixed_steps", "audit.margin"])
def test_what_prefill_reads_rolls_decode_workers_too_that_compute_prompts(key: str) -> None:
    section, name = key.split(".")
    always = config_from_dict({})
    conditional = config_from_dict({"disaggregation": {"mode": "conditional"}})
    assert Role.DECODE not in roles_of(key, always)
    assert Role.DECODE in roles_of(key, conditional)
    changed = {section: {name: {"chunk_tokens": 64, "short_share": 0.5, "mixed_steps": False, "margin": 0.7}[name]}}
    for config, differs in ((always, False), (conditional, True)):
        after = config_from_dict(merged(config, changed))
        assert (settings_digest(after, Role.DECODE) != settings_digest(config, Role.DECODE)) == differs
    assert Role.DECODE not in roles_of("prefill.cache.host_bytes", conditional), "the cache is prefill's own"


def test_keys_that_are_given_replace_and_others_stay() -> None:
    before = config_from_dict(
        {
            "prefill": {"chunk_tokens": 64, "cache": {"host_bytes": 5, "device_tokens": 48}},
            "decode": {"retract": "recompute"},
            "cache": {"storage": {"ttl_s": 9}},
        }
    )
    changes = {"prefill": {"cache": {"host_bytes": 7}}, "cache": {"device_tokens": 32, "storage": {"timeout_s": 2.0}}}
    tree = merged(before, changes)
    after = config_from_dict(tree)
    changed = {key for key, value in settings_of(after).items() if settings_of(before)[key] != value}
    assert changed == {"prefill.cache.host_bytes", "cache.device_tokens", "cache.storage.timeout_s"}
    assert (after.prefill.chunk_tokens, after.prefill.cache.host_bytes) == (64, 7)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"prefill": 3}, "prefill"),
        ({"prefill": {"cache": None}}, "prefill.cache"),
        ({"prefil": {}}, "prefil"),
        ({"decode": {"max_batch": 3}}, "decode.max_batch"),
        ({"decode": {"max_batch_tokens": 0}}, "decode.max_batch_tokens"),
        ({"decode": {"max_batch_tokens": "x"}}, "decode.max_batch_tokens"),
        ({"pools": {"prefill": 1, "colocated": 1}}, "pools.colocated"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        config_from_dict(merged(Config(), settings))


def test_a_digest_changes_with_what_its_role_reads_alone() -> None:
    def digests(**sections: Any) -> tuple[str, str]:
        config = config_from_dict(sections)
        return settings_digest(config, Role.PREFILL), settings_digest(config, Role.DECODE)

    prefill, decode = digests()
    assert prefill != decode
    assert digests() == (prefill, decode)
    assert digests(router={"stall_s": 9}, pools={"decode": 4}) == (prefill, decode)
    one = digests(prefill={"chunk_tokens": 9})
    assert one[0] != prefill
    assert one[1] == decode
    conditional = {"mode": "conditional"}
    alike, changed = (
        digests(disaggregation=conditional),
        digests(disaggregation=conditional, prefill={"chunk_tokens": 99}),
    )
    assert changed[0] != alike[0]
    assert changed[1] != alike[1], "its decode workers compute prompts, too"
    both = digests(decode={"kept_answer_s": 9})
    assert both[0] != prefill
    assert both[1] != decode

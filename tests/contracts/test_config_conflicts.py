"""What one key needs of another: refused just beyond its bound, taken at it, for every role and every value of a list.

Each line is the smallest configuration on either side of a rule, as an operator would write it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from twinpool.contracts.config.cache_config import CacheConfig, CacheOverride
from twinpool.contracts.config.cluster_config import Config, section_of
from twinpool.contracts.config.load_config import config_from_dict, load_config, may_have_host_memory
from twinpool.contracts.config.router_config import read_sampling_defaults
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role

ROLES = list(Role)
NO_BUDGET = {"host_memory_share": 0}


def refusal(tree: dict[str, Any]) -> str:
    """What is wrong with a configuration; empty where nothing is."""
    try:
        config_from_dict(tree)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        (
            {"router": {"max_timeout_s": 70, "request_timeout_s": 70}},
            {"router": {"max_timeout_s": 69, "request_timeout_s": 70}},
            "router.max_timeout_s=69 is below router.request_timeout_s=70",
        ),
        (
            {"router": {"body_buffer_bytes": 100, "max_body_bytes": 100}},
            {"router": {"body_buffer_bytes": 99, "max_body_bytes": 100}},
            "router.body_buffer_bytes=99 is below router.max_body_bytes=100",
        ),
        ({"router": {"breaker_rate": 1}}, {"router": {"breaker_rate": 1.01}}, "router.breaker_rate is a share"),
        ({"prefill": {"short_share": 0.99}}, {"prefill": {"short_share": 1}}, "prefill.short_share is a share"),
        (
            {"decode": {"output_length_quantile": 1}},
            {"decode": {"output_length_quantile": 1.01}},
            "decode.output_length_quantile is a share",
        ),
        ({"audit": {"fraction": 1}}, {"audit": {"fraction": 1.01}}, "audit.fraction is a share"),
        ({"watch": {"rare_share": 0.99}}, {"watch": {"rare_share": 1}}, "watch.rare_share is a share"),
        ({"watch": {"window_tokens": 1024}}, {"watch": {"window_tokens": 1025}}, "watch.window_tokens must be at most"),
        ({"tracing": {"ratio": 1}}, {"tracing": {"ratio": 1.01}}, "tracing.ratio is a share"),
        (
            {"cluster": {"host_memory_share": 0.99}},
            {"cluster": {"host_memory_share": 1}},
            "cluster.host_memory_share is a share",
        ),
        (
            {"cache": {"events": {"replay_endpoint": "tcp://a:1", "endpoint": "tcp://a:2"}}},
            {"cache": {"events": {"replay_endpoint": "tcp://a:1"}}},
            "cache.events.replay_endpoint is tcp://a:1",
        ),
        (
            {"cache": {"strip_reasoning": True, "reasoning_tokens": "1,2"}},
            {"cache": {"strip_reasoning": True}},
            "cache.strip_reasoning needs cache.reasoning_tokens",
        ),
        (
            {"cache": {"storage": {"backend": "file", "path": "/a"}}},
            {"cache": {"storage": {"backend": "file", "url": "redis://h"}}},
            "storage.backend=file needs cache.storage.path",
        ),
        (
            {"cache": {"storage": {"backend": "redis", "url": "redis://h"}}},
            {"cache": {"storage": {"backend": "redis", "path": "/a"}}},
            "storage.backend=redis needs cache.storage.url",
        ),
        (
            {"cache": {"storage": {"backend": "memory"}}, "cluster": {"host_memory_share": 0, "host_memory_bytes": 9}},
            {"cache": {"storage": {"backend": "memory"}}, "cluster": NO_BUDGET},
            "cache.storage.backend=memory needs host memory",
        ),
        (
            {"pools": {"prefill": 1, "decode": 2}},
            {"pools": {"colocated": 1, "decode": 2}},
            "pools.colocated goes without pools.prefill and pools.decode",
        ),
        (
            {"disaggregation": {"mode": "conditional", "step_tokens": 32}, "decode": {"cache": {"page_tokens": 32}}},
            {"disaggregation": {"mode": "conditional", "step_tokens": 31}, "decode": {"cache": {"page_tokens": 32}}},
            "disaggregation.step_tokens=31 is below decode's cache.page_tokens=32",
        ),
        (
            {"engine": {"draft_model": "mtp"}, "decode": {"speculation": "draft_model"}},
            {"decode": {"speculation": "draft_model"}},
            "decode.speculation=draft_model needs engine.draft_model",
        ),
        (
            {"engine": {"draft_model": "mtp"}, "prefill": {"tp": 2}},
            {"engine": {"draft_model": "mtp"}, "decode": {"tp": 2}},
            "engine.draft_model=mtp needs decode.tp=1",
        ),
        (
            {"engine": {"draft_model": "mtp"}, "prefill": {"tp": 2}},
            {"engine": {"draft_model": "mtp"}, "colocate": {"tp": 2}},
            "engine.draft_model=mtp needs colocate.tp=1",
        ),
        (
            {"adapters": {"max_rank": 8}, "engine": {"models": "transformers"}},
            {"adapters": {"roots": "/a"}, "engine": {"models": "transformers"}},
            "adapters needs engine.models=native",
        ),
        ({"engine": {"device": "cuda:12"}}, {"engine": {"device": "cuda:1234"}}, "engine.device must be"),
        (
            {"tracing": {"endpoint": "http://a:1/v1/traces"}},
            {"tracing": {"endpoint": "http://a:1/"}},
            "tracing.endpoint takes a URL with its path",
        ),
        (
            {"security": {"cors_origins": "https://a, https://b/, *"}},
            {"security": {"cors_origins": "*, https://b/path"}},
            "got 'https://b/path'",
        ),
        (
            {"security": {"cluster_ca": "a", "cluster_cert": "b", "cluster_key": "c"}},
            {"security": {"cluster_ca": "a", "cluster_cert": "b"}},
            "security.cluster_key is missing",
        ),
        (
            {"security": {"cluster_ca": "a", "cluster_cert": "b", "cluster_key": "c"}},
            {"security": {"cluster_cert": "b"}},
            "security.cluster_ca is missing",
        ),
        (
            {"security": {"ledger_cert": "a", "ledger_key": "b"}, "cluster": {"ledger": "rediss://h"}},
            {"security": {"ledger_cert": "a"}, "cluster": {"ledger": "rediss://h"}},
            "security.ledger_key is missing",
        ),
        (
            {"security": {"ledger_cert": "a", "ledger_key": "b"}, "cluster": {"ledger": "rediss://h"}},
            {"security": {"ledger_cert": "a", "ledger_key": "b"}, "cluster": {"ledger": "redis://h"}},
            "security.ledger_cert is for a ledger over TLS",
        ),
        (
            {"security": {"ledger_password_file": "a"}, "cluster": {"ledger": "redis://h"}},
            {"security": {"ledger_password_file": "a"}, "cluster": {"ledger": "/a/file"}},
            "security.ledger_password_file needs cluster.ledger on a server",
        ),
        ({"security": {"admin_port": 65_535}}, {"security": {"admin_port": 65_536}}, "admin_port must be at most"),
        (
            {"cluster": {"controllers": "h:65535", "ledger": "redis://h", "name": "x"}},
            {"cluster": {"controllers": "h:65536", "ledger": "redis://h", "name": "x"}},
            "takes host:port",
        ),
        (
            {"cluster": {"controllers": "h:1", "ledger": "redis://h", "name": "x"}},
            {"cluster": {"controllers": "h:0", "ledger": "redis://h", "name": "x"}},
            "takes host:port",
        ),
        (
            {"cluster": {"controllers": "h:1", "ledger": "redis://h", "name": "x"}},
            {"cluster": {"controllers": "h:1", "ledger": "redis://h"}},
            "needs cluster.ledger on a server and cluster.name",
        ),
        (
            {"cluster": {"controllers": "h:1", "ledger": "redis://h", "name": "x", "leader_lease_s": 5}},
            {"cluster": {"controllers": "h:1", "ledger": "redis://h", "name": "x", "leader_lease_s": 5.1}},
            "more than half of cluster.lease_s",
        ),
        ({"cluster": {"standby_controllers": 8}}, {"cluster": {"standby_controllers": 9}}, "must be at most 8"),
        ({"cluster": {"ledger": "unix:///a?db=1"}}, {"cluster": {"ledger": "redis://h?db=1"}}, "isn't taken"),
        (
            {"cluster": {"ray_storage": "redis://h/0"}},
            {"cluster": {"ray_storage": "redis://h/1"}},
            "Ray takes database 0 alone",
        ),
        ({"cluster": {"ray_storage": "rediss://h"}}, {"cluster": {"ray_storage": "unix:///a"}}, "ray_storage"),
        (
            {"autoscaling": {"enabled": True, "prefill_use": 1}},
            {"autoscaling": {"enabled": True, "prefill_use": 1.1}},
            "autoscaling.prefill_use is a share",
        ),
        (
            {"autoscaling": {"enabled": True, "decode_use": 1}},
            {"autoscaling": {"enabled": True, "decode_use": 1.1}},
            "autoscaling.decode_use is a share",
        ),
        (
            {"autoscaling": {"enabled": True, "window_s": 15}},
            {"autoscaling": {"enabled": True, "window_s": 14.9}},
            "must be at least three times",
        ),
        (
            {"autoscaling": {"enabled": True, "max_workers": 2}},
            {"autoscaling": {"enabled": True, "max_workers": 2, "decode": {"min_workers": 2}}},
            "is below the two pools' min_workers, 3 together",
        ),
        *(
            ({section: {key: "/a , /b,"}}, {section: {key: "/a, b"}}, f"{section}.{key} takes absolute folders")
            for section, key in (("adapters", "roots"), ("engine", "weight_roots"))
        ),
        ({"batch": {"folder": "/a"}}, {"batch": {"folder": "a"}}, "batch.folder takes an absolute folder"),
        (
            {"engine": {"weight_roots": " , ", "models": "transformers"}},
            {"engine": {"weight_roots": "/a", "models": "transformers"}},
            "engine.weight_roots needs engine.models=native",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_rule_holds_from_its_bound_on(good: dict[str, Any], bad: dict[str, Any], words: str) -> None:
    assert refusal(good) == ""
    assert words in refusal(bad)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("device_share", 1.1, "cache.device_share is a share"), ("page_tokens", 24, "cache.page_tokens must be a power")],
)
def test_what_one_role_overrides_is_judged_too(role: Role, key: str, value: float, words: str) -> None:
    assert words in refusal({section_of(role): {"cache": {key: value}}})
    assert words in refusal({"cache": {key: value}})


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("key", ["device_tokens", "device_requests", "host_bytes"])
def test_every_role_may_set_a_size_of_its_cache_to_none(role: Role, key: str) -> None:
    config = config_from_dict({"cache": {key: 64}, section_of(role): {"cache": {key: 0}}})
    assert {each: getattr(config.cache_for(each), key) for each in ROLES} == dict.fromkeys(ROLES, 64) | {role: 0}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CacheOverride)])
def test_an_override_counts_whatever_its_value_and_without_one_the_common_value_does(role: Role, field: str) -> None:
    """Zero and false are values."""
    common = dataclasses.replace(CacheConfig(), **{field: "common"})  # type: ignore[arg-type]
    config = dataclasses.replace(Config(), cache=common)
    assert getattr(config.cache_for(role), field) == "common"
    for value in (0, False, "own"):
        mine = config.with_cache(role, CacheOverride(**{field: value}))  # type: ignore[arg-type]
        assert getattr(mine.cache_for(role), field) is value


def test_host_memory_of_one_role_is_no_other_roles_and_takes_the_budgets_place() -> None:
    budget = config_from_dict({})
    assert all(may_have_host_memory(budget, role) for role in ROLES)
    for role in ROLES:
        own = config_from_dict({section_of(role): {"cache": {"host_bytes": 1 << 20}}})
        assert {each: may_have_host_memory(own, each) for each in ROLES} == {each: each is role for each in ROLES}
        assert may_have_host_memory(own)
    none = config_from_dict({"cluster": NO_BUDGET})
    assert not any(may_have_host_memory(none, role) for role in ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_copies_of_retracted_requests_need_host_memory_where_decode_is(role: Role) -> None:
    own = {section_of(role): {"cache": {"host_bytes": 1 << 20}}}
    tree = {**own, "decode": {**own.get("decode", {}), "retract": "copy"}}
    assert bool(refusal(tree)) == (role is Role.PREFILL)


def test_all_assignments_are_read_after_one_that_is_wrong() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, ["port", "router.stall_s=-1", "leaf.=1", "decode.draft_tokens=x"])
    lines = str(refused.value).splitlines()
    assert lines[0].startswith("4 errors")


def test_a_section_that_is_none_is_told_of_alone() -> None:
    """What its keys would have said isn't known, so nothing that needs one of them is judged."""
    tree = {"cache": 5, "decode": {"retract": "copy"}, "cluster": NO_BUDGET}
    assert refusal(tree) == "config section cache must hold keys, got 5"


def test_an_empty_text_is_a_value_of_an_assignment() -> None:
    assert load_config(None, ["cluster.name=x", "cluster.name="]).cluster.name == ""


@pytest.mark.parametrize(("key", "value"), [("router.stall_s", True), ("decode.max_batch_tokens", True)])
def test_yes_is_no_number(key: str, value: bool) -> None:
    section, name = key.split(".")
    assert f"config key {key} must be" in refusal({section: {name: value}})


def test_sampling_defaults_add_to_those_of_the_checkpoint_and_leave_these_alone() -> None:
    checkpoint = {"temperature": 0.7, "top_k": 40.0}
    assert read_sampling_defaults("temperature=0, top_p=0.9", checkpoint) == {
        "temperature": 0.0,
        "top_k": 40.0,
        "top_p": 0.9,
    }
    mine = read_sampling_defaults("checkpoint", checkpoint)
    mine["min_p"] = 1.0
    assert checkpoint == {"temperature": 0.7, "top_k": 40.0}
    assert read_sampling_defaults("none", checkpoint) == {}


@pytest.mark.parametrize(
    ("name", "least", "most", "step"),
    [("temperature", 0, 100, 0.5), ("top_p", 0, 1, 0.5), ("top_k", -1, 2**31 - 1, 1), ("min_p", 0, 1, 0.5),
     ("repetition_penalty", 0.01, 100, 0.005)],
)  # fmt: skip
def test_a_sampling_default_is_within_what_a_request_may_ask_for(
    name: str, least: float, most: float, step: float
) -> None:
    for value in (least, most):
        assert read_sampling_defaults(f"{name}={value}", {})[name] == value
    for text in (least - step, most + step, "nan", "", "much"):
        with pytest.raises(ConfigError, match=rf"router.sampling_defaults: {name} must be from"):
            read_sampling_defaults(f"{name}={text}", {})

"""The section `models` of a configuration file: what each model gets of it, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from twinpool.cluster.serve.models_config import change_of_models, check_checkpoints, models_of, places_of
from twinpool.contracts.config.load_config import config_from_dict, load_config
from twinpool.contracts.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "models.yaml"


def read(file: Path, tree: dict[str, Any], *assignments: str) -> Any:
    file.write_text(yaml.safe_dump(tree))
    return models_of(file, assignments)


def test_a_file_without_the_section_has_no_models(file: Path) -> None:
    assert read(file, {"launch": {"port": 8001}}) == {}
    assert models_of(None) == {}


def test_each_model_has_the_rest_of_the_file_with_its_own_keys_in_place(file: Path) -> None:
    common = {"launch": {"port": 8001, "model": "demo"}, "cache": {"device_tokens": 4096, "page_tokens": 16}}
    own = {"a": {"pools": {"decode": 2}}, "b": {"launch": {"model": "smollm2"}, "cache": {"page_tokens": 32}}}
    models = read(file, {**common, "models": own}, "cache.device_tokens=2048", "models.b.pools.prefill=3")
    assert list(models) == ["a", "b"]
    a, b = models.values()
    assert [one.launch.model for one in (a, b)] == ["demo", "smollm2"]
    assert [one.launch.port for one in (a, b)] == [8001, 8001]
    assert [one.cache.page_tokens for one in (a, b)] == [16, 32]
    assert [one.cache.device_tokens for one in (a, b)] == [2048, 2048]
    assert [(one.pools.prefill, one.pools.decode) for one in (a, b)] == [(0, 2), (3, 0)]
    assert [places_of(one) for one in (a, b)] == [3, 4]


def test_a_model_is_served_under_its_name_and_those_that_it_adds(file: Path) -> None:
    models = read(file, {"models": {"a": None, "b": {"router": {"served_model_name": "b, bee"}}}})
    assert [one.router.served_model_name for one in models.values()] == ["a", "b, bee"]


def test_names_and_ledgers_of_clusters_are_told_apart(file: Path) -> None:
    models = read(file, {"cluster": {"name": "c", "ledger": "/x/table"}, "models": {"a": {}, "b": {}}})
    assert [(one.cluster.name, one.cluster.ledger) for one in models.values()] == [
        ("c.a", "/x/table.a"),
        ("c.b", "/x/table.b"),
    ]


@pytest.mark.parametrize(
    ("tree", "word"),
    [
        ({"models": {}}, "must hold 1 to 64 models"),
        ({"models": ["a"]}, "must hold 1 to 64 models"),
        ({"models": {"a b": {}}}, "a model's name"),
        ({"models": {"a": 7}}, "models.a must hold keys"),
        ({"models": {"a": {"cach": {}}}}, "model a: unknown config key cach"),
        ({"models": {"a": {"launch": {"port": 1}}}}, "models.a.launch.port is of the endpoint"),
        ({"models": {"a": {"security": {"keys_file": "x"}}}}, "models.a.security is of the endpoint"),
        ({"models": {"a": {"router": {"max_connections": 5}}}}, "models.a.router.max_connections is of the endpoint"),
        ({"models": {"a": {}, "b": {"router": {"served_model_name": "a"}}}}, "models a and b are both served as a"),
        ({"cluster": {"controller_port": 7000}, "models": {"a": {}, "b": {}}}, "both controlled at port 7000"),
        ({"transfer": {"plane": "local"}, "models": {"a": {}}}, "model a: transfer.plane=local"),
        ({"models": {"a": {"batch": {"folder": "/x"}}}}, "models.a.batch is of the endpoint"),
        ({"cluster": {"controllers": "h:1", "name": "n", "ledger": "redis://h:1"}, "models": {"a": {}}}, "controllers"),
    ],
)
def test_what_several_models_can_not_have_is_refused_by_name(file: Path, tree: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(file, tree)
    assert word in str(refused.value)


def test_who_takes_one_model_refuses_a_file_of_several(file: Path) -> None:
    read(file, {"models": {"a": {}}})
    with pytest.raises(ConfigError, match="has several models"):
        load_config(file)


def test_each_models_cluster_is_told_what_the_file_names_and_another_endpoint_is_refused(file: Path) -> None:
    tree: dict[str, Any] = {
        "launch": {"port": 8001, "model": "demo"},
        "security": {"admin_port": 9001, "keys_file": "/etc/keys.json"},
        "decode": {"max_batch_tokens": 8},
        "cluster": {"name": "here"},
        "models": {"a": {"decode": {"max_batch_tokens": 4}}, "b": {"router": {"served_model_name": "also"}}},
    }
    running = read(file, tree)
    assert change_of_models(file, running).settings == {
        "a": {
            "launch": {"model": "demo"},
            "security": {"keys_file": "/etc/keys.json"},
            "decode": {"max_batch_tokens": 4},
            "cluster": {"name": "here.a"},
        },
        "b": {
            "launch": {"model": "demo"},
            "security": {"keys_file": "/etc/keys.json"},
            "decode": {"max_batch_tokens": 8},
            "cluster": {"name": "here.b"},
            "router": {"served_model_name": "b, also"},
        },
    }
    for section, key, value in (("launch", "port", 8002), ("security", "admin_port", 9002)):
        read(file, {**tree, section: {**tree[section], key: value}})
        with pytest.raises(ConfigError, match=f"{section}.{key} is of the endpoint"):
            change_of_models(file, running)


def test_models_that_a_file_names_and_that_do_not_run_are_added_and_the_other_way_round(file: Path) -> None:
    running = read(file, {"models": {"a": {}, "b": {}}})
    (folder := Path(os.path.relpath(file.parent)) / "folder").mkdir()
    after = {"c": {"launch": {"model": str(folder)}}, "a": {"decode": {"max_batch_tokens": 4}}}
    read(file, {"cache": {"device_tokens": 64}, "models": after})
    change = change_of_models(file, running)
    assert (list(change.added), change.removed) == (["c"], ("b",))
    added = change.added["c"]
    assert (added.launch.model, added.cache.device_tokens) == (str(folder.absolute()), 64)
    assert change.settings == {"a": {"cache": {"device_tokens": 64}, "decode": {"max_batch_tokens": 4}}}
    read(file, {"models": {"c": {}}})
    with pytest.raises(ConfigError, match=r"none of the models that run \(a, b\), and one at least must stay"):
        change_of_models(file, running)


def test_a_model_without_a_checkpoint_is_refused_by_name_before_anything_is_changed(tmp_path: Path) -> None:
    good, lacking = config_from_dict({}), config_from_dict({"launch": {"model": str(tmp_path / "none")}})
    check_checkpoints({"a": good}, print)
    with pytest.raises(ConfigError, match=f"model b: checkpoint folder {tmp_path}/none does not exist"):
        check_checkpoints({"a": good, "b": lacking}, print)

"""Text from outside, nested as deep as somebody likes: whoever reads it says what is wrong in its own words."""

from __future__ import annotations

import ast
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twinpool.cluster.controller.wanted_worker import from_ledger
from twinpool.cluster.serve.changed_settings import _given
from twinpool.cluster.serve.detached_state import STATE_FILE, DetachedState
from twinpool.contracts.checkpoint.safetensors_headers import read_file_headers, read_json
from twinpool.contracts.config.cluster_config import ClusterConfig, Config
from twinpool.contracts.config.load_config import config_from_dict, load_config, read_config_json
from twinpool.contracts.errors import CheckpointError, ConfigError, RequestError
from twinpool.contracts.ids import WorkerName
from twinpool.contracts.key_file import read_key_file
from twinpool.contracts.outside_data import MAX_NESTED, read_yaml
from twinpool.contracts.outside_data import read_json as outside_json
from twinpool.router.openai.structured_output import _schema
from twinpool.router.openai.tools import _read_call
from twinpool.router.text.tokenizer import read_model_tokenizer
from twinpool.router.tokenizer_pool.prepare_request import read_json as read_body
from twinpool.sim.scale.cluster_plan import read_costs
from twinpool.sim.scale.traffic import read_trace

ROOT = Path(__file__).parents[2]
DEPTHS = (MAX_NESTED + 1, 900, 5000)
"""Beyond the bound; what the parser just takes and whoever walks through it doesn't; beyond the parser's own."""


def nested(depth: int) -> str:
    return '{"x":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


def in_file(read: Callable[[Path], object], name: str = "file.json") -> Callable[[Path, str], object]:
    def run(folder: Path, text: str) -> object:
        (folder / name).write_text(text)
        return read(folder / name)

    return run


def safetensors(folder: Path, text: str) -> object:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text.encode())
    return read_file_headers(folder / "model.safetensors")


YAML = ("configuration", "--set")
"""Their parser takes a second to find out that there is no end."""
READERS: dict[str, tuple[type[Exception], Callable[[Path, str], object]]] = {
    "key file": (ConfigError, in_file(read_key_file)),
    "configuration": (ConfigError, in_file(load_config, "config.yaml")),
    "--set": (ConfigError, lambda folder, text: load_config(None, [f"router.port={text}"])),
    "configuration of a process": (ConfigError, in_file(read_config_json)),
    "settings": (ConfigError, lambda folder, text: _given(Config(), text)),
    "config.json": (CheckpointError, in_file(read_json)),
    "tokenizer_config.json": (
        CheckpointError,
        in_file(lambda path: read_model_tokenizer(path.parent, 1000), "tokenizer_config.json"),
    ),
    "safetensors header": (CheckpointError, safetensors),
    "trace": (ValueError, in_file(read_trace)),
    "measured costs": (ConfigError, in_file(read_costs)),
    "state of a cluster": (ConfigError, in_file(lambda path: DetachedState.load(path.parent), STATE_FILE)),
    "row of the ledger": (
        ValueError,
        lambda folder, text: from_ledger(WorkerName("decode-0"), text, ClusterConfig()),
    ),
    "body": (RequestError, lambda folder, text: read_body(text.encode())),
    "schema": (RequestError, lambda folder, text: _schema(text, "response_format")),
    "arguments of a call": (
        RequestError,
        lambda folder, text: _read_call({"function": {"name": "f", "arguments": text}}, "messages[0]"),
    ),
}


CASES = [
    pytest.param(name, depth, marks=[pytest.mark.slow] if name in YAML and depth > DEPTHS[0] else [])
    for name in READERS
    for depth in DEPTHS
    if name not in YAML or depth != 900
]


@pytest.mark.parametrize(("name", "depth"), CASES)
def test_what_is_nested_too_deeply_is_refused_by_its_reader(tmp_path: Path, name: str, depth: int) -> None:
    error, read = READERS[name]
    with pytest.raises(error, match=r"nested too deeply|malformed safetensors header"):
        read(tmp_path, nested(depth))


def test_what_is_nested_up_to_the_bound_is_read() -> None:
    text = nested(MAX_NESTED)
    assert outside_json(text) == outside_json(text.encode()) == read_yaml(text) == json.loads(text)
    many = json.dumps([[[number] for number in range(MAX_NESTED)]] * 3)
    assert outside_json(many) == json.loads(many), "many lists aren't deep ones"


@pytest.mark.parametrize("text", ["when: 2026-99-99", "a: &a [*a]", "a: [", "number: " + "9" * 5000])
def test_yaml_that_is_none_is_an_error_of_the_configuration(tmp_path: Path, text: str) -> None:
    """A date that is none and a number of too many digits end the parser with errors that aren't its own."""
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(None, [f"router.port={text.partition(': ')[2]}"])
    assert config_from_dict({}) == Config()


OWN = {
    "cluster/assembly/node_shares.py": "a process of ours wrote it",
    "cluster/ray_nodes/control_store.py": "this program wrote it, into a folder of its own",
    "cluster/ray_nodes/host_facts.py": "a process of ours wrote it",
    "cluster/ray_nodes/ray_facts.py": "a process of ours and Ray wrote it",
    "cli/load/demo_command.py": "a router that this command started wrote it",
    "cli/load/replay_command.py": "it was read before",
    "cluster/serve/offline_llm.py": "the router of this process wrote it",
    "contracts/outside_data.py": "the reader itself",
    "engine/tensors/launch_configs.py": "it is a file of this repository",
    "router/openai/chat_format.py": "this program wrote it, of a body that was read",
    "router/openai/client_grammar.py": "the grammar's compiler wrote it, of a body that was read",
    "router/openai/structured_output.py": "the grammar's compiler wrote it, of a body that was read",
    "router/openai_responses/responses_writer.py": "this program wrote it, of a body that was read",
    "router/parsers/json_calls.py": "it is one string",
    "router/parsers/element_calls.py": "it only looks whether a model's text is JSON, and catches all that this raises",
}
"""Where the parsers are called themselves, and why what they read can't be nested at somebody's will."""


def test_whatever_comes_from_outside_is_read_by_the_bounded_readers() -> None:
    parsers = {("json", "loads"), ("json", "load"), ("yaml", "safe_load"), ("yaml", "load")}
    found = set()
    for top in ("cache", "cli", "cluster", "colocate", "constraints", "contracts", "decode", "engine", "prefill",
                "router", "sim", "transfer", "worker"):  # fmt: skip
        for path in (ROOT / top).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "json.load" not in text and "yaml." not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                func: Any = node.func if isinstance(node, ast.Call) else node
                if (
                    isinstance(func, ast.Attribute)
                    and isinstance(func.value, ast.Name)
                    and (func.value.id, func.attr) in parsers
                ):
                    found.add(str(path.relative_to(ROOT)))
    assert found == set(OWN)

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.preflight import DEMO, MemoryShort, ServeOptions, device_tokens, pool_set_of, prepare, token_bytes
from contracts.config import load_config
from contracts.errors import CheckpointError, ConfigError
from contracts.ids import Role

GIB = 1 << 30


def options(**changes: object) -> ServeOptions:
    return replace(ServeOptions(port=0), **changes)  # type: ignore[arg-type]


def test_pools_hold_eight_contexts_where_memory_allows() -> None:
    prepared = prepare(options(), free_bytes=64 * GIB)
    assert prepared.device_tokens == dict.fromkeys(Role, 8 * prepared.spec.context)


def test_pools_take_a_quarter_of_a_workers_share_of_free_memory_at_most() -> None:
    config = load_config(assignments=["cache.page_tokens=64"])
    spec = prepare(options(), 8 * GIB).spec
    pool_set = pool_set_of(spec, config)
    share = 20 << 20
    tokens = device_tokens(config, spec, pool_set, Role.DECODE, share)
    assert tokens % 64 == 0
    assert share / 4 - 64 * token_bytes(pool_set) < tokens * token_bytes(pool_set) <= share / 4
    with pytest.raises(MemoryShort, match="too little for one page"):
        device_tokens(config, spec, pool_set, Role.DECODE, 100_000)


def test_pool_sizes_can_be_set_by_role() -> None:
    prepared = prepare(options(assignments=("cache.device_tokens=4096", "decode.cache.device_tokens=1030")), 8 * GIB)
    assert prepared.device_tokens == {Role.PREFILL: 4096, Role.DECODE: 1024}


def test_threads_are_cores_divided_by_workers_and_at_least_one() -> None:
    assert prepare(options(prefill=30, decode=30), 512 * GIB).threads == 1
    assert prepare(options(assignments=("engine.threads=7",)), 8 * GIB).threads == 7


def test_workers_are_named_by_role_and_number() -> None:
    names = [name for name, _ in prepare(options(prefill=1, decode=2), 8 * GIB).workers]
    assert names == ["prefill-0", "decode-0", "decode-1"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefill": 0}, "--prefill must be at least 1"),
        ({"decode": -1}, "--decode must be at least 1"),
        ({"port": 70000}, "--port"),
        ({"host": "192.0.2.77"}, "--host"),
        ({"config": Path("/nowhere.yaml")}, "/nowhere.yaml"),
        ({"assignments": ("engine.theads=1",)}, "did you mean engine.threads"),
        ({"assignments": ("engine=[[",)}, "--set"),
        ({"assignments": ("cache.device_tokens=3",)}, "less than one page"),
        ({"assignments": ("decode.cache.page_tokens=32",)}, "page_tokens is 16 and decode.cache.page_tokens is 32"),
        ({"assignments": ("transfer.plane=local",), "ray_address": "auto"}, "--ray-address"),
        ({"assignments": ("engine.device=cuda",)}, "engine.device=cpu"),
        ({"assignments": ("cache.storage.backend=memory",)}, "set cache.host_bytes"),
        ({"assignments": ("cache.host_bytes=9999999", "cache.storage.backend=file")}, "needs cache.storage.path"),
        (
            {"assignments": ("decode.cache.host_bytes=9999999", "cache.storage.backend=redis")},
            "needs cache.storage.url",
        ),
        ({"assignments": ("cache.strip_reasoning=true",)}, "needs cache.reasoning_tokens"),
    ],
)
def test_what_can_not_work_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(options(**changes), 8 * GIB)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--port"):
            prepare(options(port=port), 8 * GIB)


def test_port_zero_is_some_free_port() -> None:
    assert prepare(options(), 8 * GIB).port > 0


def test_too_little_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(MemoryShort, match=r"MiB are free: start fewer workers or lower cache.device_tokens"):
        prepare(options(assignments=("cache.device_tokens=100000000",)), 8 * GIB)
    with pytest.raises(MemoryShort, match=r"lower cache.device_tokens or cache.host_bytes"):
        prepare(options(assignments=(f"cache.host_bytes={5 * GIB}",)), 8 * GIB)


def test_a_bad_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    truncated = shutil.copytree(DEMO, tmp_path / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    unknown = shutil.copytree(DEMO, tmp_path / "unknown")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(config | {"architectures": ["MysteryForCausalLM"]}))
    misshapen = shutil.copytree(DEMO, tmp_path / "misshapen")
    (misshapen / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] + 8}))
    for folder, words in (
        (tmp_path / "none", "none"),
        (truncated, "truncated"),
        (unknown, "Mystery"),
        (misshapen, "shape"),
    ):
        with pytest.raises(CheckpointError) as caught:
            prepare(options(model=str(folder)), 8 * GIB)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_bad_folder_fails_within_three_seconds_in_one_line_and_imports_neither_torch_nor_ray(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom cluster import cli\n"
        "code = cli.run(cli.parser().parse_args(sys.argv[1:]))\n"
        "print(sorted({'torch', 'ray', 'grpc'} & set(sys.modules)))\nsys.exit(code)"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script, "serve", "--model", str(tmp_path / "nothing"), "--port", "0"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert time.monotonic() - began < 3.0
    assert done.returncode == 1
    assert done.stdout.split() == ["[]"]
    assert done.stderr.splitlines() == [f"error: checkpoint folder {tmp_path / 'nothing'} does not exist"]

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_families import FAMILIES
from twinpool.cli.credential_commands import new_key
from twinpool.cli.load.model_memory import count_weights
from twinpool.cluster.assembly.node_shares import MemoryShort, measured
from twinpool.cluster.models import DEMO
from twinpool.cluster.serve.memory_fit import max_bytes
from twinpool.cluster.serve.preflight import ServeOptions, ServePlan, prepare
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.security_config import SecurityConfig
from twinpool.contracts.errors import CheckpointError, ConfigError
from twinpool.contracts.ids import PAIR, Role

GIB = 1 << 30


def options(**changes: object) -> ServeOptions:
    return replace(ServeOptions(port=0), **changes)  # type: ignore[arg-type]


def positions(assignments: tuple[str, ...] = (), free_bytes: int = 8 * GIB) -> dict[Role, int]:
    prepared = prepare(options(assignments=assignments), free_bytes)
    return {role: plan.positions for role, plan in prepared.here.plans.items()}


def test_pools_hold_eight_contexts_where_memory_allows() -> None:
    context = prepare(options(), free_bytes=64 * GIB).spec.context
    assert positions(free_bytes=64 * GIB) == dict.fromkeys(PAIR, 8 * context)


def test_a_shorter_context_takes_less_memory_and_is_what_pools_are_counted_in() -> None:
    own, shorter = prepare(options(), 64 * GIB), prepare(options(assignments=("engine.context=256",)), 64 * GIB)
    assert own.spec.context > shorter.spec.context == 256
    assert {plan.positions for plan in shorter.here.plans.values()} == {8 * 256}
    steps = [sum(step.nbytes for step in each.here.steps.values()) for each in (own, shorter)]
    assert steps[1] < steps[0]


def test_a_context_that_the_model_does_not_have_is_refused_and_what_would_give_it_is_said() -> None:
    with pytest.raises(ConfigError, match=r"engine\.context=4096 is more than the 2048 tokens of .*\"rope_scaling\":{"):
        prepare(options(assignments=("engine.context=4096",)), 64 * GIB)


def test_pool_sizes_can_be_set_by_role() -> None:
    assert positions(("cache.device_tokens=4096", "decode.cache.device_tokens=1030")) == {
        Role.PREFILL: 4096, Role.DECODE: 1024
    }  # fmt: skip


def test_threads_are_cores_divided_by_workers_and_at_least_one() -> None:
    assert (
        prepare(options(prefill=30, decode=30, assignments=("cluster.workers_per_core=0",)), 512 * GIB).here.threads
        == 1
    )
    assert prepare(options(assignments=("engine.threads=7",)), 8 * GIB).here.threads == 7


def test_workers_are_named_by_role_and_number() -> None:
    names = [name for name, _ in prepare(options(prefill=1, decode=2), 8 * GIB).workers]
    assert names == ["prefill-0", "decode-0", "decode-1"]


def test_colocated_workers_take_the_place_of_both_pools() -> None:
    prepared = prepare(options(colocate=2, assignments=("colocate.cache.device_tokens=4096",)), 8 * GIB)
    assert [name for name, _ in prepared.workers] == ["colocated-0", "colocated-1"]
    assert {role: plan.positions for role, plan in prepared.here.plans.items()} == {Role.COLOCATED: 4096}
    assert prepared.here.workers == {Role.COLOCATED: 2}
    assert prepare(options(colocate=30, assignments=("cluster.workers_per_core=0",)), 512 * GIB).here.threads == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefill": 0}, "--prefill must be at least 1"),
        ({"decode": -1}, "--decode must be at least 1"),
        ({"colocate": -1}, "--colocate must be at least 1"),
        ({"colocate": 1, "decode": 2}, "--colocate goes without --prefill and --decode"),
        ({"port": 70000}, "--port"),
        ({"host": "192.0.2.77"}, "--host 192.0.2.77: whoever reaches this machine"),
        ({"host": "0.0.0.0"}, "twinpool keys new"),
        ({"host": "::"}, "--open"),
        ({"host": "192.0.2.77", "assignments": ("security.open=true",)}, "--host"),
        ({"assignments": ("security.keys_file=/nowhere.json",)}, "can't read the key file /nowhere.json"),
        ({"config": Path("/nowhere.yaml")}, "/nowhere.yaml"),
        ({"assignments": ("engine.theads=1",)}, "did you mean engine.threads"),
        ({"assignments": ("engine=[[",)}, "--set"),
        ({"assignments": ("cache.device_tokens=3",)}, "less than one page"),
        ({"assignments": ("decode.cache.page_tokens=32",)}, "page_tokens is 16 and decode.cache.page_tokens is 32"),
        ({"assignments": ("transfer.plane=local",), "ray_address": "auto"}, "--ray-address"),
        ({"assignments": ("engine.device=cuda",)}, "engine.device=cuda: torch sees no GPU: torch"),
        ({"assignments": ("engine.device=gpu",)}, "engine.device must be auto, cpu, cuda or cuda:N; got 'gpu'"),
        ({"assignments": ("engine.device=cuda:1",), "ray_address": "auto"}, "Ray deals GPUs out; use cuda"),
        ({"assignments": ("cache.device_share=1.5",)}, "cache.device_share is a share up to 1; got 1.5"),
        (
            {"assignments": ("cache.storage.backend=memory", "cluster.host_memory_share=0")},
            "set cache.host_bytes, or cluster.host_memory_share",
        ),
        ({"assignments": ("cluster.host_memory_share=1.5",)}, "below 1; got 1.5"),
        (
            {"assignments": ("cache.storage.backend=memory", "cluster.host_memory_bytes=4096")},
            "the budget leaves none: set cache.host_bytes",
        ),
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


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.7"])
def test_an_endpoint_for_this_machine_alone_needs_no_keys(host: str) -> None:
    assert prepare(options(host=host), 8 * GIB).config.security == SecurityConfig()


@pytest.mark.parametrize("with_keys", [True, False])
def test_an_endpoint_for_others_needs_keys_or_to_be_open(with_keys: bool, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    new_key(keys, "acme")
    setting = f"security.keys_file={keys}" if with_keys else "security.open=true"
    assert prepare(options(host="0.0.0.0", assignments=(setting,)), 8 * GIB).options.host == "0.0.0.0"


def test_every_model_has_drafts_unless_they_are_off(tmp_path: Path) -> None:
    wanted = ("decode.speculation=prompt_lookup",)
    hybrid = str(FAMILIES["falcon_h1"](tmp_path / "hybrid"))
    assert prepare(options(model=hybrid), 8 * GIB).config.decode.speculation == "prompt_lookup"
    assert prepare(options(assignments=wanted), 8 * GIB).config.decode.speculation == "prompt_lookup"
    assert prepare(options(), 8 * GIB).config.decode.speculation == "prompt_lookup"
    off = prepare(options(assignments=("decode.speculation=off",)), 8 * GIB)
    assert (off.config.decode.speculation, off.config.decode.drafts) == ("off", 0), "a word that YAML takes for no"
    with pytest.raises(ConfigError, match=r"one of auto, prompt_lookup, draft_model, off; got True$"):
        prepare(options(assignments=("decode.speculation=on",)), 8 * GIB)


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--port"):
            prepare(options(port=port), 8 * GIB)


def test_port_zero_is_some_free_port() -> None:
    assert prepare(options(), 8 * GIB).port > 0


def refused(free_bytes: int, *assignments: str, **changes: object) -> str:
    with pytest.raises(MemoryShort) as caught:
        prepare(options(assignments=assignments, **changes), free_bytes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("free_bytes", "assignments", "flags", "without"),
    [
        (8 * GIB, ("cache.device_tokens=100000000",), {}, ""),
        (8 * GIB, ("decode.cache.device_tokens=100000000", "prefill.cache.device_tokens=64"), {}, ""),
        (8 * GIB, (), {"prefill": 20, "decode": 20}, "--prefill 1 --decode 1 and "),
        (8 * GIB, (f"cache.host_bytes={5 * GIB}",), {}, "without cache.host_bytes, "),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would_and_that_does(
    free_bytes: int, assignments: tuple[str, ...], flags: dict[str, object], without: str
) -> None:
    said = refused(free_bytes, *assignments, **flags)
    assert "8,192 MiB are free" in said
    found = re.search(rf": {without}cache.device_tokens=(\d+) fits$", said)
    assert found, said
    flags = {} if "--prefill" in without else flags
    prepared = prepare(options(assignments=(f"cache.device_tokens={found[1]}",), **flags), free_bytes)
    assert min(plan.positions for plan in prepared.here.plans.values()) == int(found[1])


def test_the_index_of_host_memory_that_outlives_its_worker_is_planned_for() -> None:
    sizes = ("cache.device_tokens=4096", f"cache.host_bytes={GIB}")
    outlives, ends = "cache.arena=auto", "cache.arena=none"
    (need,) = re.findall(r"need about ([\d,]+) MiB", refused(GIB, *sizes, ends))
    free = (int(need.replace(",", "")) + 1) << 20
    prepare(options(assignments=(*sizes, ends)), free)
    assert "host tiers" in refused(free, *sizes, outlives)
    prepare(options(assignments=(*sizes, outlives, "transfer.plane=local")), free)
    prepare(options(assignments=(*sizes, outlives)), free + GIB)


def test_a_model_that_memory_can_never_hold_is_refused_as_such() -> None:
    assert "needs more memory" in refused(200 << 20)


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
def test_a_bad_folder_fails_in_one_line_before_anything_large_is_imported(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom twinpool.cli import command_line\nfrom twinpool.cli import commands as cli\n"
        "code = cli.run(command_line.parser().parse_args(sys.argv[1:]))\n"
        "large = {'torch', 'ray', 'grpc', 'triton', 'transformers', 'tokenizers', 'uvicorn'}\n"
        "print(sorted(large & set(sys.modules)))\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "serve", "--model", str(tmp_path / "nothing"), "--port", "0"],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.split() == ["[]"]
    assert done.stderr.splitlines() == [f"error: checkpoint folder {tmp_path / 'nothing'} does not exist"]


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (("decode.tp=3",), r"decode\.tp=3: .*2 key-value heads.*decode\.tp can be 1, 2, 4$"),
        (("prefill.tp=8",), r"prefill\.tp=8: .*prefill\.tp can be 1, 2, 4$"),
        (("prefill.tp=2", "transfer.plane=local"), r"prefill\.tp=2 needs a process for each rank: .*shm, nixl or zmq$"),
        (("prefill.tp=0",), r"prefill\.tp must be above 0"),
        (("decode.ep=0",), r"decode\.ep must be above 0"),
        (("decode.tp=4", "decode.ep=2"), r"decode\.ep=2 must be 1 or decode\.tp, which is 4$"),
        (("prefill.ep=2",), r"must be 1 or prefill\.tp, which is 1; with prefill\.ep=2, prefill\.tp has to be 2, too$"),
        (("decode.tp=2", "decode.ep=2"), r"decode\.ep=2: this model has no experts; it can be 1$"),
        (("decode.pp=9",), r"decode\.pp=9: \d layers can't be divided into \d stages; decode\.pp can be 1, 2"),
        (("prefill.pp=2", "transfer.plane=local"), r"prefill\.pp=2 needs a process for each rank: .*shm, nixl or zmq$"),
        (("prefill.pp=0",), r"prefill\.pp must be above 0"),
        (("decode.dp=0",), r"decode\.dp must be above 0"),
        (("decode.dp=2", "pools.decode=2"), r"decode\.dp=2: this model has no experts; .*: set decode\.dp=1$"),
        (("decode.dp=2", "decode.pp=2"), r"decode\.dp=2 and decode\.pp=2: .*set one of them to 1$"),
        (
            ("decode.dp=2", "pools.decode=2", "autoscaling.enabled=true", "autoscaling.decode.max_workers=5"),
            r"^autoscaling\.decode\.min_workers: 1 decode workers can't share .* multiple of it, as 2$",
        ),
        (("prefill.dp=2", "transfer.plane=local"), r"prefill\.dp=2 doesn't go with transfer\.plane=local yet"),
        (("decode.dp=2", "engine.share_weights=on"), r"decode\.dp=2 doesn't go with engine\.share_weights=on yet"),
        (("decode.pp=2", "decode.tp=2"), r"decode\.pp=2 and decode\.tp=2: .*set one of them to 1$"),
    ],
)
def test_ranks_that_cannot_share_the_model_are_refused_with_those_that_can(
    assignments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        prepare(options(assignments=assignments), 8 * GIB)


@pytest.mark.slow
def test_workers_may_share_experts_in_numbers_that_divide_both(tmp_path: Path) -> None:
    folder = str(FAMILIES["qwen3_moe"](tmp_path / "model"))

    def asked(workers: int, dp: int) -> ServePlan:
        return prepare(options(model=folder, decode=workers, assignments=(f"decode.dp={dp}",)), 8 * GIB)

    with pytest.raises(ConfigError, match=r"decode\.dp=3: dp=3 doesn't divide the 8 experts .* can be 1, 2, 4, 8$"):
        asked(3, 3)
    with pytest.raises(ConfigError, match=r"^3 decode workers can't share .* decode\.dp=2: .* as 2 or 4$"):
        asked(3, 2)
    whole, halves = asked(4, 1), asked(4, 2)
    spec = read_model_spec(Path(folder))
    experts = sum(header.end - header.begin for name, header in spec.headers.items() if ".experts." in name)
    took, less = (
        max_bytes(plan.here, plan.config, Role.DECODE) - plan.here.steps[Role.DECODE].nbytes for plan in (whole, halves)
    )
    assert took - less == pytest.approx(experts / 2, rel=0.02), "half of the experts is another worker's"
    assert count_weights(spec, halves.config, 2, gpu=False).held == pytest.approx(whole.weights - experts / 2, rel=0.02)
    assert halves.here.plans[Role.DECODE].nbytes == whole.here.plans[Role.DECODE].nbytes, "pages are whole on each"


@pytest.mark.slow
def test_experts_that_can_not_be_divided_may_be_spread(tmp_path: Path) -> None:
    """42 units of an expert can't be divided by four ranks; eight experts can be, whole."""
    folder = str(FAMILIES["qwen3_moe"](tmp_path / "model", moe_intermediate_size=42))
    ranks = ("decode.tp=4",)
    with pytest.raises(ConfigError, match=r"^decode\.tp=4: .*decode\.tp can be 1, 2$"):
        prepare(options(model=folder, assignments=ranks), 8 * GIB)
    spread = prepare(options(model=folder, assignments=(*ranks, "decode.ep=4")), 8 * GIB)
    assert spread.config.ep_for(Role.DECODE) == 4
    with pytest.raises(ConfigError, match=r"^decode\.tp=3: .*decode\.tp can be 1, 2, 4$"):
        prepare(options(model=folder, assignments=("decode.tp=3", "decode.ep=3")), 8 * GIB)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "stages", "words"),
    [
        ("qwen3_next", {}, 2, r"stage 0 of 2, layers 0 to 1 of 4, would have none of the 1 layers that keep k .*be 1$"),
        ("gemma4", {}, 2, r"decode\.pp=2: .*inputs of its own"),
        ("gemma4", {"hidden_size_per_layer_input": 0}, 2, r"pp=2: layer \d reads the keys of layer \d, which"),
        (
            "glm5",
            {"indexer_types": ["full", "full", "shared", "full"]},
            2,
            r"pp=2: layer 2 reads the selection of a layer",
        ),
        (
            "glm5",
            {"indexer_types": ["full", "shared", "full", "full"]},
            3,
            r"pp=3: layer 1 reads the selection of a layer",
        ),
    ],
)
def test_layers_that_need_each_other_are_not_divided(
    tmp_path: Path, family: str, changes: dict[str, Any], stages: int, words: str
) -> None:
    folder = str(FAMILIES[family](tmp_path / "model", **changes))
    with pytest.raises(ConfigError, match=words):
        prepare(options(model=folder, assignments=(f"decode.pp={stages}",)), 8 * GIB)


def test_stages_have_the_pools_of_one_rank_between_them() -> None:
    one, two = (prepare(options(assignments=(f"decode.pp={n}", "cache.device_tokens=4096")), 8 * GIB) for n in (1, 2))
    assert two.here.plans[Role.DECODE].nbytes == one.here.plans[Role.DECODE].nbytes


def test_ranks_have_threads_of_their_own_and_share_the_pools_memory() -> None:
    one, four = (prepare(options(assignments=(f"decode.tp={n}", "cache.device_tokens=4096")), 8 * GIB) for n in (1, 4))
    assert four.here.threads <= one.here.threads
    assert four.here.plans[Role.PREFILL] == one.here.plans[Role.PREFILL]
    # Two heads on four ranks: each is there twice.
    assert four.here.plans[Role.DECODE].nbytes == 2 * one.here.plans[Role.DECODE].nbytes


def test_the_served_names_are_those_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may look like a number, and names keep their order."""
    from twinpool.cli import command_line
    from twinpool.cli import commands as cli
    from twinpool.cli.command_parser import USAGE

    seen: list[ServeOptions] = []

    def prepared(options: ServeOptions, say: object) -> None:
        seen.append(options)
        raise ConfigError("far enough")

    monkeypatch.setattr("twinpool.cluster.serve.preflight.prepare", prepared)
    typed = ["serve", "--served-model-name", "007", "org/name", "--port", "0"]
    assert cli.run(command_line.parser().parse_args(typed)) == USAGE
    assert seen[0].port == 0, "which is no absent flag"
    spec = prepare(replace(seen[0], port=0), 8 * GIB).spec
    assert spec.names == ("007", "org/name")


def test_a_downloaded_snapshot_is_named_after_its_repository(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--some-name" / "snapshots" / "0123abc"
    shutil.copytree(DEMO, folder)
    assert prepare(options(model=str(folder)), 8 * GIB).spec.names == ("org/some-name",)
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert prepare(options(model=str(link)), 8 * GIB).spec.name == "org/some-name"


@pytest.mark.parametrize("count", [0, -1, 65])
def test_a_number_of_routers_that_can_not_be_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="--routers must be between 1 and 64"):
        prepare(options(routers=count), 8 * GIB)


def test_one_process_has_one_router() -> None:
    with pytest.raises(ConfigError, match="leave out --routers"):
        prepare(options(routers=2, assignments=("transfer.plane=local",)), 8 * GIB)


def test_more_processes_than_the_cores_take_are_refused_with_the_numbers() -> None:
    cores = measured({}).cores
    assert prepare(options(decode=cores, assignments=("cluster.workers_per_core=2",)), 64 * GIB)
    with pytest.raises(MemoryShort, match=rf"{2 * cores + 1} workers are .* cores take {2 * cores} \(cluster\.w"):
        prepare(options(decode=2 * cores, assignments=("cluster.workers_per_core=2",)), 64 * GIB)
    prepare(options(decode=2 * cores, assignments=("cluster.workers_per_core=0",)), 64 * GIB)

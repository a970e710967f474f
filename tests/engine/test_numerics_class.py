"""The numerics class: what it names, that a level holds a process to it, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.native import BUILDS, kernels_or_skip
from twinpool.contracts import cpu_levels as processor
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.contracts.errors import ConfigError
from twinpool.engine.native import compile_kernels as build
from twinpool.engine.native import compile_kernels as native
from twinpool.engine.runner import numerics_class as numerics
from twinpool.engine.runner.kernel_choice import class_of, hold_to_class
from twinpool.engine.runner.numerics_class import COMPUTES, ENGINE, code_digest, digest, digest_of, numerics_class

CPU = torch.device("cpu")
OLD, NEW = processor.LEVELS
OLD_FLAGS = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import hashlib, json, sys
import torch
from pathlib import Path
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.engine.runner.numerics_class import COMPUTES, ENGINE, code_digest, digest_of
from twinpool.engine.runner.kernel_choice import class_of, hold_to_class
from tests.engine.harness import Bench

level, folder = sys.argv[1:]
config = EngineConfig(numerics_class=level, threads=1)
hold_to_class(config)
bits = {}
for dtype in ("float32", "bfloat16"):
    logits = Bench(Path(folder), dtype=dtype, numerics_class=level, threads=1).forced(list(range(5, 105)), [100])
    bits[dtype] = hashlib.sha256(logits.numpy().tobytes()).hexdigest()
    bits["class " + dtype] = class_of(config, getattr(torch, dtype), torch.device("cpu"))
print(json.dumps(bits))
"""
"""Computes logits with a model, and the class, in a process held to a level."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.checkpoints import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("class") / "model", "qwen3")


def computed(level: str, folder: Path, **variables: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, level, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("level", processor.LEVELS)
def test_a_level_gives_the_same_bits_and_class_whatever_the_environment_says(level: str, model: Path) -> None:
    if level not in processor.levels():
        pytest.skip(f"this processor can't run {level}")
    plain = computed(level, model)
    weak = computed(
        level, model, ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41", MKL_CBWR="COMPATIBLE",
        OPENBLAS_CORETYPE="Nehalem",
    )  # fmt: skip
    assert plain == weak
    named = processor.VARIABLES[level]
    kernels = "torch" if "/torch/" in plain["class float32"] else f"native-{level}"
    for part in (kernels, f"aten-{named['ATEN_CPU_CAPABILITY']}", f"onednn-{named['ONEDNN_MAX_CPU_ISA'].lower()}"):
        assert part in plain["class float32"]


@pytest.mark.parametrize("level", BUILDS)
def test_the_digest_is_of_results_alone_and_the_same_each_time(level: str) -> None:
    kernels = kernels_or_skip(level)
    for dtype in (torch.float32, torch.bfloat16):
        first = digest(kernels, dtype)
        torch.manual_seed(7)
        torch.set_num_threads(2)
        assert digest(kernels, dtype) == first
        torch.set_num_threads(1)
        assert digest(kernels, dtype) == first
    assert digest(None, torch.float32) != digest(None, torch.bfloat16)


@pytest.mark.parametrize("fails", [False, True])
def test_the_digest_is_computed_by_one_thread_and_the_others_are_back_afterwards(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries divide sums by their threads, as this processor's may or may not."""
    computed_by: list[int] = []

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        computed_by.append(torch.get_num_threads())
        if fails:
            raise RuntimeError("no such product")
        return [torch.zeros(2)]

    monkeypatch.setattr(numerics, "_results", results)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(RuntimeError, match="no such product") if fails else nullcontext():
            digest(None, torch.float32)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert computed_by == [1]


def test_a_sum_in_another_order_is_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before, product = digest(None, torch.float32), torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: product(a.flip(-1), b.flip(-2)))
    assert digest(None, torch.float32) != before


def test_the_class_names_what_is_in_use() -> None:
    named = class_of(EngineConfig(attention="torch"), torch.bfloat16, CPU)
    parts = named.split("/")
    assert parts[0] == "cpu"
    assert "torch" in parts
    assert {f"torch-{torch.__version__}", "bfloat16"} <= set(parts)
    assert f"aten-{torch.backends.cpu.get_cpu_capability().lower()}" in parts
    assert f"onednn-{processor.onednn_isa()}" in parts
    assert class_of(EngineConfig(attention="torch"), torch.float32, CPU) != named


def test_a_machine_that_can_not_run_the_level_refuses_and_names_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        processor, "flags", lambda: frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
    )
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=rf"engine\.numerics_class={NEW}.*it runs {OLD}: set a level"):
        hold_to_class(EngineConfig(numerics_class="x86-64-v4"))
    assert dict(os.environ) == before
    with pytest.raises(native.NativeUnavailable, match=f"can't run {NEW}"):
        build.load_library.__wrapped__(NEW)


def test_a_level_that_comes_after_the_first_computation_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"engine.numerics_class={OLD}.*a process of its own"):
        processor.check_pinned(OLD, "AVX512")
    processor.check_pinned(OLD, "AVX2")
    processor.check_pinned("auto", "DEFAULT")


def test_levels_are_those_of_the_abi() -> None:
    three = frozenset(OLD_FLAGS)
    four = three | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
    assert processor.levels(frozenset()) == ()
    assert processor.levels(three - {"fma"}) == ()
    assert processor.levels(three) == (OLD,)
    assert processor.levels(four - {"avx512vl"}) == (OLD,)
    assert processor.levels(four - {"fma"}) == (), "each level has all of the one before"
    assert processor.levels(four) == (OLD, NEW)
    assert processor.described(has=four | {"avx512_bf16"}) == f"{NEW}+avx512_bf16"
    assert processor.onednn_isa({}, four) == "avx512_core"
    assert processor.onednn_isa({"ONEDNN_MAX_CPU_ISA": "AVX2"}, four) == "avx2"
    assert processor.onednn_isa({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, three) == "avx2", "a limit adds nothing"


def test_the_class_of_a_gpu_is_another_with_each_thing_its_bits_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, named = torch.device("cuda", 0), set[str]()

    def add(dtype: torch.dtype = torch.bfloat16) -> None:
        named.add(numerics_class(None, "auto", dtype, gpu))

    said: dict[str, Any] = {"get_device_name": "NVIDIA H200", "get_device_capability": (9, 0)}
    for name, answer in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    add()
    add()
    assert len(named) == 1
    add(torch.float16)
    changes: list[tuple[object, str, object]] = [
        (torch, "__version__", "0.0.1"),
        (torch.version, "cuda", "13.0"),
        (torch.cuda, "get_device_capability", lambda device: (10, 0)),
        (torch.cuda, "get_device_name", lambda device: "NVIDIA B200"),
    ]
    for count, (module, name, value) in enumerate(changes, start=3):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, value)
            add()
        assert len(named) == count, name


def test_the_class_of_a_gpu_names_the_compiler_and_the_tiles_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both lay down in which order a kernel adds up."""
    import triton

    from twinpool.engine.attention.triton_backend import attend_call
    from twinpool.engine.runner import kernel_choice

    monkeypatch.setattr(kernel_choice, "numerics_class", lambda *of: "cuda/a-gpu/bfloat16")
    gpu, config = torch.device("cuda"), EngineConfig(attention="triton")
    class_of.cache_clear()
    named = class_of(config, torch.bfloat16, gpu)
    code = f"code-{code_digest()}"
    assert named == f"cuda/a-gpu/bfloat16/triton-{triton.__version__}/tiles-{attend_call.order_key(90)}/{code}"
    monkeypatch.setattr(attend_call, "SEGMENT_TOKENS", 8192)
    class_of.cache_clear()
    assert class_of(config, torch.bfloat16, gpu) != named
    assert attend_call.order_key(80) != attend_call.order_key(90)
    class_of.cache_clear()


@pytest.mark.parametrize("folder", COMPUTES)
def test_a_build_whose_code_computes_otherwise_is_of_another_class(folder: str, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    shutil.copytree(ENGINE, engine, ignore=shutil.ignore_patterns("__pycache__"))
    assert digest_of(engine) == code_digest()
    assert class_of(EngineConfig(attention="torch"), torch.bfloat16, CPU).endswith(f"/code-{code_digest()}")
    changed = next(
        path for path in sorted((engine / folder).rglob("*")) if path.suffix in (".py", ".h") and path.stat().st_size
    )
    changed.write_bytes(changed.read_bytes().replace(b"a", b"b", 1))
    assert digest_of(engine) != code_digest()


def test_all_folders_of_the_engine_compute_but_those_that_are_named_otherwise() -> None:
    assert {path.parent.name for path in ENGINE.glob("*/__init__.py")} == {*COMPUTES, "structured_output"}

"""What a process really holds of a model: the bytes that are planned for its weights, in every format."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.harness import MakeCheckpoint
from tests.support.gguf_files import write_gguf

ROOT = Path(__file__).parents[2]
SCRIPT = """
import gc, json, sys
from pathlib import Path
import torch
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.worker_config import EngineConfig
from twinpool.cluster.serve.preflight import weight_bytes
from twinpool.engine.models.registry import read_model
from twinpool.engine.runner.load_model import load_model

def held():
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))

def load(folder, settings):
    model, config = read_model(Path(folder)), EngineConfig(threads=1, share_weights="off", **settings)
    planned = weight_bytes(model.spec, Config(engine=config))
    before = held()
    loaded = load_model(model, config, torch.device("cpu"))
    return loaded, held() - before, planned

small, large, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
load(small, {})  # What libraries keep for themselves is there now.
loaded, found, planned = load(large, settings)
print(json.dumps([found, planned]))
"""


@pytest.fixture(scope="module")
def large(checkpoint: MakeCheckpoint) -> Path:
    """100 million parameters in bfloat16."""
    return checkpoint(
        "llama", dtype="bfloat16", hidden=1024, layers=7, heads=8, kv_heads=8, head_dim=128
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings"), [
    ("", {}), ("", {"weights": "int4"}), ("Q4_0", {}), ("Q4_0", {"activations": "int8"}), ("Q8_0", {}),
])  # fmt: skip
def test_a_process_holds_the_bytes_that_are_planned_for_weights(
    checkpoint: MakeCheckpoint, large: Path, tmp_path: Path, kind: str, settings: dict[str, str]
) -> None:
    model = write_gguf(large, tmp_path / "large.gguf", "llama", kind) if kind else large
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(checkpoint("llama")), str(model), json.dumps(settings)],
        capture_output=True, text=True, check=False, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found, planned = json.loads(done.stdout.splitlines()[-1])
    assert planned > 40e6
    begun = 1 << 21  # A huge page is taken whole.
    assert abs(found - planned) < 0.05 * planned + begun, f"{found} bytes are held, {planned} are planned"

"""Clients, frameworks and trainers that people have, unmodified, against `smollm2`, whose template has no tools, and
the demo.

They live in environments of their own under build/clients, made once; where the packages or the model can't be had,
they are skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.soak.client_scripts import (
    AGENTS,
    ANTHROPIC,
    DSPY,
    INSTRUCTOR,
    LANGCHAIN,
    LITELLM,
    LLAMA_INDEX,
    OPENAI,
    PYDANTIC_AI,
)
from tests.support.served_cluster import ROOT, Serving, serving
from twinpool.cluster.models import SMOLLM2
from twinpool.contracts.errors import CheckpointError

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(1800)]

FOLDER = ROOT / "build" / "clients"
CLIENTS = (
    "openai==3.3.0", "openai-agents==0.24.0", "langchain-openai==1.7.4", "litellm==1.110.2", "instructor==1.17.0",
    "pydantic-ai-slim[openai]==2.38.0", "anthropic==2.14.0", "dspy==3.4.1",
)  # fmt: skip
OLDER_OPENAI = ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1")
"""Those that don't go with the newest `openai`."""
SCRIPTS = {
    "openai": OPENAI,
    "anthropic": ANTHROPIC,
    "langchain-openai": LANGCHAIN,
    "litellm": LITELLM,
    "pydantic-ai": PYDANTIC_AI,
    "instructor": INSTRUCTOR,
    "openai-agents": AGENTS,
    "llama-index": LLAMA_INDEX,
    "dspy": DSPY,
}
BENCHMARK = ("guidellm==0.8.1",)
TRAINER = ("trl==1.16.0",)
INSTALL_S, RUN_S = 1200, 600


def environment_with(name: str, packages: tuple[str, ...], *, beside_ours: bool = False) -> Path:
    """The programs of an environment with some packages, made if it isn't there. `beside_ours`: it sees what this one
    has, and nothing of that is changed."""
    folder = FOLDER / name
    ready = folder / "ready"
    if ready.is_file() and ready.read_text() == " ".join(packages):
        return folder / "bin"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=INSTALL_S)
    if beside_ours:
        (theirs,) = folder.glob("lib/*/site-packages")
        (theirs / "ours.pth").write_text(sysconfig.get_path("purelib"))
    install = [str(folder / "bin" / "pip"), "install", "--quiet", *packages]
    done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        pytest.skip(f"pip can't fetch {' '.join(packages)}: {done.stderr.strip().splitlines()[-1]}")
    ready.write_text(" ".join(packages))
    return folder / "bin"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving("demo", tmp_path_factory.mktemp("clients")) as found:
        yield found
        found.settle()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    try:
        SMOLLM2.fetch(print)
    except CheckpointError as error:
        pytest.skip(str(error))
    with serving("smollm2", tmp_path_factory.mktemp("smollm2"), ready_within=300) as found:
        yield found
        found.settle()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_client_comes_through_its_loops(smollm2: Serving, name: str, tmp_path: Path) -> None:
    older = name == "llama-index"
    programs = environment_with(name, OLDER_OPENAI) if older else environment_with("clients", CLIENTS)
    command = [str(programs / "python"), "-c", SCRIPTS[name], smollm2.url, "smollm2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.stdout.splitlines()[-1:] == ["done"], done.stdout + done.stderr


def test_guidellm_measures_the_endpoint(cluster: Serving, tmp_path: Path) -> None:
    programs = environment_with("benchmark", BENCHMARK, beside_ours=True)
    report = tmp_path / "report.json"
    command = [
        str(programs / "guidellm"), "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={cluster.url}",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", "kind=max_requests,count=8",
        "--tokenizer", f"kind=huggingface_auto,model={ROOT / 'cluster' / 'demo'}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (8, 0)
    print(done.stdout)


def test_trl_trains_a_model_as_the_page_shows_it(tmp_path: Path) -> None:
    """docs/using/training.md, program by program: what a step has learnt is what the next one draws by."""
    programs = environment_with("trainer", TRAINER, beside_ours=True)
    page = (ROOT / "docs" / "using" / "training.md").read_text()
    prepare, train = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    policy, weights = tmp_path / "policy", tmp_path / "weights"
    weights.mkdir()

    def run(code: str, *arguments: str | Path) -> str:
        command = [str(programs / "python"), "-c", code, *map(str, arguments)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * RUN_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(prepare, ROOT / "cluster" / "demo", policy)
    with serving(policy, tmp_path / "run", sections={"engine": {"weight_roots": weights}}) as cluster:
        first = httpx.get(f"{cluster.url}/v1/weights").json()["weights_version"]
        said = run(train, cluster.url, policy, weights)
        print(said)
        found = re.findall(r"^(\S+): 32 of 32 equal their replay; reward (\S+)$", said, re.MULTILINE)
        assert [version for version, _ in found] == [first, *(f"step-{n}" for n in range(1, len(found)))]
        rewards = [float(reward) for _, reward in found]
        assert len(rewards) == 12
        assert max(rewards[:2]) < 0.1
        assert min(rewards[-2:]) > 0.5
        answer = cluster.complete("It was a fine morning", max_tokens=16)
        assert answer.text.count(",") > 8, "the cluster answers by the last step's weights"
        assert httpx.get(f"{cluster.url}/v1/weights").json()["weights_version"] == f"step-{len(found)}"
        cluster.settle()

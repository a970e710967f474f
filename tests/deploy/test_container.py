"""The image's description: what can be said of it without building it (tests/soak/test_container_image.py runs its
steps)."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest

from tests.support.prometheus_server import DEPLOY
from tests.support.served_cluster import ROOT
from twinpool.contracts.build_id import PACKAGES

FOLDER = DEPLOY / "container"
TEXT = (FOLDER / "Containerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name: str) -> list[str]:
    """What follows each instruction `name`, continued lines joined."""
    return re.findall(rf"^{name} (.*)$", TEXT.replace("\\\n", " "), re.MULTILINE)


def test_every_step_is_one_of_the_script_and_each_is_run_once() -> None:
    steps = [re.fullmatch(r'\S+install (\w+) "\$\{VARIANT\}".*', line) for line in instructions("RUN")]
    assert [step and step[1] for step in steps] == ["packages", "program", "system"]
    script = (FOLDER / "install").read_text()
    assert re.findall(r"^(packages|program|system)\)$", script, re.MULTILINE) == ["packages", "program", "system"]


def test_the_script_can_be_run() -> None:
    assert (FOLDER / "install").stat().st_mode & 0o111 == 0o111


def test_the_image_runs_as_nobody_in_particular() -> None:
    (user,) = instructions("USER")
    assert user == "10001:10001"
    script = (FOLDER / "install").read_text()
    assert "--uid 10001" in script
    assert "--gid 10001" in script


@pytest.mark.parametrize(("variant", "extras"), [("cpu", "images,kernels,redis"), ("cuda", "cuda,images,nixl,redis")])
def test_a_variant_has_the_projects_requirements_and_its_extras(variant: str, extras: str) -> None:
    assert re.search(rf"^{variant}\) extras={extras} ;;$", (FOLDER / "install").read_text(), re.MULTILINE)
    command = [sys.executable, str(FOLDER / "requirements.py"), extras]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    wanted = [*PROJECT["dependencies"], *(r for e in extras.split(",") for r in PROJECT["optional-dependencies"][e])]
    assert printed.splitlines() == wanted


@pytest.mark.parametrize(
    ("words", "why"), [(("system", "tpu"), "VARIANT is"), (("build", "cpu"), "STEP is"), ((), "STEP")]
)
def test_a_wrong_step_or_variant_is_refused(words: tuple[str, ...], why: str) -> None:
    done = subprocess.run(
        ["sh", str(FOLDER / "install"), *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert why in done.stderr


def test_what_the_build_needs_is_not_left_out() -> None:
    left_out = {line for line in (ROOT / ".containerignore").read_text().splitlines() if not line.startswith("#")}
    assert not left_out & {*PACKAGES, "twinpool", "constraints", "deploy", "pyproject.toml", "README.md", "LICENSE"}
    assert {".git", ".venv", "tests"} <= left_out

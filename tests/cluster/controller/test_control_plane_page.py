"""What docs/control-plane.md shows: its configuration, its unit of systemd and its line of `status`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from twinpool.cli.command_line import parser
from twinpool.cli.operator.status_command import controllers_line
from twinpool.cluster.ray_nodes.control_store import StoredTables
from twinpool.contracts.config.ledger_place import controller_endpoints
from twinpool.contracts.config.load_config import load_config

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "control-plane.md").read_text()


def block(kind: str, number: int = 0, of: int = 1) -> str:
    """The text of a fenced block of the page, which has so many of its kind."""
    found = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == of, kind
    return str(found[number])


def unit() -> dict[str, str]:
    """The unit's keys; none occurs twice."""
    pairs = [line.split("=", 1) for line in block("ini").splitlines() if "=" in line and not line.startswith("#")]
    assert len({key for key, _ in pairs}) == len(pairs)
    return {key: value for key, value in pairs}


def test_the_unit_starts_what_there_is_with_the_configuration_of_the_page(tmp_path: Path) -> None:
    program, *arguments = shlex.split(unit()["ExecStart"])
    assert Path(program).name == "twinpool"
    options = parser().parse_args(arguments)
    assert (options.command, options.standby) == ("controller", True)
    file = tmp_path / options.config.name
    file.write_text(block("yaml", of=3))
    config = load_config(file, options.set)
    assert f"{options.address}:{options.port}" in controller_endpoints(config.cluster.controllers)
    assert config.cluster.name == "prod"


def test_the_unit_is_started_again_when_another_controller_has_replaced_it() -> None:
    """It ends with exit code 1 then, and stands by with its next process."""
    assert unit()["Restart"] in ("always", "on-failure")


def test_rays_storage_is_a_setting(tmp_path: Path) -> None:
    file = tmp_path / "ray.yaml"
    file.write_text(block("yaml", 2, of=3))
    assert StoredTables(load_config(file).cluster.ray_storage, "a").environment["RAY_REDIS_ADDRESS"] == "10.0.0.9:6379"


def test_the_line_of_status_is_as_it_is_shown() -> None:
    shown = {
        "leader": "10.0.0.1:7401", "term": 3, "standbys": ["10.0.0.1:7402", "10.0.0.2:7400"], "away": False,
    }  # fmt: skip
    assert controllers_line(shown) == block("text", 1, of=2).strip()
    assert controllers_line(shown | {"away": True}).startswith("no controller answers")
    assert controllers_line(shown | {"standbys": []}).endswith("none stands by")

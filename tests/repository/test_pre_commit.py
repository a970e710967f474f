"""What runs before a commit is what `make check` runs."""

from __future__ import annotations

import re

import yaml

from tests.support.served_cluster import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()


def commands_of(target: str) -> list[str]:
    """The lines of a target of the Makefile, as a shell in the root sees them."""
    (lines,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    return [line.removeprefix("\t").removeprefix("@").replace("$(BIN)", ".venv/bin") for line in lines.splitlines()]


def test_hooks_before_a_commit_are_the_commands_of_make_check() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local", "a hook of another repository would be fetched"
    assert [hook["entry"] for hook in repo["hooks"]] == commands_of("check")
    for hook in repo["hooks"]:
        assert (hook["language"], hook["pass_filenames"]) == ("system", False), hook["id"]
        assert not hook.keys() & {"stages", "files", "types", "types_or", "exclude"}, f"{hook['id']} would be left out"

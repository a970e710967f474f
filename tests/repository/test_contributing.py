"""CONTRIBUTING.md against the project: the commands, files, tests and names that it names are there."""

from __future__ import annotations

import re

import pytest

from tests.support.served_cluster import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
NAMED = sorted(set(re.findall(r"`((?:[\w.-]+/)+[\w.-]*(?:::\w+)?)`", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_files_and_tests_that_the_page_names_are_there(name: str) -> None:
    path, _, test = name.partition("::")
    assert (ROOT / path).exists(), path
    if test:
        assert f"def {test}(" in (ROOT / path).read_text(), name


def test_the_page_names_all_of_the_recipes() -> None:
    assert len(NAMED) > 50
    recipes = PAGE.partition("\n## Recipes\n")[2].partition("\n## ")[0].split("\n### ")[1:]
    assert len(recipes) == 7
    for recipe in recipes:
        assert "`tests/" in recipe, recipe.splitlines()[0]
    for page in ("docs/api.md", "README.md"):
        for anchor in re.findall(r"CONTRIBUTING\.md#([\w-]+)", (ROOT / page).read_text()):
            assert f"\n### {anchor.replace('-', ' ').capitalize()}\n" in PAGE, anchor


def test_commands_that_the_page_names_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)", PAGE, re.MULTILINE))
    assert {one or other for one, other in named} <= targets
    folders = re.findall(r'make test ARGS="-n0 (\S+)|make soak ARGS="(\S+?)"', PAGE)
    assert all((ROOT / (one or other)).exists() for one, other in folders)


def test_names_in_code_that_the_page_names_are_in_the_files_that_it_names_them_of() -> None:
    for name, path in (
        ("POLICIES", "cache/prefix_cache/eviction_policy.py"),
        ("make_policy", "router/core/routing_policies.py"),
        ("COMMANDS", "cli/command_line.py"),
        ("_MAY_BE_ZERO", "contracts/config/load_config.py"),
        ("Command", "contracts/messages/router_commands.py"),
        ("Event", "contracts/messages/worker_events.py"),
        ("ControlMessage", "transfer/rooms/room_messages.py"),
        ("Notice", "transfer/rooms/room_messages.py"),
        ("Order", "contracts/messages/rank_orders.py"),
        ("TAGS", "contracts/messages/rank_order_codec.py"),
        ("PROTOCOL", "contracts/messages/fingerprint.py"),
        ("PLANES", "tests/support/room_ends.py"),
        ("PLANES", "tests/workers/test_pair.py"),
        ("PLANES", "tests/workers/test_abort.py"),
    ):
        assert f"`{name}`" in PAGE, name
        source = (ROOT / path).read_text()
        assert re.search(rf"^(?:    )?(?:def )?{name}\b", source, re.MULTILINE), f"{path} has no {name}"


def test_the_mutant_that_the_page_quotes_is_one() -> None:
    ((path, head),) = re.findall(r"^```diff file=(\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert (ROOT / path).read_text().startswith(head)

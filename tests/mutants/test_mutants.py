"""Every hazard has its mutant, other mutants are of known kinds, and all still apply. `make mutants` runs them."""

from __future__ import annotations

import subprocess

from tests.mutants.catalogue import FOLDER, HAZARDS, KINDS, ROOT, all_mutants, of_hazards


def test_every_hazard_has_a_mutant_and_a_test_that_is_named_for_it() -> None:
    mutants = of_hazards()
    assert {m.rule for m in mutants} == set(HAZARDS)
    for mutant in mutants:
        assert mutant.path.parent == FOLDER
        assert mutant.test.split("::")[1].startswith(f"test_{mutant.rule.lower()}_"), mutant.path.name


def test_every_other_mutant_is_of_a_kind() -> None:
    others = [m for m in all_mutants() if m.rule not in HAZARDS]
    assert {m.rule for m in others} <= set(KINDS)
    assert {m.path.parent for m in others} <= {FOLDER / "kinds"}


def test_every_mutant_is_named_for_its_rule_and_its_test_is_there() -> None:
    for mutant in all_mutants():
        assert mutant.path.name.startswith(f"{mutant.rule.lower()}-"), mutant.path.name
        file, name = mutant.test.split("::", 1)
        assert f"def {name.split('[')[0]}(" in (ROOT / file).read_text(), f"{mutant.path.name}: {mutant.test} is gone"


def test_every_mutant_applies_to_product_code_as_it_is() -> None:
    for mutant in all_mutants():
        assert not any(name.startswith("tests/") for name in mutant.changes), mutant.path.name
        check = subprocess.run(
            ["git", "apply", "--check", str(mutant.path)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert check.returncode == 0, f"{mutant.path.name}: {check.stderr}"

"""Every hazard has its mutant, every mutant still applies, and its test is there. `make mutants` runs them."""

from __future__ import annotations

import subprocess

from tests.mutants.catalogue import HAZARDS, ROOT, all_mutants


def test_every_hazard_has_a_mutant_and_a_test_that_is_named_for_it() -> None:
    mutants = all_mutants()
    assert {m.hazard for m in mutants} == set(HAZARDS)
    for mutant in mutants:
        file, name = mutant.test.split("::")
        name = name.split("[")[0]
        assert name.startswith(f"test_{mutant.hazard.lower()}_"), mutant.path.name
        assert mutant.path.name.startswith(f"{mutant.hazard.lower()}-"), mutant.path.name
        assert f"def {name}(" in (ROOT / file).read_text(), f"{mutant.path.name}: {mutant.test} is gone"


def test_every_mutant_applies_to_product_code_as_it_is() -> None:
    for mutant in all_mutants():
        assert not any(name.startswith("tests/") for name in mutant.changes), mutant.path.name
        check = subprocess.run(
            ["git", "apply", "--check", str(mutant.path)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert check.returncode == 0, f"{mutant.path.name}: {check.stderr}"

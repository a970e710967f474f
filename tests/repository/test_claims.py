"""What README.md and docs/ claim, where it can be checked: promises, models, endpoints, numbers, runs on GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.served_cluster import ROOT
from twinpool.contracts.checkpoint.quantization import METHODS
from twinpool.contracts.config.router_config import AuditConfig
from twinpool.contracts.config.worker_config import DecodeConfig
from twinpool.router.api.admin_status import PAGE as DASHBOARD
from twinpool.router.api.app import PREFIX_ROUTES, ROUTES
from twinpool.router.openai.api_errors import unsupported_reason
from twinpool.router.parsers.tool_formats import FORMATS

README = (ROOT / "README.md").read_text()
USING = (ROOT / "docs" / "using.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table whose first column has this heading."""
    table = page[page.index(f"| {heading} |") :].split("\n\n", maxsplit=1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_each_promise_of_the_readme_has_its_limits_and_its_tests() -> None:
    """That the tests exist is shown by test_guarantees.py."""
    promised = re.findall(
        r"^- \*\*(.+?)\.\*\*", README.split("\n## What it gives\n")[1].split("\n## ")[0], re.MULTILINE
    )
    claims = rows((ROOT / "docs" / "guarantees.md").read_text(), "promise")
    assert [claim for claim, *_ in claims] == promised
    for claim, limits, tests in claims:
        assert len(limits) > 20, f"{claim}: where does it end?"
        assert "`tests/" in tests, claim


# ------------------------------------------------------------ models


def families() -> str:
    """What the page says can be loaded."""
    return "; ".join(cells[1] for cells in rows(USING, "architecture"))


def test_the_models_that_the_readme_names_are_those_of_the_page() -> None:
    (sentence,) = re.findall(r"Hugging Face Hub\s+\(\[models\]\(docs/models\.md\)\): (.+?)\.\n", README, re.DOTALL)
    named = re.findall(
        r"\b(Llama|Qwen|DeepSeek|GLM(?:-\d)?|Gemma|gpt-oss|Mistral|Kimi\S*|MiniMax\S*|Phi\S*)\b", sentence
    )
    assert set(named) >= {"Llama", "Qwen", "DeepSeek", "Gemma", "gpt-oss"}
    assert [name for name in named if name not in families()] == []


def test_the_page_names_every_method_of_quantised_weights_that_is_read_and_no_other() -> None:
    table = rows((ROOT / "docs" / "models.md").read_text(), "`quant_method`")
    assert sorted(name for cells in table for name in re.findall(r"`([\w-]+)`", cells[0])) == sorted(METHODS)


def test_the_page_names_every_tool_format_and_says_which_are_of_models_that_can_not_be_loaded() -> None:
    table = rows((ROOT / "docs" / "using" / "tools.md").read_text(), "`router.tool_parser`")
    assert sorted(name for cells in table for name in re.findall(r"`(\w+)`", cells[0])) == sorted(FORMATS)
    loaded = families()
    for formats, models, remark in table:
        known = [
            model for model in re.findall(r"[A-Z]\w+(?:[ -][A-Z]?[\d.]+)?|gpt-oss", models) if shown(model, loaded)
        ]
        refused = re.search(r"no (model that writes so|folder of them) can be loaded", remark) is not None
        assert bool(known) is not refused, f"{formats}: {models}"


def shown(model: str, loaded: str) -> bool:
    """Whether the page of models has this family; of GLM each version is another architecture."""
    if model.startswith("GLM"):
        return model in loaded
    return model.split(maxsplit=1)[0].split("-", maxsplit=1)[0] in loaded or model.startswith(
        "Hermes"
    )  # Llamas, trained on.


# ------------------------------------------------------------ endpoints and numbers


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_endpoint_that_a_page_names_is_there_or_said_to_be_absent(page: Path) -> None:
    named = re.findall(r"`(?:GET |POST |DELETE )?(/(?:v1|cluster)/[\w/.-]*)[^`]*`", page.read_text())
    named += re.findall(
        r"`(/(?:health|live|ping|version|load|metrics|tokenize|detokenize|dashboard|openapi\.json))`", page.read_text()
    )
    known = {*ROUTES, *PREFIX_ROUTES, DASHBOARD}
    lost = [
        path
        for path in named
        if path not in known
        and not path.startswith(tuple(PREFIX_ROUTES))
        and not unsupported_reason(path)
        and not path.endswith("...")
        and path not in ("/v1/", "/cluster/")
    ]
    assert lost == []


def test_the_numbers_of_the_readme_are_the_defaults() -> None:
    assert AuditConfig().fraction == 0.01
    assert "one answer in a hundred is computed again as far as prefill workers are idle" in " ".join(README.split())
    assert DecodeConfig().speculation == "auto", "prompt lookup, or the draft model where there is one"


def test_defaults_that_pages_quote_are_those_of_the_configuration() -> None:
    """Sentences of the form: `section.key` (VALUE by default)."""
    table = (ROOT / "docs" / "configuration.md").read_text()
    defaults = dict(re.findall(r"^\| `([\w.]+)` \| [^|]+ \| `([^`]*)` \|", table, re.MULTILINE))
    quoted = [
        (page.name, *found)
        for page in PAGES
        for found in re.findall(
            r"`([a-z_]+\.[a-z_.]+)`[^`(]{0,40}\((\d[\d.]*)( %)?[^)]{0,12}by default", page.read_text()
        )
    ]
    assert quoted
    for page, key, value, percent in quoted:
        assert float(value) / (100 if percent else 1) == float(defaults[key]), f"{page}: {key}"


# ------------------------------------------------------------ GPUs


def test_code_that_says_it_was_not_run_on_a_gpu_is_not_among_what_was() -> None:
    run = "\n".join(
        line
        for line in (ROOT / "docs" / "gpu.md").read_text().splitlines()
        if line.startswith("| ") and not line.rstrip(" |").endswith("not run")
    )
    says = re.compile(r"not (?:yet )?(?:been )?run on a GPU|never run on a GPU", re.IGNORECASE)
    wrong = [
        name
        for folder in ("cache", "cluster", "engine", "transfer", "decode", "prefill", "worker", "colocate")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if says.search(path.read_text()) and (name := path.relative_to(ROOT).as_posix()) in run
    ]
    assert wrong == []

"""docs/glossary.md: the files and names that it names are there, and the letters of shapes are those of the engine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.served_cluster import ROOT

PAGE = (ROOT / "docs" / "glossary.md").read_text()
SECTIONS = {part.splitlines()[0]: part for part in PAGE.split("\n## ")[1:]}
QUESTIONS, LETTERS, OURS = "Where is what", "Letters of shapes", "Words of our own"
TERMS = [title for title in SECTIONS if title not in (QUESTIONS, LETTERS)]
"""Sections of terms, those of our own last."""
WORDS = {"by", "bias", "freq", "head", "keys", "norm", "rows", "up"}
"""Last parts of tensors' names that are words and no letters of axes."""


def rows(section: str) -> list[list[str]]:
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def files(cell: str) -> list[str]:
    return re.findall(r"`([\w.-]+(?:/[\w.-]+)*\.(?:py|md|cpp|h))`", cell)


def test_every_term_has_one_line_and_no_term_two() -> None:
    named = [term.strip() for title in TERMS for row in rows(title) for term in row[0].split(",")]
    assert len(named) >= 80
    assert len(named) == len(set(named)), sorted(term for term in named if named.count(term) > 1)
    assert all(len(row) == 4 and all(row) for title in TERMS for row in rows(title))


@pytest.mark.parametrize("title", TERMS)
def test_files_and_names_of_terms_are_there(title: str) -> None:
    for row in rows(title):
        places = [part.split(": ") for part in row[3].split("; ")]
        for path, names in places:
            source = (ROOT / path.strip("`")).read_text()
            assert re.findall(r"`(\w+)`", names), f"{row[0]}: which class?"
            for name in re.findall(r"`(\w+)`", names):
                defined = rf"^(?:class|(?:async )?def) {name}\b|^{name}\b.* = "
                assert re.search(defined, source, re.MULTILINE), f"{path} has no {name}"


def test_files_of_answers_are_there_and_no_question_comes_twice() -> None:
    asked = [row[0] for row in rows(QUESTIONS)]
    assert len(asked) == len(set(asked)) >= 45
    for question, answer in rows(QUESTIONS):
        assert files(answer), question
        for path in files(answer):
            assert (ROOT / path).is_file(), f"{question} {path}"
        assert re.sub(r"`[^`]+`|[, ]", "", answer) == "", f"{question}: files alone"


def test_the_letters_of_shapes_are_those_of_tensors_in_the_engine() -> None:
    legend = {row[0] for row in rows(LETTERS)}
    found: dict[str, str] = {}
    for name, path in tensors():
        suffix = re.sub(r"1", "", name.rpartition("_")[2])
        if len(suffix) <= 4 and suffix not in WORDS:
            found |= dict.fromkeys(suffix, f"{name} in {path}")
    assert found.keys() - legend == set(), {letter: found[letter] for letter in found.keys() - legend}
    examples = re.findall(r"`\w+_([a-z]+)1?`", SECTIONS[LETTERS])
    assert legend == {letter for suffix in examples for letter in suffix}, "each letter has an example"


def test_examples_of_the_legend_are_names_in_the_engine() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "engine").rglob("*.py"))
    for name in re.findall(r"`(\w+_\w+)`", SECTIONS[LETTERS]):
        assert re.search(rf"\b{name}\b", source), name


def tensors() -> Iterator[tuple[str, str]]:
    """Names with a suffix that are annotated as tensors."""
    for path in sorted((ROOT / "engine").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.arg(arg=name, annotation=ast.expr() as kind):
                    pass
                case ast.AnnAssign(target=ast.Name(id=name), annotation=kind):
                    pass
                case _:
                    continue
            if ast.unparse(kind) in ("Tensor", "Tensor | None") and "_" in name.strip("_"):
                yield name, path.relative_to(ROOT).as_posix()

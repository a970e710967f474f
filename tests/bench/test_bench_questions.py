"""The one command of the benches: each question has a program, and flags behind -- are that program's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from bench import __main__ as bench

ROOT = Path(__file__).resolve().parents[2]


def test_every_question_is_answered_by_a_program_that_is_there() -> None:
    questions = [one.question for one in bench.BENCHES.values()]
    assert len(set(questions)) == len(questions)
    assert all(question.endswith("?") for question in questions)
    missing = [one.module for one in bench.BENCHES.values() if importlib.util.find_spec(one.module) is None]
    assert missing == []


def test_every_question_is_on_the_page_with_its_command() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert [name for name in bench.BENCHES if f"python -m bench {name}" not in page] == []


def test_the_list_has_each_question_and_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list"]) == 0
    said = capsys.readouterr().out
    for name, one in bench.BENCHES.items():
        assert f"{one.question}\n    python -m bench {name}\n" in said


class Ran:
    """Stands in for `bench.run`: keeps what it is called with, and returns exit codes in turn, the last one again."""

    def __init__(self, *codes: int) -> None:
        self._codes = codes
        self.calls: list[tuple[str, list[str]]] = []

    def __call__(self, one: bench.Bench, flags: list[str]) -> int:
        self.calls.append((one.module, list(flags)))
        return self._codes[min(len(self.calls), len(self._codes)) - 1]


def test_flags_behind_two_dashes_are_those_of_the_one_bench_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Ran(3)
    monkeypatch.setattr(bench, "run", ran)
    assert bench.main(["drain", "--", "--streams", "4"]) == 3
    assert ran.calls == [("bench.serving.drain_cost", ["--streams", "4"])]
    for wrong in (["--", "--streams", "4"], ["drain", "router", "--", "--streams", "4"], ["unknown"]):
        with pytest.raises(SystemExit) as ended:
            bench.main(wrong)
        assert ended.value.code == 2


def test_without_a_name_the_short_ones_are_run_and_the_worst_exit_code_is_returned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = Ran(0, 1)
    monkeypatch.setattr(bench, "run", ran)
    monkeypatch.setattr(bench, "serve_all", lambda *of: 0)
    assert bench.main(["--out", str(tmp_path), "--model", "DIR"]) == 1
    short = [one.module for name, one in bench.BENCHES.items() if one.short is not None and name != "serve"]
    assert [module for module, _ in ran.calls] == short
    assert all(flags[-2] == "--json" and Path(flags[-1]).parent == tmp_path for _, flags in ran.calls)
    assert ["--model" in flags for _, flags in ran.calls] == [m.endswith(("engine_speed", "pause")) for m in short]

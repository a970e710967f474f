"""The command line: whole names only, each subcommand's own usage, and what was probably meant."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

import pytest

from twinpool.cli import command_line
from twinpool.cli import commands as cli

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for path in ROOT.rglob("*.py")
    if not any(part.startswith(".") or part == "build" for part in path.relative_to(ROOT).parts)
]


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """The usage and the error of a command line that is refused with the code of usage."""
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    usage, _, error = capsys.readouterr().err.rpartition("error: ")
    return usage, error.strip()


def subparsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                found += subparsers(one)
    return found


def test_no_subcommand_takes_a_part_of_a_flags_name(capsys: pytest.CaptureFixture[str]) -> None:
    walked = 0
    for parser in subparsers(command_line.parser()):
        for flag in [name for name in parser._option_string_actions if len(name) > 4 and name.startswith("--")]:
            if (short := flag[:-1]) not in parser._option_string_actions:
                with pytest.raises(SystemExit) as ended:
                    parser.parse_args([f"{short}=1"])
                assert ended.value.code == 2, flag
                said = capsys.readouterr().err
                assert f"{parser.prog}: error:" in said
                assert short in said.partition("error: ")[2] or "required" in said
                walked += 1
    assert walked > 100


def test_no_parser_of_the_repository_takes_a_part_of_a_flags_name() -> None:
    """Those of services, benches, pages and tools, too, and of parsers below them: argparse takes parts by default."""
    made, lenient = 0, []
    for path in SOURCES:
        if "ArgumentParser" not in (text := path.read_text()) and "add_parser" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("ArgumentParser", "add_parser"):
                made += 1
                strict = any(
                    word.arg == "allow_abbrev" and ast.unparse(word.value) == "False" for word in node.keywords
                )
                if not strict and path != ROOT / "cli" / "command_line.py":  # Its parsers are `CommandParser`s.
                    lenient.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert made > 10
    assert not lenient


@pytest.mark.parametrize(
    ("words", "usage", "error"),
    [
        (["serve", "--decod", "2"], "usage: twinpool serve ", "unknown flag --decod: did you mean --decode?"),
        (["serve", "--prefil=2"], "usage: twinpool serve ", "unknown flag --prefil: did you mean --prefill?"),
        (["scale", "decode=2", "--nowait"], "usage: twinpool scale ", "did you mean --no-wait?"),
        (["sim", "--reqests", "9"], "usage: twinpool sim ", "did you mean --requests?"),
        (["status", "--frobnicate"], "usage: twinpool status ", "unknown flag --frobnicate"),
        (["status", "decode-0"], "usage: twinpool status ", "'decode-0' is too much"),
        (["serv"], "usage: twinpool [-h] COMMAND", "did you mean twinpool serve?"),
        (["statsu"], "usage: twinpool [-h] COMMAND", "did you mean twinpool status?"),
        (["--decode", "2", "serve"], "usage: twinpool [-h] COMMAND", "flags follow the command: twinpool serve"),
        (["zzz"], "usage: twinpool [-h] COMMAND", "there is no command 'zzz': twinpool -h lists all"),
    ],
)
def test_what_is_unknown_is_refused_with_the_commands_usage_and_what_was_meant(
    words: list[str], usage: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, said = refusal(words, capsys)
    assert shown.startswith(usage)
    assert error in said
    assert "\n" not in said
    assert len(said) < 120


@pytest.mark.parametrize(
    ("command", "flag", "more"),
    [
        ("replay", "--trace", ["--url", "http://h:1"]),
        ("plan", "--trace", []),
        ("up", "--config", []),
        ("apply", "--config", []),
        ("doctor", "--config", []),
    ],
)
def test_a_file_is_given_by_place_or_by_flag_and_means_the_same(
    command: str, flag: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parsed = command_line.parser().parse_args([command, "a.file", *more])
    assert parsed == command_line.parser().parse_args([command, flag, "a.file", *more])
    assert getattr(parsed, flag[2:]) == Path("a.file")
    _, said = refusal([command, "a.file", flag, "b.file", *more], capsys)
    assert said == f"FILE and {flag} are the same: give one of them"


@pytest.mark.parametrize("words", [["up"], ["apply"], ["replay", "--url", "http://h:1"]])
def test_a_file_that_is_needed_is_missed_by_either_name(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, said = refusal(words, capsys)
    assert said.startswith("FILE is missing; --")

"""What is wrong with a configuration is told at once, each key by its name, with what was probably meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinpool.contracts.config.load_config import config_from_dict, config_keys, load_config
from twinpool.contracts.errors import ConfigError


def refusal(path: Path | None, *assignments: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load_config(path, assignments)
    return [line.strip() for line in str(refused.value).splitlines()]


def test_all_errors_of_a_file_and_of_set_are_told_in_one_run(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "router: {max_queu: 3, stall_s: -1, policy: best}\n"
        "cache: {page_tokens: 12, storage: {backend: file}}\n"
        "autoscaling: 5\n"
        "tracing: {ratio: 2}\n"
    )
    first, *others = refusal(file, "decode.max_batch_tokens=zwei", "port")
    assert first == "9 errors in the configuration:"
    for key in (
        "router.max_queu;", "router.stall_s", "router.policy", "cache.page_tokens", "cache.storage.path", "autoscaling",
        "tracing.ratio", "decode.max_batch_tokens", "--set takes",
    ):  # fmt: skip
        assert sum(key in line for line in others) == 1, key


def test_one_error_is_told_as_it_is() -> None:
    assert refusal(None, "tracing.ratio=2") == ["config key tracing.ratio is a share, at most 1; got 2"]


def test_what_goes_with_a_key_that_could_not_be_read_is_not_judged() -> None:
    """Its default isn't what the operator meant: complaints about that would be wrong."""
    assert refusal(None, "cache.storage.backend=file", "cache.storage.path=7") == [
        "config key cache.storage.path must be text; got 7"
    ]
    assert len(refusal(None, "router.max_timeout_s=60", "router.request_timeout_s=soon")) == 1
    assert len(refusal(None, "router.max_timeout_s=60", "router.request_timeout_s=70")) == 1


@pytest.mark.parametrize(
    ("assignment", "hint"),
    [
        ("nonsense.key=1", "the sections are launch, engine, adapters, cache,"),
        ("nonsense.max_queue=1", "did you mean router.max_queue?"),
        ("routr.max_queue=1", "did you mean router?"),
        ("router.max_que=1", "did you mean router.max_queue?"),
        ("router.port=1", "did you mean launch.port?"),
        ("cache.storage.pth=x", "did you mean cache.storage.path?"),
        ("router.frobnicate=1", "see the keys of router in docs/configuration.md"),
    ],
)
def test_an_unknown_key_is_refused_with_what_was_probably_meant(assignment: str, hint: str) -> None:
    (said,) = refusal(None, assignment)
    assert said.startswith("unknown config key ")
    assert hint in said


def test_each_key_alone_misspelt_is_found_again() -> None:
    """One letter is left out: few keys are so alike that another one is named."""
    missed = []
    for key in config_keys():
        section, _, leaf = key.rpartition(".")
        typo = leaf[: len(leaf) // 2] + leaf[len(leaf) // 2 + 1 :]
        if len(leaf) < 4 or not section:
            continue
        tree: dict[str, object] = {typo: 1}
        for part in reversed(section.split(".")):
            tree = {part: tree}
        with pytest.raises(ConfigError, match="did you mean") as refused:
            config_from_dict(tree)
        if key not in str(refused.value):
            missed.append(key)
    assert len(missed) < 5, missed


@pytest.mark.parametrize("text", ["tracing.endpoint='http://['", "cluster.ledger='rediss://['"])
def test_an_address_that_no_parser_reads_is_refused_by_its_keys_name(text: str) -> None:
    (said,) = refusal(None, text)
    assert said.startswith(f"config key {text.partition('=')[0]} ")

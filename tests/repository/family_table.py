"""Prints docs/families.md: of which families of models what is shown, and by which tests.

A row is a class of `engine.models` with the architectures that it implements; a cell says what the parameters of tests
name. So nothing is said that no test goes over, and a test that goes takes its word along.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

from _pytest.fixtures import getfixturemarker

from tests.engine.test_gguf_models import SHAPES
from tests.engine.test_missing_tensors import CHECKPOINTS
from tests.support.quantised_checkpoints import LAYOUTS
from tests.support.seeing_models import SEEN
from twinpool.engine.models.registry import ARCHITECTURES

Words = tuple[str, ...]


class Shown(NamedTuple):
    """What one test shows of the families that its parameters name."""

    column: str
    says: str | Callable[[Words], str]
    """What stands in the cell; or what makes it of the strings among a case's parameters."""
    test: str
    """Its module below `tests`, and its name behind ``::``."""
    fixture: str = ""
    """The module's fixture whose parameters name them, where the test's own don't."""
    family: str = ""
    """The family that it is about, where no parameter names one."""

    @property
    def path(self) -> str:
        return f"tests/{self.test.replace('::', '.py::')}"


def _format(words: Words) -> str:
    (layout,) = (word for word in words if word in LAYOUTS)
    return layout.removeprefix("packed-").partition("-")[0]


def _cache(words: Words) -> str:
    (kv_dtype,) = (word for word in words if word in {"fp8", "int8"})
    return f"{kv_dtype} KV"


def _packed(words: Words) -> str:
    return "mxfp4" if "packed" in words else ""


def _drafts(words: Words) -> str:
    return "eagle3" if "eagle3" in words else "mtp"


def _ranks(words: Words) -> str:
    (ranks,) = (word for word in words if word in {"tp", "pp"})
    return ranks


def _all(
    column: str, says: str | Callable[[Words], str], tests: str, fixture: str = "", family: str = ""
) -> list[Shown]:
    return [Shown(column, says, test, fixture, family) for test in tests.split()]


SHOWN: Sequence[Shown] = (
    *_all("equal to", "transformers", """
        engine/test_oracle_equality::test_float32_gives_the_oracles_greedy_tokens
        engine/test_dense_families::test_float32_gives_the_oracles_greedy_tokens_and_logits
        engine/test_mixture_families::test_float32_gives_the_oracles_greedy_tokens_and_logits
        engine/test_latent_families::test_float32_gives_the_oracles_greedy_tokens_and_logits
        engine/test_recurrent_families::test_float32_gives_the_oracles_greedy_tokens_and_logits
        engine/test_window_families::test_float32_gives_the_oracles_greedy_tokens_and_logits
        engine/test_qwen_families::test_float32_gives_the_oracles_greedy_tokens_and_logits
        engine/test_text_beside_images::test_float32_gives_the_oracles_greedy_tokens_and_logits
    """),
    *_all("equal to", "Llama here", "engine/test_dense_families::test_llama_under_another_name_gives_llamas_bits"),
    *_all("both pools", "hand-over", """
        whole/test_families::test_answers_are_the_oracles_and_hand_overs_are_what_is_due
    """, "family"),
    *_all("both pools", "retraction", """
        workers/test_retract_families::test_fifty_requests_in_a_tenth_of_the_memory_get_the_answers_of_an_undisturbed_run
    """, "family"),
    *_all("both pools", "migration", """
        workers/test_migrations_families::test_a_migrated_request_goes_on_as_if_it_had_stayed
    """),
    *_all("weights", _format, """
        engine/test_quantised_weights::test_answers_are_the_oracle_s_for_the_dequantised_weights
    """, family="llama"),
    *_all("weights", _format, """
        engine/test_dense_families::test_fused_and_reordered_rows_in_blocks_answer_as_the_same_weights_dequantised
        engine/test_mixture_families::test_experts_stay_as_they_are_published_and_answer_as_the_numbers_that_they_stand_for
        engine/test_quantised_weights::test_products_of_every_mixer_stay_in_blocks
        workers/test_quantised_pairs::test_both_workers_answer_as_the_dequantised_model
        workers/test_quantised_pairs::test_ranks_on_one_side_answer_as_the_dequantised_model
        workers/test_quantised_pairs::test_requests_that_are_retracted_and_resumed_answer_as_the_dequantised_model
        workers/test_quantised_pairs::test_what_a_dead_decode_worker_had_begun_another_ends_as_the_dequantised_model
    """),
    *_all("weights", "GGUF", "engine/test_gguf_models::test_a_file_is_the_folder_that_it_was_made_of"),
    *_all("weights", _packed, "engine/test_window_families::test_a_published_folder_gives_the_bits_of_a_saved_one"),
    *_all("weights", _cache, """
        workers/test_quantised_kv::test_answers_are_the_definitions_and_hand_overs_are_what_is_due
    """),
    *_all("layouts", "colocated", """
        colocate/test_colocated_families::test_answers_are_the_oracles_alone_and_with_a_prefix_that_is_there
    """, "family"),
    *_all("layouts", "tp", """
        workers/test_rank_pairs::test_greedy_answers_are_the_oracles_with_ranks_on_one_side_and_on_both
    """, family="llama"),
    *_all("layouts", "tp", "workers/test_quantised_pairs::test_ranks_on_one_side_answer_as_the_dequantised_model"),
    *_all("layouts", _ranks, "workers/test_pictures::test_decode_on_two_ranks_goes_on_behind_pictures", "seer"),
    *_all("layouts", "pp", """
        workers/test_stage_pairs::test_every_kind_of_state_is_handed_over_between_stages_and_one_rank
    """),
    *_all("layouts", "ep", """
        workers/test_rank_pairs::test_greedy_answers_are_the_oracles_with_experts_spread_over_ranks
    """),
    *_all("layouts", "dp", "workers/test_data_parallel::test_two_processes_share_their_experts_and_leave_together"),
    *_all("drafts", "lookup", """
        engine/test_drafted_rows::test_drafts_change_no_token_of_any_family
    """),
    *_all("drafts", _drafts, """
        engine/test_draft_layers::test_proposals_are_those_of_the_plain_definition
    """, "drafted", "llama"),
    *_all("drafts", _drafts, """
        workers/test_draft_models::test_answers_with_a_draft_model_are_those_without_and_its_state_is_never_lost
    """, family="llama"),
    *_all("adapters", "LoRA", """
        engine/test_adapted_rows::test_adapters_of_families_are_those_of_models_with_them_merged_in
    """),
    *_all("adapters", "LoRA", """
        workers/test_adapters::test_answers_of_many_adapters_in_one_batch_are_those_of_models_with_each_merged_in
    """, family="llama"),
    *_all("images", "tower", "engine/test_picture_towers::test_rows_are_those_of_transformers_tower", "kept"),
    *_all("images", "answers", "workers/test_pictures::test_pictures_of_every_kind_get_the_oracles_answers", "seer"),
)  # fmt: skip
COLUMNS = tuple(dict.fromkeys(shown.column for shown in SHOWN))


def class_names() -> dict[str, str]:
    """The class of `engine.models` by all names that parameters have for it: architectures, families of
    `tests.support.model_families`, of models that see, and of GGUF files."""
    found = dict(ARCHITECTURES)
    for architecture, family, _ in CHECKPOINTS:
        if architecture.endswith("ForCausalLM"):  # Others are made of a family whose text they have.
            found.setdefault(family, ARCHITECTURES[architecture])
    found |= {name: ARCHITECTURES[architecture] for name, architecture in SEEN.items()}
    return found | {name: found[family] for name, (family, *_) in SHAPES.items()}


def strings(value: object) -> Iterator[str]:
    """The strings of a parameter, and of what it is made of."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from strings([*value, *value.values()])
    elif isinstance(value, Sequence):
        for one in value:
            yield from strings(one)


def family_in(word: str, names: Mapping[str, str]) -> str:
    """The name that a parameter's string is, or that it begins with; empty: none."""
    return next((name for name in (word, word.partition("-")[0]) if name in names), "")


def cases(shown: Shown) -> Iterator[Words]:
    """The strings of each case that a test goes over."""
    module = import_module(f"tests.{shown.test.partition('::')[0].replace('/', '.')}")
    test = getattr(module, shown.test.partition("::")[2])
    marks: list[Any] = [mark.args[1] for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    if shown.fixture:
        marker = getfixturemarker(getattr(module, shown.fixture))
        assert marker is not None, f"{shown.fixture} is a fixture"
        assert marker.params, f"{shown.fixture} has parameters"
        marks.append(marker.params)
    for case in product(*marks):
        yield tuple(strings([getattr(one, "values", one) if hasattr(one, "marks") else one for one in case]))


def table() -> dict[str, dict[str, list[str]]]:
    """What is shown, by class and column."""
    names = class_names()
    found: dict[str, dict[str, list[str]]] = {name: defaultdict(list) for name in ARCHITECTURES.values()}
    for shown in SHOWN:
        for words in cases(shown):
            rows = {names[name] for name in (family_in(word, names) for word in words) if name} or {names[shown.family]}
            says = shown.says if isinstance(shown.says, str) else shown.says(words)
            for row in rows:
                if says and says not in found[row][shown.column]:
                    found[row][shown.column].append(says)
    return found


def page() -> str:
    """The text of docs/families.md."""
    rows = []
    for name, cells in table().items():
        architectures = ", ".join(f"`{one}`" for one, entry in ARCHITECTURES.items() if entry == name)
        rows.append(f"| {architectures} | {' | '.join(', '.join(cells[column]) for column in COLUMNS)} |")
    lines = [HEAD, f"| architectures | {' | '.join(COLUMNS)} |", "|" + "---|" * (1 + len(COLUMNS))]
    lines += [*sorted(rows, key=str.lower), "", TESTS]
    for column in COLUMNS:
        paths = dict.fromkeys(f"`{shown.path}`" for shown in SHOWN if shown.column == column)
        lines += ["", f"**{column.capitalize()}**", "", *(f"- {path}" for path in paths)]
    return "\n".join(lines) + "\n"


HEAD = """# What is shown of each family

<!-- Generated by tests/repository/family_table.py: run `make pages`. -->

This page is made from the tests by `make pages`: a word stands in a cell where a test's parameters name it, and
[below](#the-tests) are these tests. Which models the architectures are of, and what state they have, is
[a list](using.md#models). A row has the architectures of one class of `engine/models`, which differ in names, or in
what is around the text. An empty cell is no refusal: no test of that is about this family, whose layers and state are
of kinds that other rows have.

- **equal to**: greedy tokens in float32, and mostly logits, of models with random weights. What is right with a model's
  own weights isn't shown by it. `Llama here`: transformers doesn't have it, and its bits are those of a Llama.
- **both pools**: whole answers over a prefill and a decode worker. `hand-over`: as the oracle says, with as many bytes
  as are due; `retraction`: fifty requests in a tenth of the memory; `migration`: to another worker in mid-answer.
- **weights**: formats that answer as the numbers that they stand for; `KV`: a quantised KV cache.
- **layouts**: `colocated`: both roles in one worker; `tp`, `pp`, `ep`, `dp`: ranks that share weights, layers, experts,
  and experts alone, on one side of a pair at least.
- **drafts**: `lookup`: no token changes; `mtp`, `eagle3`: proposals are those of a plain definition.
- **adapters**: answers are those of a model into which the adapter was merged.
- **images**: `tower`: what stands at an image's positions is what transformers' tower gives; `answers`: tokens over
  both pools are those of transformers, which is given the same files.
"""
TESTS = "## The tests"

if __name__ == "__main__":
    print(page(), end="")

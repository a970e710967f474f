"""Captured steps of every family whose steps can be captured; run as a script by `test_step_graph_families.py`."""

from __future__ import annotations

from tests.kernels.claims import answer
from tests.kernels.interpreted_graphs import drafted_bits, same_bits


def claim_experts_have_the_same_bits() -> None:
    same_bits("qwen3_moe")


def claim_latents_have_the_same_bits() -> None:
    same_bits("deepseek_v3")


def claim_selections_have_the_same_bits() -> None:
    same_bits("deepseek_v32")


def claim_windows_have_the_same_bits() -> None:
    same_bits("gemma3")


def claim_shared_keys_have_the_same_bits() -> None:
    same_bits("gemma4")


def claim_gated_delta_states_have_the_same_bits() -> None:
    same_bits("qwen3_next")


def claim_states_of_mamba_have_the_same_bits() -> None:
    same_bits("nemotron_h")


def claim_sinks_have_the_same_bits() -> None:
    same_bits("gpt_oss")


def claim_drafts_of_experts_have_the_same_bits() -> None:
    drafted_bits("qwen3_moe")


def claim_drafts_over_latents_have_the_same_bits() -> None:
    drafted_bits("deepseek_v3")


def claim_drafts_over_selections_have_the_same_bits() -> None:
    drafted_bits("deepseek_v32")


def claim_drafts_over_windows_have_the_same_bits() -> None:
    drafted_bits("gemma3")


def claim_drafts_over_sinks_have_the_same_bits() -> None:
    drafted_bits("gpt_oss")


def claim_drafts_over_states_of_mamba_have_the_same_bits() -> None:
    drafted_bits("nemotron_h")


if __name__ == "__main__":
    answer(globals())

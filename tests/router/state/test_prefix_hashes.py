"""Hashes of prompts are those of workers' pages, whichever of them are kept and looked up."""

from __future__ import annotations

import pytest

from twinpool.contracts.block_hash import block_hashes
from twinpool.router.state.prefix_hashes import ASKED, BLOCK_TOKENS, NO_HASHES, keys_of, marked, prefix_hashes

PROMPT = tuple((7 * n * n + n) % 50_000 for n in range(128 * 1024 + 5))


@pytest.mark.parametrize("page_tokens", [4, 16, 64, 256])
@pytest.mark.parametrize("salt", ["", "a tenant\nred"])
def test_a_prompts_pages_have_the_keys_that_workers_name_them_by(page_tokens: int, salt: str) -> None:
    prompt = PROMPT[:3000]
    hashes = prefix_hashes(prompt, salt, page_tokens)
    full = block_hashes(prompt, page_tokens, salt)[: len(prompt) // page_tokens]
    assert hashes.pages.tolist() == [int.from_bytes(page[:8], "little") for page in full]
    step = max(BLOCK_TOKENS, page_tokens) // page_tokens
    assert hashes.blocks.tolist() == hashes.pages.tolist()[step - 1 :: step]
    assert hashes.blocks_end == len(hashes.blocks) * step * page_tokens


def test_one_page_in_four_is_a_mark_wherever_it_lies_and_all_are_where_pages_are_large() -> None:
    pages = prefix_hashes(PROMPT).pages
    kept = marked(pages, 16)
    assert 0.23 < kept.mean() < 0.27
    shifted = keys_of(block_hashes(PROMPT, 16)[5:50])
    assert marked(shifted, 16).tolist() == kept.tolist()[5:50], "a run of pages says the same without its beginning"
    assert marked(prefix_hashes(PROMPT, page_tokens=64).pages, 64).all()


def test_of_a_long_prompt_some_are_looked_up_and_the_last_always() -> None:
    hashes = prefix_hashes(PROMPT)
    keys, ends = hashes.asked_blocks
    assert (len(keys), int(ends[-1])) == (ASKED, hashes.blocks_end == 128 * 1024 and 128 * 1024)
    assert keys.tolist() == [hashes.blocks[end // 64 - 1] for end in ends.tolist()]
    assert set((ends[1:] - ends[:-1]).tolist()) == {256}
    keys, ends = hashes.asked_marks
    kept = [(n + 1) * 16 for n in range(len(hashes.pages)) if marked(hashes.pages[n : n + 1], 16)[0]]
    assert len(keys) <= ASKED
    assert int(ends[-1]) == kept[-1]
    assert keys.tolist() == [hashes.pages[end // 16 - 1] for end in ends.tolist()]
    short = prefix_hashes(PROMPT[:1000])
    assert short.asked_blocks[1].tolist() == list(range(64, 961, 64))
    assert [len(part) for part in (*NO_HASHES.asked_blocks, *NO_HASHES.asked_marks)] == [0, 0, 0, 0]

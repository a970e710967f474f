"""The step budget: how the tokens of one step are shared between decode and prompts on a colocated worker.

A step has `prefill.chunk_tokens` tokens. Each row of decode takes one and those of its drafts, first; chunks of prompts
get the rest, but never less than `colocate.prompt_tokens` or a page. So a running request has a row in every step (or
in its turn, where there are more than `decode.max_batch_tokens`), and the time between two of its tokens is that of one
step, of no more tokens than the budget, or than its rows and the prompts' least part where that is more. And the oldest
prompt gets on in every step, however many requests run: neither can starve the other.
"""

from __future__ import annotations


def prompt_tokens(budget: int, taken: int, least: int, page_tokens: int) -> int:
    """Return the tokens that chunks of prompts may have in a step in which rows of decode have `taken` some.

    `budget`: tokens of the step; `least`: tokens that prompts keep. Chunks end at page boundaries, so they keep at
    least a page, where the budget has one.
    """
    return max(budget - taken, min(budget, max(least, page_tokens)))

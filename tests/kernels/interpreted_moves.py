"""The claims about the kernels that copy pages, checked in Triton's interpreter; run by `test_move_kernels.py`."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

os.environ["TRITON_INTERPRET"] = "1"

import torch

from tests.kernels.claims import answer
from tests.support.pool_sets import NAMES, filled, pool_sets
from twinpool.cache.memory.kv_cache_spec import IndexSpace, LayoutOrder
from twinpool.cache.memory.page_digest import sum_by_numpy
from twinpool.cache.memory.page_moves import CopyBlock, blocks, copy_indexed, packing
from twinpool.cache.memory.triton_pages import add_sums, copy_rows, reachable
from twinpool.cache.pool.pool_set import PoolSet

COUNT = 7


def both_ways(
    block: CopyBlock, source: torch.Tensor, counts: tuple[int, int], sources: Sequence[int], target: torch.Tensor,
    targets: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The target region after the kernel, and after plain torch."""
    results = []
    for copy in (copy_rows, copy_indexed):
        region = target.clone()
        copy(
            block.source.stack(source, block.rows, counts[0], block.width, block.word), sources,
            block.target.stack(region, block.rows, counts[1], block.width, block.word), targets,
        )  # fmt: skip
        results.append(region)
    return results[0], results[1]


def claim_between_regions_of_either_order_the_kernel_copies_as_torch_does() -> None:
    draw = random.Random(1)
    for name in NAMES:
        for page_tokens in (1, 4):
            spec = pool_sets(page_tokens)[name]
            for orders in ((a, b) for a in LayoutOrder for b in LayoutOrder):
                one, other = (filled(PoolSet(spec, spec.even(COUNT), order=o), n) for n, o in enumerate(orders))
                for pool in spec.by_name:
                    sources, targets = (draw.sample(range(1, COUNT), 3) for _ in "ab")
                    for block in blocks(one.layout.buffers[pool], other.layout.buffers[pool]):
                        got, want = both_ways(block, one.region, (COUNT, COUNT), sources, other.region, targets)
                        assert torch.equal(got, want)
                        assert not torch.equal(got, other.region), "something has been copied"


def claim_gather_and_scatter_are_torchs() -> None:
    spec = pool_sets(4)["all"]
    pools = filled(PoolSet(spec, spec.even(COUNT)), 1)
    for pool in spec.by_name:
        packed = torch.randint(256, (3 * spec.unit_bytes(pool),), dtype=torch.uint8)
        canonical = packing(pools.layout, pool)
        for block in blocks(pools.layout.buffers[pool], canonical):
            got, want = both_ways(block, pools.region, (COUNT, 3), [6, 1, 4], packed, range(3))
            assert torch.equal(got, want)
        for block in blocks(canonical, pools.layout.buffers[pool]):
            got, want = both_ways(block, packed, (3, COUNT), range(3), pools.region, [2, 3, 5])
            assert torch.equal(got, want)


def claim_some_layers_are_copied_without_the_others() -> None:
    spec = pool_sets(4)["full+state"]
    one, other = filled(PoolSet(spec, spec.even(COUNT)), 1), filled(PoolSet(spec, spec.even(COUNT)), 2)
    for layer in range(3):
        for block in blocks(one.layout.buffers["full"], other.layout.buffers["full"], range(layer, layer + 1)):
            got, want = both_ways(block, one.region, (COUNT, COUNT), [3], other.region, [4])
            assert torch.equal(got, want)


def claim_words_of_every_size_and_rows_longer_than_a_piece_arrive() -> None:
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        for words in (1, 3, 1024, 1025, 2500):
            stack = torch.randint(100, (2, 3, words), dtype=dtype)
            target = torch.zeros(2, 4, words, dtype=dtype)
            copy_rows(stack, [2, 0], target, [1, 3])
            assert torch.equal(target[:, [1, 3]], stack[:, [2, 0]])
            assert not target[:, [0, 2]].any()


def claim_heads_of_each_token_are_copied_as_torch_copies_them() -> None:
    """Stacks [layers, tokens, pages, words], of some heads of wider pages on both sides."""
    whole, part = torch.randint(1 << 40, (3, 6, 5, 4, 7)), torch.zeros(3, 4, 5, 2, 7, dtype=torch.int64)
    some = whole[:, :, :, 1:3].transpose(1, 2).flatten(3)
    results = []
    for copy in (copy_rows, copy_indexed):
        region = part.clone()
        copy(some, [4, 1, 5], region.transpose(1, 2).flatten(3), [3, 1, 2])
        results.append(region)
    assert torch.equal(*results)
    assert torch.equal(results[0][:, [3, 1, 2]], whole[:, [4, 1, 5], :, 1:3])


def claim_no_pages_are_no_launch() -> None:
    stack = torch.zeros(2, 3, 5, dtype=torch.int64)
    copy_rows(stack, [], stack, [])


def claim_plain_host_memory_is_not_reachable() -> None:
    assert not reachable(torch.zeros(4))


def claim_pages_are_summed_for_their_digests_as_numpy_sums_them() -> None:
    draw = torch.Generator().manual_seed(3)
    for word in (torch.int64, torch.int32, torch.int16, torch.uint8):
        for layers, tokens, words in ((1, 1, 1), (3, 4, 5), (8, 1, 2500), (17, 2, 1024)):
            stack = torch.randint(0, 256, (layers, COUNT, tokens * words * word.itemsize), generator=draw).to(
                torch.uint8
            )
            stack_lpw = stack.view(word)
            coefficients = torch.randint(-(2**63), 2**63 - 1, (layers, words), generator=draw)
            pages = [5, 1, 6]
            total = torch.full((len(pages), tokens), 7, dtype=torch.int64)
            add_sums(stack_lpw, pages, coefficients, total)
            want = sum_by_numpy(stack_lpw[:, pages], word, coefficients, tokens)
            assert torch.equal(total, want + 7), (word, layers, tokens, words)


def claim_pages_that_lie_apart_are_summed_where_they_are() -> None:
    spec, summed = pool_sets(4)["all"], 0
    for order in LayoutOrder:
        pools = filled(PoolSet(spec, spec.even(COUNT), order=order), 1)
        for pool in spec.by_name:
            for stack in pools.digester._stacks[pool]:
                if stack.read_as != stack.word:
                    continue  # Words that lie across the region's alignment are put together by torch.
                tokens = 4 if stack.layout.spec.index is IndexSpace.TOKEN else 1
                words_lpw = stack.layout.stack(pools.region, COUNT, stack.read_as)
                total = torch.zeros(3, tokens, dtype=torch.int64)
                add_sums(words_lpw, [3, 6, 1], stack.coefficients_lw, total)
                one_by_one = words_lpw[:, [3, 6, 1]].contiguous()
                assert torch.equal(total, sum_by_numpy(one_by_one, stack.word, stack.coefficients_lw, tokens))
                summed += 1
    assert summed > 2


if __name__ == "__main__":
    answer(globals())

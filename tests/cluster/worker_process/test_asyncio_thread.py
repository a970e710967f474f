"""The event loop on a thread of its own, when it has ended."""

from __future__ import annotations

import inspect

import pytest

from twinpool.cluster.worker_process.grpc_service import AsyncioThread


async def seven() -> int:
    return 7


def test_a_coroutine_that_comes_after_the_loops_end_is_refused_and_closed() -> None:
    loop = AsyncioThread("ends")
    assert loop.run(seven(), 60.0) == 7
    loop.stop(60.0)
    late = seven()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(late, 60.0)
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED

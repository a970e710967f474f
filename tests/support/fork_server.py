"""Processes of tests that begin with torch and the workers imported: forked from a server that has imported them once.

A fresh interpreter needs seconds of a core for that, each time.
"""

from __future__ import annotations

import functools
import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = (
    "torch",
    "torch.distributed",
    "twinpool.cluster.assembly.build_worker",
    "twinpool.cluster.worker_process.worker_process",
    "twinpool.cluster.worker_process.follower_process",
    "tests.support.worker_pair",
)


@functools.cache
def forked_processes() -> ForkServerContext:
    """The context whose processes are forked from the server, which ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context

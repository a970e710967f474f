"""Twinpool: a runtime that serves large language models with prefill and decode on separate pools of workers.

This is the one package that is installed. In a checkout its parts are links to the folders beside it: `twinpool.router`
lies in `router/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinpool.cli.operator.push_weights import push_weights
    from twinpool.cluster.serve.offline_llm import LLM

__all__ = ["LLM", "push_weights"]


def __getattr__(name: str) -> Any:
    """Import what is asked for then: commands don't pay for it."""
    if name == "push_weights":
        from twinpool.cli.operator.push_weights import push_weights

        return push_weights
    if name == "LLM":
        from twinpool.cluster.serve.offline_llm import LLM

        return LLM
    raise AttributeError(f"module 'twinpool' has no attribute {name!r}")

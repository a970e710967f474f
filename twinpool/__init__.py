"""Twinpool: a runtime that serves large language models with prefill and decode on separate pools of workers.

This is the one package that is installed. In a checkout its parts are links to the folders beside it: `twinpool.router`
lies in `router/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinpool.cluster.serve.offline_llm import LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    """Import `LLM` when it is asked for: commands don't pay for it."""
    if name == "LLM":
        from twinpool.cluster.serve.offline_llm import LLM

        return LLM
    raise AttributeError(f"module 'twinpool' has no attribute {name!r}")

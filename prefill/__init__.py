"""Prefill: computes prompts in chunks and hands their state over."""

from twinpool.prefill.worker import PrefillWorker

__all__ = ["PrefillWorker"]

"""Prefill: computes prompts in chunks and hands their state over."""

from prefill.worker import PrefillWorker

__all__ = ["PrefillWorker"]

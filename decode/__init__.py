"""Decode: receives the state of prompts from prefill, and generates answers in one continuous batch."""

from twinpool.decode.worker import DecodeWorker

__all__ = ["DecodeWorker"]

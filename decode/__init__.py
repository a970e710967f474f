"""Decode: receives prompts' state and generates, one continuous batch."""

from decode.worker import DecodeWorker

__all__ = ["DecodeWorker"]

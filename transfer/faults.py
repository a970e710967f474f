"""Faults on purpose, for tests and rehearsals: `faults.*` in the configuration."""

from __future__ import annotations

import os
import signal

import torch

from contracts.config import FaultsConfig


class WriteFaults:
    """Counts writes of pages and strikes at the n-th."""

    def __init__(self, config: FaultsConfig) -> None:
        self._config = config
        self._writes = 0
        self._corrupted = 0

    def in_write(self) -> None:
        """Called in the middle of each write of pages: half of it is in the reader's memory."""
        self._writes += 1
        if self._writes == self._config.stop_in_write:
            os.kill(os.getpid(), signal.SIGSTOP)

    def after_seal(self, region: torch.Tensor, offset: int) -> None:
        """Called with where the first byte of a page was written at the reader."""
        self._corrupted += 1
        if self._corrupted == self._config.corrupt_page:
            region[offset] ^= 0x40

"""One NIXL agent over UCX: the door to the package, which is optional.

An agent has its own UCX worker, so what one does never waits for another, and with an agent ends all that reaches its
memory through it. Agents have no thread: progress is made by whoever asks them something.
"""

from __future__ import annotations

import functools
import importlib
import logging
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from twinpool.contracts.errors import ConfigError, LayoutMismatch

Runs = npt.NDArray[np.int64]
"""Runs of bytes, int64 [runs, 3]: address, length and device of each."""


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """Where memory lies, as NIXL names it."""

    name: str
    """``DRAM``: the host's. ``VRAM``: a GPU's."""
    device: int = 0
    """Which GPU, as its process counts them; 0 for the host's."""


HOST_MEMORY = MemoryKind("DRAM")


def kind_of(memory: torch.Tensor) -> MemoryKind:
    return MemoryKind("VRAM", memory.get_device()) if memory.is_cuda else HOST_MEMORY


_INSTEAD = ": use transfer.plane=staged, or engine.device=cpu"
_MODULES = ("nixl_cu12._api", "nixl_cu13._api")


@functools.cache
def load_nixl() -> Any:
    """Import NIXL. Raises `ConfigError` where it isn't installed, or can't be loaded."""
    found = ""
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except ImportError as error:
            found = found or f"{name} can't be loaded: {error}"
            continue
        logging.getLogger("nixl").setLevel(logging.WARNING)
        for each in logging.root.manager.loggerDict:
            if each.startswith(("nixl", name.partition(".")[0])):
                logging.getLogger(each).setLevel(logging.WARNING)
        return module
    raise ConfigError(f"plane nixl needs NIXL: {found or 'it is not installed'}; pip install 'twinpool[nixl]'")


def own_device(memory: torch.Tensor) -> None:
    """Make the GPU of `memory`, if it lies on one, this thread's own: UCX asks for the thread's."""
    if memory.is_cuda:
        torch.cuda.set_device(memory.device)


class NixlAgent:
    """An agent, the memory that is registered with it, and at most one other agent that it writes to. For one thread at
    a time."""

    def __init__(self) -> None:
        """Raises `ConfigError` where NIXL can't be used here."""
        api = load_nixl()
        try:
            self._agent = api.nixl_agent(secrets.token_hex(8), api.nixl_agent_config(enable_prog_thread=False))
        except Exception as error:  # The package raises one type of its own for each reason.
            raise ConfigError(f"plane nixl: no agent can be made: {error}") from None
        if "UCX" not in self._agent.backends:
            raise ConfigError("plane nixl: NIXL has no UCX here")
        self._reader = ""
        self._registered: list[Any] = []

    def register(self, memory: torch.Tensor) -> None:
        """Let transfers use this memory, uint8 [bytes]. Raises `ConfigError` where it can't be registered."""
        kind = kind_of(memory)
        if kind.name not in {name.removesuffix("_SEG") for name in self._agent.get_backend_mem_types("UCX")}:
            raise ConfigError(f"plane nixl: NIXL's UCX knows no {kind.name} here{_INSTEAD}")
        try:
            runs = [(memory.data_ptr(), memory.numel(), kind.device, "")]
            self._registered.append(self._agent.register_memory(runs, kind.name))
        except Exception as error:
            hint = f"; UCX may have no CUDA here{_INSTEAD}" if kind.name == "VRAM" else ""
            raise ConfigError(
                f"plane nixl: {memory.numel()} bytes of {kind.name} can't be registered: {error}{hint}"
            ) from None

    @property
    def metadata(self) -> bytes:
        """What a writer needs to reach the memory that is registered."""
        return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> None:
        """Connect to a reader's agent. Raises `LayoutMismatch` for metadata that can't be used."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise LayoutMismatch(f"plane nixl: the reader's agent can't be reached: {error}") from None
        self._reader = name.decode() if isinstance(name, bytes) else str(name)

    def post(self, sources: Runs, here: MemoryKind, targets: Runs, there: MemoryKind) -> Any:
        """Start a write of runs here to runs of the same lengths there; returns its handle. Raises `RuntimeError`."""
        try:
            mine = self._agent.get_xfer_descs(sources, here.name)
            theirs = self._agent.get_xfer_descs(targets, there.name)
            handle = self._agent.initialize_xfer("WRITE", mine, theirs, self._reader)
            if self._agent.transfer(handle) == "ERR":
                raise RuntimeError("the transfer failed at once")
        except RuntimeError:
            raise
        except Exception as error:
            raise RuntimeError(f"NIXL: {error}") from None
        return handle

    def over(self, handle: Any) -> bool:
        """Whether a write has landed. Raises `RuntimeError` where it has failed."""
        try:
            state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise RuntimeError(f"NIXL: {error}") from None
        if state == "ERR":
            raise RuntimeError("NIXL: the transfer failed")
        return bool(state == "DONE")

    def release(self, handle: Any) -> None:
        """Forget a write, which is ended if it is still under way."""
        try:
            handle.release()
        except Exception as error:
            logging.getLogger("twinpool.transfer").warning("a NIXL transfer could not be ended: %s", error)

    def progress(self) -> None:
        """Take in what has come, where the transport needs this end's help to store it."""
        self._agent.get_new_notifs()

    def close(self) -> None:
        """End the agent. When this returns, nothing is stored through it any more."""
        self._agent, self._registered = None, []


def byte_runs(base: int, offsets: Runs, lengths: Runs, kind: MemoryKind) -> Runs:
    """Return runs of `lengths` bytes at `offsets` behind the address `base`, in memory of this kind."""
    return np.stack([base + offsets, lengths, np.full_like(lengths, kind.device)], axis=1)

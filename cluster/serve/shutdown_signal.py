"""The signals that end a run of `twinpool serve`, and the deadline by which it is gone.

The main thread may sit in native code for a minute (joining a Ray that doesn't answer). So a thread listens, and from
the signal on the deadline runs, whatever the main thread does.

An end that was asked for has the exit code `ASKED`, at whatever moment it was asked for and however long it took.
Before `ShutdownSignal` handles the signals there are two steps, because nothing has been made while the first modules
are imported (`cli.commands`), and what preflight makes (a download's folder, a child that looks at GPUs) is removed by
unwinding (`EarlyEnd`).

A run until then is `run_until_asked`, whatever it starts and keeps alive.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.signal_listener import ServiceManager, SignalListener

if TYPE_CHECKING:
    from twinpool.cluster.serve.terminal import Terminal

log = logging.getLogger("twinpool.serve")

ASKED, FAILED = 0, 1
"""Exit codes: of an end that a signal asked for, and of one that nobody asked for."""
START_DEADLINE_S = 1.5
"""The longest that an orderly end takes while the cluster is still starting: no client waits for an answer yet."""
END_S = 6.0
"""How long an end may take in order, once the answers have ended or had their time."""
ONE_REQUEST_S = 1.0
"""Signals within so many seconds are one request: ``timeout`` signals its child and then its child's group."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOBODY = ServiceManager()


class ShutdownSignal:
    """The first Ctrl-C, SIGTERM or SIGHUP asks for an end: running answers have `timeout_s` (`cluster.stop_timeout_s`),
    and the rest of the end `END_S` more. A second one ends this process at once, as the deadline does; the reaper takes
    what is left of the run then."""

    def __init__(self, timeout_s: float, manager: ServiceManager = NOBODY, clock: Clock | None = None) -> None:
        """`manager` is told of an end that was asked for."""
        self._timeout_s, self.manager, self._clock = timeout_s, manager, clock or SystemClock()
        self._asked = threading.Event()
        self._asked_at = 0.0
        self._asking = threading.Lock()
        self._shown_fd = 2
        self.serving = False
        self._listener = SignalListener(handled_signals(), lambda number: self.ask())

    def install(self) -> None:
        """Handle SIGINT, SIGTERM and SIGHUP from now on. Main thread only; call it again after a library (Ray) has
        installed handlers of its own."""
        self._listener.listen()

    def show_on(self, out: TextIO) -> None:
        """Have the last line of an end at once go to `out`."""
        self._shown_fd = out.fileno()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    @property
    def answers_s(self) -> float:
        """Seconds that running answers have yet, of an end that was asked for."""
        return max(0.0, self._asked_at + self._timeout_s - self._clock.now())

    @property
    def drain_line(self) -> str:
        """What the operator is shown while answers end."""
        return (
            f"stopping: new requests are refused, running answers have {self.answers_s:.3g} s to end "
            "(cluster.stop_timeout_s); a second signal ends them now"
        )

    @property
    def deadline_s(self) -> float:
        """Seconds from the request by which this process has ended."""
        return self._timeout_s + END_S if self.serving else START_DEADLINE_S

    def wait(self, timeout_s: float) -> bool:
        """Wait for a signal, up to `timeout_s`; returns whether one has come."""
        return self._asked.wait(timeout_s)

    def ready(self) -> None:
        """Use the whole deadline from now on: the cluster serves, and answers may be under way."""
        self.serving = True

    def promise(self, code: int) -> None:
        """Start the deadline of an end that nobody has asked for: this process ends within it, with `code`. An end that
        was asked for has its deadline."""
        if not self.asked:
            self._deadline(END_S if self.serving else START_DEADLINE_S, code)

    def ask(self) -> None:
        """Ask for an end, as a signal does; any thread, but no handler of a signal."""
        with self._asking:
            now = self._clock.now()
            if self.asked:
                if now - self._asked_at >= ONE_REQUEST_S:
                    self._end_at_once("asked again: what is left is ended now", ASKED)
                return
            self._asked_at = now
            self._asked.set()
        self._deadline(self.deadline_s, ASKED)
        self.manager.stopping()

    def _deadline(self, seconds: float, code: int) -> None:
        line = f"not ended within {seconds:g} s: what is left is ended now"
        timer = threading.Timer(seconds, self._end_at_once, (line, code))
        timer.daemon = True
        timer.start()

    def _end_at_once(self, line: str, code: int) -> None:
        """End this process. The line is written past Python's buffers, whose locks may be held for ever."""
        with contextlib.suppress(OSError):
            os.write(self._shown_fd, f"{line}\n".encode())
        _end(code)


def signals_of(stop_timeout_s: float) -> ShutdownSignal:
    """The signals that end a run, handled from now on. `stop_timeout_s`: which running answers have. Main thread
    only."""
    stopping = ShutdownSignal(stop_timeout_s, ServiceManager.adopt())
    stopping.install()
    return stopping


class StartStopped(Exception):
    """Raised when the operator asks to end while a run is starting."""


def run_until_asked(
    life: Callable[[ExitStack], None],
    stopping: ShutdownSignal,
    terminal: Terminal,
    logs: Path,
    cause: Callable[[Exception, ExitStack], Exception] = lambda error, stack: error,
) -> int:
    """Start, keep alive and drain by `life`, which has its stack end what runs; returns the exit code.

    What went wrong is shown before anything is ended: the end may come to its deadline. `cause` says what that is, of
    an error that nobody has asked for. Raises what goes wrong unasked while it ends.
    """
    try:
        with ExitStack() as stack:
            return _lived(life, stack, stopping, terminal, logs, cause)
    except (Exception, SystemExit):
        if not stopping.asked:
            raise
        log.warning("met while it ended", exc_info=True)
        return ASKED


def _lived(
    life: Callable[[ExitStack], None],
    stack: ExitStack,
    stopping: ShutdownSignal,
    terminal: Terminal,
    logs: Path,
    cause: Callable[[Exception, ExitStack], Exception],
) -> int:
    """The exit code of `life`, before its stack ends what runs."""
    try:
        life(stack)
    except (Exception, SystemExit) as error:  # Ray's own handler of SIGTERM raises the latter, until it's replaced.
        if not stopping.asked:
            if not isinstance(error, Exception):
                raise
            terminal.failure(cause(error, stack), logs)
            stopping.promise(FAILED)
            return FAILED
        if not isinstance(error, StartStopped | SystemExit):
            log.warning("met while it ended", exc_info=True)
    terminal.line("answers have ended" if stopping.serving else "stopped while starting")
    return ASKED


def handled_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask for an end: SIGHUP isn't one where it is ignored, as under ``nohup``."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in SIGNALS if number is not signal.SIGHUP or not ignored)


def _end(code: int) -> None:
    """End this process, whatever its other threads do: children that are tied to it are killed by the kernel then, and
    the rest of its run by the reaper."""
    os._exit(code)


class EndAsked(BaseException):
    """Raised in the main thread when a signal asks for an end."""


class EarlyEnd:
    """The handler that unwinds. Whatever swallows the exception (code of others, while it is imported), the process has
    ended `START_DEADLINE_S` later."""

    def __init__(self) -> None:
        self._asked = False

    def install(self) -> None:
        """Handle the signals from now on, until `ShutdownSignal` does. Main thread only."""
        SignalListener(handled_signals(), _end_later).listen(self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._asked:
            self._asked = True
            raise EndAsked


def _end_later(number: int) -> None:
    time.sleep(START_DEADLINE_S)
    os._exit(ASKED)

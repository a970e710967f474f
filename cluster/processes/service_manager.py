"""What a process tells the service manager that keeps it, where one does: systemd, by the protocol of sd_notify(3).

A unit of ``Type=notify`` counts as started when its process says so here, not when it has been forked.
"""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger("twinpool.service_manager")

SOCKET_VARIABLE = "NOTIFY_SOCKET"
TIMEOUT_S = 1.0


class ServiceManager:
    """The service manager at `address`; empty: there is none, and nothing is told."""

    def __init__(self, address: str = "") -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address

    @classmethod
    def adopt(cls) -> ServiceManager:
        """Return the one that this process's environment names, and take it out of the environment: processes that this
        one starts have nothing to tell it."""
        return cls(os.environ.pop(SOCKET_VARIABLE, ""))

    def ready(self, status: str) -> None:
        """Say that the process serves. `status`: one line, which ``systemctl status`` shows."""
        self._tell(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """Say that the process has begun to end."""
        self._tell("STOPPING=1")

    def _tell(self, message: str) -> None:
        """Send a message. A service manager that can't be told is logged: it ends the process if it waits for that."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(TIMEOUT_S)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            log.warning("the service manager can't be told: %s", error)

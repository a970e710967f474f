"""A headless Chromium, driven over a pipe by the Chrome DevTools Protocol: for tests and pictures of the dashboard.

The pipe (``--remote-debugging-pipe``) needs no port and no package: each message is JSON, ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--no-first-run",
    "--mute-audio",
    "--hide-scrollbars",
)
ANSWER_S = 30.0
START_S = 60.0
LOOK_S = 0.05


class BrowserError(Exception):
    """Raised when the browser doesn't start, doesn't answer, or a script of the page fails."""


def chromium() -> str | None:
    """The installed browser's program; None where there is none."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Tab:
    """One page: what it asked for, what it complained of, and scripts run in it."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.requests: list[str] = []
        """URLs that the page has asked for."""
        self.complaints: list[str] = []
        """Errors and warnings of its console, and exceptions of its scripts."""

    def begin(self) -> None:
        """Have events of the page told from now on."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, parameters, self._session)

    def heard(self, method: str, message: dict[str, Any]) -> None:
        """Note an event of the protocol."""
        if method == "Network.requestWillBeSent":
            self.requests.append(message["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = message["exceptionDetails"]
            self.complaints.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and message["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(one.get("value", one.get("description"))) for one in message["args"]))
        elif method == "Log.entryAdded" and message["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{message['entry']['text']} {message['entry'].get('url', '')}")

    def look(self, width: int, height: int, *, dark: bool = False, still: bool = False) -> None:
        """Give the page a window of so many CSS pixels, and tell it what its reader prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def go(self, url: str) -> None:
        answer = self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise BrowserError(f"{url}: {answer['errorText']}")

    def run(self, script: str) -> Any:
        """The value of an expression in the page, a promise's once it is there."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"].get("exception", {}).get("description")))
        return answer["result"].get("value")

    def until(self, script: str, timeout_s: float = 20.0) -> Any:
        """Wait until an expression is true; returns its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(script)):
            if time.monotonic() > deadline:
                raise BrowserError(f"not true within {timeout_s:g} s: {script}; complaints: {self.complaints}")
            threading.Event().wait(LOOK_S)
        return value

    def press(self, key: str) -> None:
        """Press and release a key, by its name in the protocol: ``Tab``, ``ArrowLeft``, ``Enter``."""
        text = {"text": "\r"} if key == "Enter" else {}  # Without it no button is pressed.
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def image(self, **options: Any) -> bytes:
        """What there is to see as PNG; `options` as the protocol has them: ``clip``."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, **options)
        return base64.b64decode(answer["data"])


class Browser:
    """A running browser."""

    def __init__(self, folder: Path) -> None:
        """Start it with its files in `folder`. Raises `BrowserError`."""
        program = chromium()
        if program is None:
            raise BrowserError("there is no Chromium: apt-get install chromium")
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        self._answers: dict[int, dict[str, Any]] = {}
        self._tabs: dict[str, Tab] = {}
        self._next, self._more = 0, threading.Condition()
        self._ended = False
        command = f'exec 3<&{read} 4>&{write}; exec "$@"'  # The protocol's pipe is at descriptors 3 and 4.
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", program, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._reader = threading.Thread(target=self._hear, name="browser", daemon=True)
        self._reader.start()
        self.call("Browser.getVersion", {}, timeout_s=START_S)

    def tab(self) -> Tab:
        """A page more, empty yet."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        tab.begin()
        return tab

    def call(
        self, method: str, parameters: dict[str, Any], session: str = "", timeout_s: float = ANSWER_S
    ) -> dict[str, Any]:
        """Make one call of the protocol. Raises `BrowserError`."""
        with self._more:
            self._next += 1
            number = self._next
            message = {"id": number, "method": method, "params": parameters}
            text = json.dumps(message | ({"sessionId": session} if session else {}))
            try:
                os.write(self._write, text.encode() + b"\0")
            except OSError as error:
                raise BrowserError(f"the browser has ended: {error}") from None
            if not self._more.wait_for(lambda: number in self._answers or self._ended, timeout_s):
                raise BrowserError(f"no answer to {method} within {timeout_s:g} s")
            if number not in self._answers:
                raise BrowserError("the browser has ended")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error'].get('message')}")
        result: dict[str, Any] = answer["result"]
        return result

    def _hear(self) -> None:
        rest = b""
        while part := os.read(self._read, 1 << 16):
            *messages, rest = (rest + part).split(b"\0")
            for text in messages:
                message = json.loads(text)
                with self._more:
                    if "id" in message:
                        self._answers[message["id"]] = message
                        self._more.notify_all()
                    elif (tab := self._tabs.get(message.get("sessionId", ""))) is not None:
                        tab.heard(message["method"], message["params"])
        with self._more:
            self._ended = True
            self._more.notify_all()

    def close(self) -> None:
        """End the browser and all that it has started."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        self._reader.join(60)
        os.close(self._read)


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser for as long as the block runs. Raises `BrowserError`."""
    with tempfile.TemporaryDirectory(prefix="twinpool-browser-", ignore_cleanup_errors=True) as folder:
        browser = Browser(Path(folder))
        try:
            yield browser
        finally:
            browser.close()

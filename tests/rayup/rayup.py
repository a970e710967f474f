"""`make test-rayup`: launch the cluster of deploy/ray/loopback.yaml for real, use it, take it down, find nothing left.

The script runs itself again inside namespaces of its own (processes, mounts, network), as if it were a machine of its
own: port 22 is free there, `ray stop` finds no other Ray, and at the end every process that still lives is one that was
left behind. It needs root, Linux, `unshare` and `ip`; sshd and rsync are taken from the machine, or, where it has none,
unpacked from Debian packages into build/rayup (nothing is installed).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

import psutil

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "rayup"
LAUNCH = ROOT / "deploy" / "ray" / "loopback.yaml"
BIN = Path(sys.executable).parent
HEAD = "127.0.0.1"
ADDRESSES = (HEAD, "127.0.0.2", "127.0.0.3")
PACKAGES = ("openssh-server", "rsync", "libpopt0", "libwrap0", "libxxhash0")
INSIDE = "--inside"
READY = "Twinpool is ready: "


def main() -> None:
    if INSIDE in sys.argv:
        with ExitStack() as stack:
            rehearse(stack)
        say("nothing left running")
        return
    if sys.platform != "linux" or os.geteuid() != 0:
        stop("needs root on Linux: it makes namespaces and starts sshd (in a container, root will do)")
    for tool in ("unshare", "ip", "ssh", "ssh-keygen"):
        if shutil.which(tool) is None:
            stop(f"needs {tool}: install util-linux, iproute2 and openssh-client")
    if daemon("sshd") is None or daemon("rsync") is None:
        unpack()
    # A shell as the first process, because it reaps orphans.
    inner = f'"{sys.executable}" "{Path(__file__).resolve()}" {INSIDE}; exit $?'
    flags = ("--pid", "--mount", "--net", "--fork", "--kill-child", "--mount-proc")
    sys.exit(subprocess.run(["unshare", *flags, "sh", "-c", inner], cwd=ROOT, check=False).returncode)


# ---------------------------------------------------------------- the machine


def daemon(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", str(BUILD / "bin")]))


def unpack() -> None:
    """sshd and rsync from Debian packages into build/rayup, behind wrappers that find their libraries."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        stop("needs sshd and rsync: install openssh-server and rsync")
    say("unpacking sshd and rsync into build/rayup")
    BUILD.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["apt-get", "download", *PACKAGES], cwd=BUILD, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        stop(f"can't get sshd and rsync ({done.stderr.strip()[-200:]}): install openssh-server and rsync")
    for package in BUILD.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, BUILD / "root"], check=True)
    (BUILD / "bin").mkdir(exist_ok=True)
    libraries = ":".join(str(path) for path in (BUILD / "root").glob("**/*-linux-gnu") if path.is_dir())
    for place, name in (("sbin", "sshd"), ("bin", "rsync")):
        wrapper = BUILD / "bin" / name
        real = BUILD / "root" / "usr" / place / name
        wrapper.write_text(f'#!/bin/sh\nexport LD_LIBRARY_PATH="{libraries}"\nexec "{real}" "$@"\n')
        wrapper.chmod(0o755)


@contextmanager
def machine() -> Iterator[Path]:
    """A home, users and an sshd of our own; yields the home."""
    work = Path(tempfile.mkdtemp(prefix="rayup-"))
    before = set(Path("/tmp").glob("ray_ssh_*"))
    home = work / "home"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", work / name], check=True)
    shutil.copy(work / "user", home / ".ssh" / "id_ed25519")
    (home / ".ssh" / "authorized_keys").write_text((work / "user.pub").read_text())
    (work / "passwd").write_text(f"root:x:0:0:root:{home}:/bin/bash\nsshd:x:74:65534::/run/sshd:/usr/sbin/nologin\n")
    (work / "shadow").write_text("root:*:19000:0:99999:7:::\nsshd:*:19000:0:99999:7:::\n")
    for name in ("passwd", "shadow"):
        subprocess.run(["mount", "--bind", work / name, f"/etc/{name}"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    separation = Path("/run/sshd")
    made = not separation.exists()
    separation.mkdir(mode=0o755, exist_ok=True)
    path = os.pathsep.join([str(BIN), str(BUILD / "bin"), os.environ.get("PATH", os.defpath)])
    os.environ.update(HOME=str(home), PATH=path, RAY_TMPDIR=str(work / "ray"), RAY_AUTH_MODE="disabled")
    (work / "ray").mkdir()
    (work / "sshd_config").write_text(
        "".join(f"ListenAddress {address}\n" for address in ADDRESSES)
        + f"Port 22\nHostKey {work / 'host'}\nPidFile none\nUsePAM no\nPermitRootLogin prohibit-password\n"
        + f"AuthorizedKeysFile {home / '.ssh' / 'authorized_keys'}\nStrictModes no\nMaxStartups 50\n"
        + f'SetEnv PATH="{path}" RAY_TMPDIR={work / "ray"}\n'
    )
    log = (work / "sshd.log").open("wb")
    sshd = subprocess.Popen([str(daemon("sshd")), "-D", "-e", "-f", work / "sshd_config"], stdout=log, stderr=log)
    try:
        wait_for(lambda: sshd.poll() is not None or subprocess.run(
            [*ssh(home), "true"], stdout=log, stderr=log, check=False).returncode == 0, 10, "sshd")  # fmt: skip
        if sshd.poll() is not None:
            stop(f"sshd did not start: {(work / 'sshd.log').read_text()[-400:]}")
        yield home
    finally:
        sshd.terminate()
        sshd.wait()
        log.close()
        for folder in (work, *(set(Path("/tmp").glob("ray_ssh_*")) - before)):
            shutil.rmtree(folder, ignore_errors=True)
        if made:
            separation.rmdir()


def ssh(home: Path) -> list[str]:
    quiet = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR")
    return ["ssh", "-i", str(home / ".ssh" / "id_ed25519"), *quiet, f"root@{HEAD}"]


# ---------------------------------------------------------------- the rehearsal


def rehearse(stack: ExitStack) -> None:
    home = stack.enter_context(machine())
    launch = home / "loopback.yaml"
    text = LAUNCH.read_text().replace("~/twinpool", str(ROOT)).replace("ssh_user: twinpool", "ssh_user: root")
    launch.write_text(text)
    ray("up", "-y", "--no-config-cache", str(launch))
    serve = subprocess.Popen(
        [*ssh(home), f"cd {ROOT} && exec twinpool serve --ray-address auto --prefill 1 --decode 2 --port 8000"],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"RAY_AUTH_MODE": "disabled"},
    )  # fmt: skip
    assert serve.stdout is not None
    url = ""
    for line in serve.stdout:
        say(line.rstrip())
        if line.startswith(READY):
            url = line.removeprefix(READY).strip()
            break
    if not url:
        for log in sorted((Path(os.environ["RAY_TMPDIR"])).glob("**/session_latest/logs/monitor.*")):
            say(f"--- {log.name}\n{log.read_text()[-6000:]}")
        stop("twinpool serve ended before it was ready")
    use(url)
    mark = {"serve", "--ray-address"}
    (server,) = [p for p in psutil.process_iter() if mark <= set(p.cmdline()) and p.name() != "ssh"]
    server.send_signal(signal.SIGINT)
    if serve.wait(10) != 0:
        stop(f"twinpool serve ended with {serve.returncode}")
    say("serve has ended")
    ray("down", "-y", str(launch))
    wait_for(lambda: not strangers(), 40, lambda: f"the nodes to end: {strangers()}")


def use(url: str) -> None:
    body = json.dumps({"model": "demo", "prompt": "It was a fine morning, and", "max_tokens": 16}).encode()
    headers = {"Content-Type": "application/json", "X-Twinpool-Timeline": "1"}
    with urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", body, headers), timeout=30) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == 16, answer
    assert answer["twinpool"]["transfer_bytes"] > 0, answer
    say(f"a completion: {answer['choices'][0]['text']!r}")
    subprocess.run(["twinpool", "drain", "decode-1"], check=True)
    states = {w["name"]: w["state"] for w in json.loads(output("twinpool", "status", "--json"))["workers"]}
    assert states == {"prefill-0": "ready", "decode-0": "ready", "decode-1": "left"}, states
    assert json.loads(output("twinpool", "check", "--json"))["ok"]


def ray(*arguments: str) -> None:
    say("ray " + " ".join(arguments[:2]))
    log = Path(os.environ["HOME"]) / f"ray-{arguments[0]}.log"
    try:
        # A file and no pipe: ssh's control master would hold a pipe open.
        with log.open("wb") as file:
            subprocess.run(["ray", *arguments], stdout=file, stderr=file, timeout=180, check=True)
    except subprocess.SubprocessError as error:
        stop(f"ray {arguments[0]} failed: {error}\n{log.read_text()[-4000:]}")


def strangers() -> list[str]:
    """Command lines of processes that should be gone by now."""
    mine = psutil.Process()
    own = {1, mine.pid, *(child.pid for child in mine.children() if "sshd" in child.name())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in own and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline())[:100])
        except psutil.Error:
            continue
    return found


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wait_for(true: object, timeout_s: float, what: object) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():  # type: ignore[operator]
        if time.monotonic() > deadline:
            stop(f"waited {timeout_s:g} s for {what() if callable(what) else what}")
        time.sleep(0.1)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def stop(text: str) -> NoReturn:
    sys.exit(f"test-rayup: {text}")


if __name__ == "__main__":
    main()

"""Make the environments of the rivals: what users would otherwise run on a CPU.

    python -m bench.rivals --install              # all, in build/rivals
    python -m bench.rivals --install openvino llamacpp

Nothing of them enters the project's own environment. pip takes them from its configured indexes and links, which should
offer a CPU build of torch (see .ci/install); llamacpp needs npm.
"""

from __future__ import annotations

import subprocess
import sys

from bench.common.bench_report import flag_parser
from bench.rivals.rival_engine import ENVIRONMENTS, NPM_PACKAGES, PACKAGES, UNWANTED, python_of


def install(name: str) -> None:
    """Make or update one environment. Raises `subprocess.CalledProcessError` with pip's own words on the screen, and
    `FileNotFoundError` without npm where that is needed."""
    if not python_of(name).exists():
        subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENTS / name)], check=True)
    pip = [str(python_of(name)), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", *PACKAGES[name]], check=True)
    if name in UNWANTED:
        subprocess.run([*pip, "uninstall", "--yes", *UNWANTED[name]], check=True)
    if name in NPM_PACKAGES:
        npm = ["npm", "install", "--silent", "--no-save", "--ignore-scripts", "--prefix", str(ENVIRONMENTS / name)]
        subprocess.run([*npm, *NPM_PACKAGES[name]], check=True)


def main() -> int:
    parser = flag_parser(__doc__, json_file=False)
    parser.add_argument("--install", nargs="*", choices=sorted(PACKAGES), required=True, help="which; none: all")
    for name in parser.parse_args().install or sorted(PACKAGES):
        install(name)
        print(f"{name}: {python_of(name)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

from __future__ import annotations

import subprocess
import sys
import zipfile

import pytest

from tests.support.served_cluster import ROOT


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built as pip builds it, without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)

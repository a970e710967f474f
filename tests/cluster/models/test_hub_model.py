"""A name on the Hugging Face Hub becomes a folder with the files that serving needs, or an error that says what to do.

The Hub is a server on loopback that speaks its API; `huggingface_hub` is the real one, with a cache of the test's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import write_gguf
from tests.support.hub_server import COMMIT, HubServer, hub_of
from twinpool.cluster.models import HubName, fetch_from_hub, hub_name
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.errors import CheckpointError

NAME = HubName("org/name")
LARGE = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("hub")
    folder = make_checkpoint(base / "published", shards=1)
    write_gguf(folder, folder / "small.gguf", "llama")
    return folder


def at(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """As HF_ENDPOINT, which the library reads when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    others = {"pytorch_model.bin": b"x" * 100, "original/model.safetensors": b"x" * 100, "README.md": b"x"}
    with hub_of("org/name", folder, more=others) as server:
        at(monkeypatch, server.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server


def refusal(name: HubName) -> str:
    with pytest.raises(CheckpointError) as raised:
        fetch_from_hub(name, print)
    text = str(raised.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", HubName("org/name", "main")),
        ("Org.x/Na-me_1.5B@v1.0", HubName("Org.x/Na-me_1.5B", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name/part/x.gguf@main", HubName("org/name", "main", "part/x.gguf")),
        ("org/name/other", None),
        ("name", None),
        ("/org/name", None),
        ("./org/name", None),
        ("org/name@", None),
        ("http://x/y", None),
    ],
)
def test_names_are_told_from_paths(text: str, name: HubName | None) -> None:
    assert hub_name(text) == name


@pytest.mark.slow
def test_only_the_files_that_serving_needs_are_fetched(hub: HubServer, folder: Path) -> None:
    found = fetch_from_hub(NAME, print)
    spec = read_model_spec(found.path)
    assert (spec.name, found.name) == ("org/name", HubName("org/name", COMMIT))
    assert spec.fingerprint == read_model_spec(folder).fingerprint
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", LARGE}
    assert {name for name, _ in hub.fetched} == wanted
    assert {path.name for path in found.path.iterdir()} == wanted


@pytest.mark.slow
def test_files_of_an_index_are_fetched_and_of_a_revision(hub: HubServer, tmp_path: Path) -> None:
    sharded = make_checkpoint(tmp_path / "sharded", shards=3)
    del hub.files[LARGE]
    hub.files |= {path.name: path.read_bytes() for path in sharded.iterdir()}
    found = fetch_from_hub(HubName("org/name", "v1"), print)
    assert read_model_spec(found.path).fingerprint == read_model_spec(sharded).fingerprint
    assert "has no revision v2" in refusal(HubName("org/name", "v2"))


@pytest.mark.slow
def test_a_gguf_file_of_a_repository_is_fetched_alone(hub: HubServer, folder: Path) -> None:
    found = fetch_from_hub(HubName("org/name", "main", "small.gguf"), print)
    assert read_model_spec(found.path).fingerprint == read_model_spec(folder / "small.gguf").fingerprint
    assert found.name == HubName("org/name", COMMIT, "small.gguf")
    assert [name for name, _ in hub.fetched] == ["small.gguf"]
    assert "has no file other.gguf" in refusal(HubName("org/name", "main", "other.gguf"))
    assert "join them" in refusal(HubName("org/name", "main", "x-00001-of-00003.gguf"))


@pytest.mark.slow
def test_without_a_network_the_cache_serves(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = fetch_from_hub(NAME, print)
    hub.fetched.clear()
    assert fetch_from_hub(NAME, print) == found
    assert not hub.fetched, "what is in the cache isn't fetched again"
    at(monkeypatch, "http://127.0.0.1:9")
    assert fetch_from_hub(NAME, print) == found
    assert fetch_from_hub(found.name, print) == found
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch_from_hub(NAME, print) == found
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # The library tries again and again.
    (found.path / LARGE).unlink()
    assert "its cache doesn't have all of it" in refusal(NAME)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    assert "the Hub can't be reached" in refusal(NAME)


@pytest.mark.slow
def test_a_download_that_broke_off_goes_on_where_it_was(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.cut_at = len(hub.files[LARGE]) // 1000 * 1000 - 5000
    found = fetch_from_hub(NAME, print)
    assert (found.path / LARGE).read_bytes() == (folder / LARGE).read_bytes()
    assert [begin for name, begin in hub.fetched if name == LARGE] == [0, hub.cut_at]


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.parametrize("architecture", ["MambaForCausalLM", 5])
def test_models_that_cant_be_served_are_refused_before_their_weights_are_fetched(
    hub: HubServer, architecture: object
) -> None:
    hub.files["config.json"] = json.dumps(
        json.loads(hub.files["config.json"]) | {"architectures": [architecture]}
    ).encode()
    assert f"architecture {architecture} is not supported, so its weights aren't fetched" in refusal(NAME)
    assert LARGE not in {name for name, _ in hub.fetched}


@pytest.mark.slow
def test_a_repository_without_safetensors_says_so(hub: HubServer) -> None:
    del hub.files[LARGE]
    assert "only weights in safetensors files are read" in refusal(NAME)


@pytest.mark.slow
def test_a_repository_of_gguf_files_says_how_to_name_one(hub: HubServer) -> None:
    del hub.files["config.json"]
    assert "org/name@main has no config.json" in (said := refusal(NAME))
    assert "org/name/FILE.gguf" in said


@pytest.mark.slow
def test_models_that_nobody_may_have_say_why(hub: HubServer) -> None:
    assert "neither the Hub nor this folder has anything of that name" in refusal(HubName("org/other"))
    hub.gated = True
    assert "its owner wants terms accepted first" in refusal(NAME)

from pathlib import Path

import pytest

from tests.support.checkpoints import Oracle, make_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", seed=3)


@pytest.fixture(scope="session")
def oracle(model: Path) -> Oracle:
    return Oracle(model)

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import Oracle, make_checkpoint
from tests.support.rank_followers import RankProcesses, rank_processes
from twinpool.decode.drafting import StepTimes


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", seed=3)


@pytest.fixture(scope="session")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module")
def warm() -> Iterator[RankProcesses]:
    """Processes for followers, started once for all tests of a file."""
    with rank_processes() as processes:
        yield processes


@pytest.fixture(autouse=True)
def drafts_whatever_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps' times aren't taken in, so that no machine's pace decides which requests have drafts."""
    monkeypatch.setattr(StepTimes, "saw", lambda self, positions, seconds: None)

"""What tests of a KV cache manager's parts share."""

from __future__ import annotations

import pytest

from tests.cache.manager.parts import Parts


@pytest.fixture
def parts() -> Parts:
    return Parts()

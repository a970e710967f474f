"""Numbers of the configuration that no cluster could be started with, or that its plan would never end with."""

from __future__ import annotations

from typing import Any

import pytest

from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), 10**400, -(10**400)], ids=lambda v: f"{v!s:.6}"
)
@pytest.mark.parametrize("key", ["router.stall_s", "cache.host_bytes", "decode.max_batch_tokens"])
def test_a_number_is_finite_and_of_a_size_that_machines_have(key: str, value: Any) -> None:
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=f"config key {key} must be") as refused:
        config_from_dict({section: {name: value}})
    assert len(str(refused.value)) < 160


@pytest.mark.parametrize("key", ["decode.max_batch_tokens", "prefill.max_running"])
def test_a_step_has_so_many_rows_at_most(key: str) -> None:
    section, name = key.split(".")
    config_from_dict({section: {name: 65_536}})
    with pytest.raises(ConfigError, match=rf"config key {key} must be a number of at most 65,536; got 65537"):
        config_from_dict({section: {name: 65_537}})

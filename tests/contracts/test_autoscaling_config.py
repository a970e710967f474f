"""The section `autoscaling`: off unless enabled, and refused by the keys' names where it makes no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinpool.cluster.serve.preflight import ServeOptions, prepare
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import load_config
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role

ON = "autoscaling.enabled=true"


def test_it_is_off_unless_enabled() -> None:
    assert not Config().autoscaling.enabled
    assert load_config(assignments=[ON]).autoscaling.enabled


def test_both_pools_may_have_their_most_together_unless_less_is_said() -> None:
    config = load_config(assignments=[ON, "autoscaling.prefill.max_workers=3", "autoscaling.decode.max_workers=5"])
    assert config.autoscaling.max_together == 8
    assert config.autoscaling.bounds(Role.DECODE).max_workers == 5
    assert load_config(assignments=[ON, "autoscaling.max_workers=6"]).autoscaling.max_together == 6


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["autoscaling.decode.min_workers=5"], "autoscaling.decode.min_workers=5 is above decode.max_workers=4"),
        (["autoscaling.prefill.min_workers=0"], "autoscaling.prefill.min_workers must be above 0"),
        (["autoscaling.max_workers=1"], "autoscaling.max_workers=1 is below the two pools' min_workers, 2 together"),
        (["autoscaling.attainment=1.0"], "autoscaling.attainment is a share, below 1"),
        (["autoscaling.tolerance=1.5"], "autoscaling.tolerance is a share, below 1"),
        (["autoscaling.decode_use=1.1"], "autoscaling.decode_use is a share, at most 1"),
        (["autoscaling.window_s=12"], "autoscaling.window_s=12 must be at least three times autoscaling.period_s=5"),
        (["autoscaling.shrink_window_s=30"], "autoscaling.window_s=60 is above autoscaling.shrink_window_s=30"),
        (["autoscaling.role_window_s=4"], "autoscaling.period_s=5 is above autoscaling.role_window_s=4"),
        (["autoscaling.backoff_s=1000"], "autoscaling.backoff_s=1000 is above autoscaling.max_backoff_s=900"),
        (["autoscaling.queue_target_s=3"], "autoscaling.queue_target_s=3 is above autoscaling.ttft_target_s=2"),
        (["autoscaling.min=3"], "unknown config key autoscaling.min"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(assignments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(assignments=[ON, *assignments])
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"assignments": (ON, "transfer.plane=local")}, "leave out transfer.plane=local"),
        ({"assignments": (ON,), "colocate": 1}, "leave out --colocate"),
        ({"assignments": (ON,), "decode": 5}, "--decode 5 is outside autoscaling.decode.min_workers=1"),
        ({"assignments": (ON, "autoscaling.max_workers=2"), "decode": 2}, "autoscaling.max_workers=2 together"),
    ],
)
def test_a_start_that_does_not_fit_it_is_refused_before_anything_starts(
    changes: dict[str, object], words: str, tmp_path: Path
) -> None:
    options = ServeOptions(port=0, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        prepare(options)
    assert words in str(refused.value)

"""Which plane `auto` is, and which planes are refused for want of a way to the pools."""

from __future__ import annotations

import pytest

from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.config.plane_choice import PlaneOfOneHost, check_hosts, why, with_plane
from twinpool.contracts.errors import ConfigError


@pytest.mark.parametrize(
    ("device", "one_host", "plane"),
    [("cpu", True, "shm"), ("cpu", False, "zmq"), ("cuda", True, "cuda_ipc"), ("cuda:1", False, "staged")],
)
def test_auto_goes_by_where_pools_lie_and_by_hosts(device: str, one_host: bool, plane: str) -> None:
    chosen = with_plane(config_from_dict({"engine": {"device": device}}), one_host)
    assert chosen.transfer.plane == plane
    assert why(chosen) == f"{plane}, for pools {'in host memory' if device == 'cpu' else 'on GPUs'}"


@pytest.mark.parametrize("plane", ["local", "shm", "zmq", "nixl", "cuda_ipc", "staged"])
def test_a_plane_that_is_asked_for_is_taken_or_refused(plane: str) -> None:
    for device, reaches in (("cpu", plane != "cuda_ipc"), ("cuda", plane in {"cuda_ipc", "staged", "nixl", "local"})):
        config = config_from_dict({"engine": {"device": device}, "transfer": {"plane": plane}})
        if reaches:
            assert with_plane(config, True) == config
        else:
            with pytest.raises(ConfigError, match=rf"transfer\.plane={plane} .*engine\.device={device}"):
                with_plane(config, True)


def test_gpus_that_do_not_reach_each_other_are_no_case_for_cuda_ipc() -> None:
    apart = "cuda:0 doesn't reach the memory of cuda:1"
    on_gpus = config_from_dict({"engine": {"device": "cuda"}})
    assert with_plane(on_gpus, True, apart).transfer.plane == "staged"
    assert with_plane(config_from_dict({"engine": {"device": "cpu"}}), True).transfer.plane == "shm"
    asked = config_from_dict({"engine": {"device": "cuda"}, "transfer": {"plane": "cuda_ipc"}})
    with pytest.raises(ConfigError, match=rf"cuda_ipc: {apart}; use transfer\.plane=staged"):
        with_plane(asked, True, apart)


@pytest.mark.parametrize("plane", ["auto", "local", "shm", "zmq", "nixl", "cuda_ipc", "staged"])
def test_a_plane_of_one_host_is_refused_for_several_with_one_that_goes_between_them(plane: str) -> None:
    config = config_from_dict({"transfer": {"plane": plane}})
    check_hosts(config, {"alpha"})
    if (other := {"shm": "zmq", "cuda_ipc": "staged"}.get(plane)) is None:
        check_hosts(config, {"alpha", "beta"})
        return
    with pytest.raises(PlaneOfOneHost, match=rf"={plane} .*on alpha, beta: use transfer\.plane={other} or auto"):
        check_hosts(config, {"beta", "alpha"})

"""The benches of the router: what they count, and one small run beside a router of another project's shape."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import uvloop

from bench.common.child_server import child, first_line, free_port
from bench.serving import router_speed


def test_the_router_alone_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    small = {
        "rounds": 1, "connections": 2, "requests": 20, "streams": 3, "tokens": 5, "token-ms": 5, "idle": 4,
        "idle-s": 0.1,
    }  # fmt: skip
    flags = [word for name, value in small.items() for word in (f"--{name}", str(value))]
    assert router_speed.main([*flags, "--json", str(file)]) == 0
    (found,) = json.loads(file.read_text())["routers"]
    assert found.pop("router") == "twinpool"
    assert set(found) == {"requests_per_s", "request_us", "one_ms", "added_ms", "token_us"}
    assert found["requests_per_s"] > 0 < found["added_ms"] < found["one_ms"], (
        "processor time is told in hundredths of a second"
    )


def test_a_stand_in_over_http_streams_as_many_tokens_as_are_asked_for() -> None:
    with child([*WORKER]) as process:
        worker = router_speed.RouterUnderTest("stand-in", process.pid, int(first_line(process)), "m")

        async def asked(**body: Any) -> list[router_speed.Connection]:
            return await router_speed.ask(worker, {"prompt": "x", **body}, 2, 3)

        streams = uvloop.run(asked(max_tokens=7, stream=True))
        assert [connection.tokens for connection in streams] == [21, 21]
        whole = uvloop.run(asked(max_tokens=1))
        assert [len(connection.took_s) for connection in whole] == [3, 3]
    refused = router_speed.RouterUnderTest("nobody", 0, free_port(), "m")
    with pytest.raises(OSError, match=r"refused|Connect"):
        uvloop.run(router_speed.ask(refused, {"prompt": "x"}, 1, 1))


WORKER = (sys.executable, "-m", "tests.support.stand_in_http", "--token-ms", "1")

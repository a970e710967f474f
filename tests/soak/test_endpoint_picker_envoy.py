"""The endpoint picker behind a real Envoy, as docs/endpoint-picker.md sets it up, in front of real routers."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.router.fake_worker import FakeCluster, expected
from tests.router.http_server import Server, router_config, serving
from tests.soak.proxies import START_S, envoy_binary
from tests.support.free_ports import free_port
from tests.support.served_cluster import COMMAND, ROOT, environment, until
from twinpool.contracts.sampling_params import SamplingParams

pytestmark = [pytest.mark.soak, pytest.mark.slow, pytest.mark.timeout(600)]
TOKENS, DUPLEX = 6, "FULL_DUPLEX_STREAMED"


@contextmanager
def running(command: list[str], folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process until the end of the block; what it says is in a file of its name."""
    with (folder / name).open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment(folder))
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


class Setup:
    """Envoy, the picker and two routers, each of a cluster of its own."""

    def __init__(self, stack: ExitStack, folder: Path, body_mode: str) -> None:
        self.routers = [
            stack.enter_context(serving(FakeCluster(1, 1), config=router_config(max_queue=4))) for _ in range(2)
        ]
        ports, picker, clients = [router.port for router in self.routers], free_port(), free_port()
        (text,) = re.findall(r"^```yaml\n(static_resources.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        changes = {
            "address: 10.0.0.1, port_value: 8000": f"address: 127.0.0.1, port_value: {ports[0]}",
            "address: 10.0.0.2, port_value: 8000": f"address: 127.0.0.1, port_value: {ports[1]}",
            "address: 10.0.0.3, port_value: 9002": f"address: 127.0.0.1, port_value: {picker}",
            "address: 0.0.0.0, port_value: 80}": f"address: 127.0.0.1, port_value: {clients}}}",
        }
        if body_mode == DUPLEX:  # The only one in which trailers have to be sent.
            modes = f"request_body_mode: {DUPLEX}, request_trailer_mode: SEND,"
            changes["processing_mode:\n"] = f"processing_mode: {{{modes} request_header_mode: SEND}}\n"
            for line in re.findall(r"^ {24}(?:request|response)_\w+_mode: \w+\n", text, re.MULTILINE):
                changes[line] = ""
        for old, new in changes.items():
            assert text.count(old) == 1, f"the page doesn't say {old!r}"
            text = text.replace(old, new)
        (folder / "envoy.yaml").write_text(text)
        endpoints = [word for port in ports for word in ("--endpoint", f"127.0.0.1:{port}")]
        words = ["endpoint-picker", *endpoints, "--host", "127.0.0.1", "--port", str(picker), "--preview-timeout", "30"]
        self.picker = stack.enter_context(running([*COMMAND, *words], folder, "picker"))
        envoy = [str(envoy_binary()), "-c", str(folder / "envoy.yaml"), "--disable-hot-restart", "--concurrency", "2"]
        stack.enter_context(running(envoy, folder, "envoy"))
        self.client = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{clients}", timeout=60, trust_env=False)
        )
        until(lambda: "picker serves" in (folder / "picker").read_text(), "the picker to serve", 2 * START_S)

        def up() -> bool:
            try:
                return self.client.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        until(up, f"Envoy to serve: {(folder / 'envoy').read_text()[-2000:]}", START_S)

    def ask(self, prompt: list[int], stream: bool = False) -> tuple[int, list[int]]:
        """Which router has answered, and the tokens."""
        before = [router.service.core.counts.submitted for router in self.routers]
        body = {"prompt": prompt, "max_tokens": TOKENS, "seed": 1, "ignore_eos": True, "return_token_ids": True}
        response = self.client.post("/v1/completions", json={**body, "stream": stream})
        assert response.status_code == 200, response.text
        if stream:
            events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
            tokens = [t for event in events for c in json.loads(event)["choices"] for t in c["token_ids"]]
        else:
            tokens = response.json()["choices"][0]["token_ids"]
        after = [router.service.core.counts.submitted for router in self.routers]
        (which,) = [n for n in range(2) if after[n] > before[n]]
        return which, tokens


PAGE = ROOT / "docs" / "endpoint-picker.md"


@pytest.mark.parametrize("body_mode", ["BUFFERED", DUPLEX])
def test_envoy_sends_requests_where_their_prefix_is_and_answers_for_the_picker(body_mode: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        setup = Setup(stack, tmp_path, body_mode)
        prompts = [[seed * 7 + n for n in range(96)] for seed in range(1, 9)]
        homes = {}
        for number, prompt in enumerate(prompts):
            home: Server = setup.routers[number % 2]
            home.complete(prompt=prompt, max_tokens=2)
            homes[number] = number % 2
        for turn in range(3):
            for number, prompt in enumerate(prompts):
                which, tokens = setup.ask([*prompt, turn], stream=turn == 1)
                assert which == homes[number], f"the prefix is held by the other ({turn}, {number})"
                assert tokens == expected([*prompt, turn], SamplingParams(TOKENS, seed=1))
        large = [5 + n % 200 for n in range(1500)]
        assert setup.ask(large)[1] == expected(large, SamplingParams(TOKENS, seed=1)), "a body of several pieces"
        assert setup.client.get("/v1/models").json()["data"][0]["id"] == "demo"
        wrong = setup.client.post("/v1/completions", json={"prompt": [5], "n": 0})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "n")
        for router in setup.routers:
            router.call(lambda router=router: setattr(router.service, "draining", True))  # type: ignore[misc]
        refused = setup.client.post("/v1/completions", json={"prompt": [5]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert refused.headers["retry-after"] == "5"
        assert refused.headers["content-type"] == "application/json"
        for router in setup.routers:
            router.call(lambda router=router: setattr(router.service, "draining", False))  # type: ignore[misc]
        setup.picker.kill()
        setup.picker.wait(60)
        # Open: as if there were no picker. In full duplex a request whose body was begun to be sent ends with 500.
        for prompt in prompts[:4] if body_mode != DUPLEX else ():
            assert setup.ask(prompt)[1] == expected(prompt, SamplingParams(TOKENS, seed=1))
        for router in setup.routers:
            router.at_rest()

"""Images that are fetched by their URLs: from whom, from no private network, within bounds, and nobody waits for
another who names a slow host."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpcore
import pytest

from tests.support.certificates import TestAuthority
from tests.support.seeing_models import asks, data_url, pattern, png, write_mistral3
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import ConfigError, RequestError
from twinpool.contracts.image_urls import RefusedUrl, UrlRules
from twinpool.router.openai.api_errors import BufferFull, ClientGone
from twinpool.router.text.pictures import WantedImage
from twinpool.router.text.tokenizer import read_model_tokenizer
from twinpool.router.tokenizer_pool import image_fetcher
from twinpool.router.tokenizer_pool.image_fetcher import AT_ONCE, AT_ONCE_OF_ONE, AT_ONCE_OF_REQUEST, ImageFetcher
from twinpool.router.tokenizer_pool.prepare_request import BodyReader, PreparedRequest
from twinpool.router.tokenizer_pool.tokenizer_pool import TokenizerPool
from twinpool.router.tokenizer_pool.tokenizer_process import FrameKind, setup_frame

PUBLIC, SILENT, PRIVATE = "93.184.216.34", "93.184.216.35", "10.0.0.7"
PNG = png(pattern(20, 30))
Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
WAIT_S = 60.0


def answer(body: bytes, status: str = "200 OK", **headers: str) -> Answer:
    """Answer every path so; with a length unless one is given."""
    told = {"Content-Length": str(len(body))} | {name.replace("_", "-"): value for name, value in headers.items()}

    async def send(path: str, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in told.items()), "", ""]
        writer.write("\r\n".join(lines).encode() + body)

    return send


class Hosts(httpcore.AsyncNetworkBackend):
    """Hosts by name: their addresses, one list for each time that they are asked for, and a server behind all public
    ones. Whatever else is connected to is a mistake."""

    def __init__(self) -> None:
        self.names: dict[str, list[list[str]]] = {}
        self.answers: dict[str, Answer] = {}
        """By path."""
        self.asked: list[tuple[str, str]] = []
        """Header `Host` and path of each request."""
        self.connected: list[str] = []
        self.times: list[float | None] = []
        """Seconds that each connection has."""
        self.streams: list[httpcore.AsyncNetworkStream] = []
        """What was opened and isn't closed."""
        self._port = 0

    def look_up(self, host: str, port: int) -> Iterable[str]:
        found = self.names.get(host)
        if found is None:
            raise OSError("no such name")
        return found.pop(0) if len(found) > 1 else found[0]

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *rest: Any, **more: Any
    ) -> httpcore.AsyncNetworkStream:
        self.connected.append(host)
        self.times.append(timeout)
        if host == SILENT:
            raise httpcore.ConnectTimeout
        assert host == PUBLIC, f"{host} was connected to"
        stream = await httpcore.AnyIOBackend().connect_tcp("127.0.0.1", self._port)
        closes = stream.aclose

        async def close() -> None:
            self.streams = [one for one in self.streams if one is not stream]
            await closes()

        stream.aclose = close  # type: ignore[method-assign]
        self.streams.append(stream)
        return stream

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            path = head[0].split()[1]
            host = next(line.partition(": ")[2] for line in head if line.lower().startswith("host:"))
            self.asked.append((host, path))
            await self.answers[path](path, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def serving(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self._port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()


@pytest.fixture
def hosts() -> Hosts:
    found = Hosts()
    found.names = {"images.example": [[PUBLIC]], "other.example": [[PUBLIC]], "inside.example": [[PRIVATE]]}
    found.answers = {"/one.png": answer(PNG)}
    return found


def fetcher(hosts: Hosts, **config: Any) -> ImageFetcher:
    return ImageFetcher(
        RouterConfig(image_urls="*", **config), look_up=hosts.look_up, network=hosts, tls=ssl.create_default_context()
    )


async def fetch(found: ImageFetcher, *urls: str, tenant: str = "") -> list[bytes]:
    wanted = [WantedImage(url, f"messages[0].content[{number}]") for number, url in enumerate(urls)]
    async with asyncio.timeout(WAIT_S), found.fetched(wanted, tenant) as images:
        assert found.held >= sum(map(len, images.values()))
        return [images[url] for url in urls]


@pytest.mark.asyncio
async def test_images_are_fetched_by_name_at_the_address_that_was_checked(hosts: Hosts) -> None:
    found = fetcher(hosts)
    async with hosts.serving():
        urls = ("http://images.example/one.png?size=1", "http://Images.Example.:80/one.png")
        hosts.answers["/one.png?size=1"] = answer(b"other")
        assert await fetch(found, *urls) == [b"other", PNG]
        assert not hosts.streams, "a connection is closed once its image is there"
    assert sorted(hosts.asked) == [("images.example", "/one.png"), ("images.example", "/one.png?size=1")]
    assert hosts.connected == [PUBLIC] * 2
    assert found.held == 0
    assert not found.busy


@pytest.mark.asyncio
async def test_a_name_that_has_another_address_by_now_is_connected_to_at_the_one_that_was_checked(hosts: Hosts) -> None:
    hosts.names["images.example"] = [[PUBLIC], [PRIVATE], ["127.0.0.1"]]
    async with hosts.serving():
        assert await fetch(fetcher(hosts), "http://images.example/one.png") == [PNG]
        with pytest.raises(RequestError, match="no public address"):
            await fetch(fetcher(hosts), "http://images.example/one.png")
    assert hosts.connected == [PUBLIC]


@pytest.mark.asyncio
async def test_a_host_is_tried_at_its_next_address_and_soon_where_one_does_not_answer(hosts: Hosts) -> None:
    hosts.names["images.example"] = [[SILENT, PUBLIC]]
    async with hosts.serving():
        assert await fetch(fetcher(hosts), "http://images.example/one.png") == [PNG]
    assert hosts.connected == [SILENT, PUBLIC]
    assert hosts.times == [2.0, None], "the last has the time that is left"


@pytest.mark.asyncio
async def test_redirects_are_checked_as_urls_are_and_counted(hosts: Hosts) -> None:
    leads = {
        "/in": "http://inside.example/one.png", "/file": "file:///etc/passwd", "/loop": "/loop", "/here": "one.png",
        "/host": "http://10.0.0.7/one.png", "/port": "http://images.example:22/", "/far": "/on", "/on": "/here",
        "/broken": "http://[",
    }  # fmt: skip
    hosts.answers |= {path: answer(b"", "302 Found", Location=to) for path, to in leads.items()}
    wrong = {"/in": "no public address", "/file": "http or https", "/loop": "leads on more than 3 times",
             "/host": "no public address", "/port": "from that host and port", "/broken": "no URL"}  # fmt: skip
    async with hosts.serving():
        for path in ("/here", "/far"):
            assert await fetch(fetcher(hosts), f"http://images.example{path}") == [PNG]
        for path, words in wrong.items():
            with pytest.raises(RequestError, match=words) as found:
                await fetch(fetcher(hosts), f"http://images.example{path}")
            assert "inside" not in str(found.value)
            assert PRIVATE not in str(found.value)
            assert found.value.param == "messages"
    assert {*hosts.connected} == {PUBLIC}


@pytest.mark.asyncio
async def test_a_name_of_a_private_network_and_one_that_is_not_there_are_told_alike(hosts: Hosts) -> None:
    hosts.names["half.example"] = [[PUBLIC, PRIVATE]]
    told = set[str]()
    for name in ("inside.example", "nowhere.example", "half.example"):
        with pytest.raises(RequestError) as found:
            await fetch(fetcher(hosts), f"http://{name}/one.png")
        told.add(str(found.value))
    assert told == {"messages[0].content[0]: its host has no public address"}
    assert not hosts.connected


async def endless(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"1000\r\n" + bytes(0x1000) + b"\r\n")
        await writer.drain()


HOSTILE: dict[str, tuple[Answer, str]] = {
    "endless": (endless, "more than the 65536 bytes"),
    "said to be large": (answer(b"", Content_Length="99999999"), "more than the 65536 bytes"),
    "a gzip bomb": (answer(gzip.compress(bytes(1 << 20)), Content_Encoding="gzip"), "content encoding"),
    "cut": (answer(PNG[:50], Content_Length=str(len(PNG))), "cut, or is no HTTP"),
    "no HTTP": (answer(b"", "hello"), "cut, or is no HTTP"),
    "an error": (answer(b"the secret of the host", "500 Error"), "status 500"),
    "nothing new": (answer(b"", "304 Not Modified"), "status 304"),
    "heads without end": (answer(b"", "200 OK", **{f"X_{n}": "x" * 4000 for n in range(50)}), "cut, or is no HTTP"),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", HOSTILE)
async def test_what_a_hostile_host_answers_is_refused_in_words(hosts: Hosts, name: str) -> None:
    hosts.answers["/x"], words = HOSTILE[name]
    found = fetcher(hosts, image_url_bytes=1 << 16)
    async with hosts.serving():
        with pytest.raises(RequestError, match=words) as told:
            await fetch(found, "http://images.example/one.png", *["http://images.example/x"] * 2)
        assert str(told.value).startswith("messages[0].content[1]: ")
        assert "secret" not in str(told.value)
        assert (found.held, found.busy, hosts.streams) == (0, {}, [])
        assert await fetch(found, "http://images.example/one.png") == [PNG]


@pytest.mark.asyncio
async def test_a_host_that_drips_is_given_up_and_holds_up_no_other(hosts: Hosts) -> None:
    """Its requests fill its own places, and those of its tenant; the time is over when it says so."""
    begun, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def drips(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\na")
        await writer.drain()
        begun.release()
        await go_on.wait()

    hosts.answers["/slow"] = drips
    found = fetcher(hosts, image_url_timeout_s=WAIT_S)
    async with hosts.serving():
        slow = [
            asyncio.ensure_future(fetch(found, "http://images.example/slow", tenant="slow"))
            for _ in range(AT_ONCE_OF_ONE + 2)
        ]
        for _ in range(AT_ONCE_OF_ONE):
            await begun.acquire()
        assert await fetch(found, "http://other.example/one.png", tenant="quick") == [PNG]
        assert found.busy["tenant slow"] == AT_ONCE_OF_ONE
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert (found.held, found.busy) == (0, {})
        late = fetcher(hosts, image_url_timeout_s=0.05)
        with pytest.raises(RequestError, match=r"not there within 0\.05 s"):
            await fetch(late, "http://other.example/slow")
        assert counted(late) == {"late": 1}
        go_on.set()


@pytest.mark.asyncio
async def test_a_place_stays_taken_while_a_thread_looks_its_name_up(hosts: Hosts) -> None:
    go_on = threading.Event()

    def stuck(host: str, port: int) -> Iterable[str]:
        go_on.wait(WAIT_S)
        return [PUBLIC]

    found = ImageFetcher(RouterConfig(image_urls="*", image_url_timeout_s=0.05), look_up=stuck, network=hosts)
    with pytest.raises(RequestError, match="not there within"):
        await fetch(found, "http://images.example/one.png")
    assert found.busy["all"] == 1
    go_on.set()
    async with asyncio.timeout(WAIT_S):
        while found.busy:
            await asyncio.sleep(0)
    found.close()


@pytest.mark.asyncio
async def test_a_request_has_few_places_and_whoever_has_one_goes_on(hosts: Hosts) -> None:
    """Of two that wait, one for a host and one for its own tenant, the second goes on when its tenant's is given up."""
    begun, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def stuck(path: str, writer: asyncio.StreamWriter) -> None:
        begun.release()
        await go_on.wait()

    slow = [f"/slow{number}" for number in range(2 * AT_ONCE_OF_REQUEST)]
    hosts.answers |= dict.fromkeys(slow, stuck)
    found = fetcher(hosts, image_url_timeout_s=WAIT_S)

    def ask(host: str, tenant: str) -> asyncio.Future[list[bytes]]:
        return asyncio.ensure_future(fetch(found, *[f"http://{host}{path}" for path in slow], tenant=tenant))

    async with hosts.serving():
        full = [ask("images.example", "one"), ask("other.example", "one"), ask("images.example", "two")]
        for _ in range(3 * AT_ONCE_OF_REQUEST):
            await begun.acquire()
        assert found.busy["all"] == 3 * AT_ONCE_OF_REQUEST
        hosts.names["third.example"] = [[PUBLIC]]
        of_host = asyncio.ensure_future(fetch(found, "http://images.example/one.png", tenant="three"))
        of_tenant = asyncio.ensure_future(fetch(found, "http://third.example/one.png", tenant="one"))
        await asyncio.sleep(0)
        full[1].cancel()
        assert await of_tenant == [PNG]
        assert not of_host.done()
        for each in full:
            each.cancel()
        assert await of_host == [PNG]
        await asyncio.gather(*full, return_exceptions=True)
        go_on.set()
    assert (found.held, found.busy) == (0, {})


@pytest.mark.asyncio
async def test_where_no_place_is_free_in_time_the_request_may_come_again(hosts: Hosts) -> None:
    found = fetcher(hosts, image_url_timeout_s=0.01)
    found.busy["all"] = AT_ONCE
    with pytest.raises(BufferFull, match="too many images"):
        await fetch(found, "http://images.example/one.png")
    assert found.busy == {"all": AT_ONCE}


@pytest.mark.asyncio
async def test_images_are_counted_by_what_became_of_them_with_their_bytes_and_times(hosts: Hosts) -> None:
    found, late = fetcher(hosts), fetcher(hosts, image_url_timeout_s=0.01)
    hosts.answers["/gone.png"] = answer(b"", "404 Not Found")
    async with hosts.serving():
        await fetch(found, "http://images.example/one.png", "http://other.example/one.png")
        for url in ("http://images.example/gone.png", "http://inside.example/one.png", "ftp://images.example/one.png"):
            with pytest.raises(RequestError):
                await fetch(found, url)
        found.busy["all"] = late.busy["all"] = AT_ONCE
        waits = asyncio.ensure_future(fetch(found, "http://images.example/one.png"))
        for _ in range(10):
            await asyncio.sleep(0)  # Until it waits for a place.
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        with pytest.raises(BufferFull):
            await fetch(late, "http://images.example/one.png")
    assert counted(found) == {"fetched": 2, "refused": 3, "given_up": 1}
    assert counted(late) == {"full": 1}
    samples = {sample.name: sample.value for family in found.families() for sample in family.samples}
    assert samples["twinpool_image_fetched_bytes_total"] == 2 * len(PNG)
    assert samples["twinpool_image_fetch_seconds_count"] == 2
    assert samples["twinpool_image_fetches_running"] == AT_ONCE
    assert samples["twinpool_image_held_bytes"] == 0


def counted(found: ImageFetcher) -> dict[str, int]:
    return {outcome: count for outcome, count in found.outcomes.items() if count}


@pytest.mark.asyncio
async def test_what_is_held_has_a_bound(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosts.serving():
        monkeypatch.setattr(image_fetcher, "REQUEST_BYTES", len(PNG))
        found, one = fetcher(hosts, image_url_bytes=len(PNG)), [WantedImage("http://images.example/one.png", "")]
        async with found.fetched(one, ""), found.fetched(one, ""):
            assert found.held == 2 * len(PNG), "each has the bytes of a request"
        hosts.answers["/two.png"] = answer(PNG)
        with pytest.raises(RequestError, match="images of one request"):
            await fetch(fetcher(hosts), "http://images.example/one.png", "http://images.example/two.png")
        monkeypatch.setattr(image_fetcher, "HELD_BYTES", len(PNG) - 1)
        with pytest.raises(BufferFull):
            await fetch(fetcher(hosts), "http://images.example/one.png")


@pytest.mark.asyncio
async def test_a_certificate_must_be_the_hosts(hosts: Hosts, tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    files, ours = authority.node(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(files.cert, files.key)
    hosts.names["localhost"] = [[PUBLIC]]  # Of which the certificate is.
    hosts.answers["/down"] = answer(b"", "302 Found", Location="http://images.example/one.png")
    found = ImageFetcher(RouterConfig(image_urls="*"), look_up=hosts.look_up, network=hosts, tls=authority.trust())
    async with hosts.serving(ours):
        assert await fetch(found, "https://localhost/one.png") == [PNG]
        with pytest.raises(RequestError, match="no certificate of that name"):
            await fetch(found, "https://other.example/one.png")
        with pytest.raises(RequestError, match="from https to http"):
            await fetch(found, "https://localhost/down")


PLACES: dict[str, bool] = {
    "8.8.8.8": True, "2606:4700::1111": True, "64:ff9b::808:808": True, "::ffff:8.8.8.8": True,
    "127.0.0.1": False, "10.1.2.3": False, "192.168.0.1": False, "172.16.0.1": False, "169.254.169.254": False,
    "100.64.0.1": False, "0.0.0.0": False, "224.0.0.1": False, "240.0.0.1": False, "255.255.255.255": False,
    "192.0.2.1": False, "198.18.0.1": False, "192.88.99.1": False, "::1": False, "::": False, "fe80::1": False,
    "fe80::1%eth0": False, "fc00::1": False, "fd12::1": False, "fec0::1": False, "ff02::1": False,
    "::ffff:127.0.0.1": False, "::ffff:10.0.0.1": False, "::127.0.0.1": False, "64:ff9b::7f00:1": False,
    "64:ff9b::a00:1": False, "64:ff9b:1::1": False, "2002:7f00:1::": False, "2002:a00:1::1": False,
    "2002:808:808::": True, "2001:0:808:808::1": False, "2001:db8::1": False, "100::1": False, "nonsense": False,
}  # fmt: skip


@pytest.mark.parametrize("address", PLACES)
def test_only_public_addresses_are_connected_to(address: str) -> None:
    rules = UrlRules("*", "")
    if PLACES[address]:
        assert rules.check_addresses([address, address]) == [address]
    else:
        with pytest.raises(RefusedUrl, match="no public address"):
            rules.check_addresses([address])
    with pytest.raises(RefusedUrl):
        rules.check_addresses([address, "10.0.0.1"])


def test_networks_that_the_operator_names_are_connected_to() -> None:
    rules = UrlRules("images.lan", "10.1.0.0/16, fd00::/8")
    for address in ("10.1.2.3", "::ffff:10.1.2.3", "fd12::1", "8.8.8.8"):
        assert rules.check_addresses([address]) == [address]
    for address in ("10.2.0.1", "127.0.0.1", "fc00::1"):
        with pytest.raises(RefusedUrl):
            rules.check_addresses([address])


URLS: dict[str, str] = {
    "http://a.example/x y": "blanks", "http://a.example/\\x": "backslashes", "http://a.example/\r\nX: y": "blanks",
    "http://u:p@a.example/": "user's name", "ftp://a.example/": "http or https", "http:///x": "http or https",
    "http://a.example:99999/": "can't be read", "http://[::1/": "can't be read",
    "http://a.example:22/": "host and port", "http://b.example/": "host and port",
    "http://xa.example/": "host and port", "http://a.example.evil/": "host and port",
    "http://" + "a" * 70 + ".example/": "can't be read", "http://a.example/" + "x" * 5000: "4096 characters",
    "http://below.a.example/": "host and port", "http://c.example/": "host and port",
}  # fmt: skip


@pytest.mark.parametrize("url", URLS)
def test_urls_that_are_not_fetched_are_refused_in_words(url: str) -> None:
    with pytest.raises(RefusedUrl, match=URLS[url]):
        UrlRules("a.example, *.c.example, d.example:8080", "").check(url)


def test_urls_are_fetched_of_hosts_that_the_operator_names() -> None:
    rules = UrlRules("a.example, *.c.example, d.example:8080, bücher.example", "")
    assert rules.check("HTTPS://A.Example./p%20q?x=ü#y").target == "/p%20q?x=%C3%BC"
    assert rules.check("https://x.y.c.example").named_host == "x.y.c.example"
    assert rules.check("http://d.example:8080/").named_host == "d.example:8080"
    assert rules.check("https://Bücher.example/").host == "xn--bcher-kva.example"
    assert UrlRules("*.Bücher.example.", "").check("https://xn--a.xn--bcher-kva.example/").host.startswith("xn--a.")
    with pytest.raises(RefusedUrl):
        rules.check("http://d.example/")
    assert not UrlRules("", "")


@pytest.mark.parametrize("value", ["http://a", "a/b", "*a", "a:", "a:99999", ":80", "[::1]"])
def test_settings_that_name_no_host_are_refused_by_the_key(value: str) -> None:
    with pytest.raises(ConfigError, match=r"router\.image_urls"):
        config_from_dict({"router": {"image_urls": value}})
    with pytest.raises(ConfigError, match=r"router\.image_url_networks"):
        config_from_dict({"router": {"image_url_networks": "10.0.0.1/8"}})


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_body_with_urls_makes_the_prompt_of_the_same_chat_with_data(hosts: Hosts, tmp_path: Path) -> None:
    """Through a reader process, by all three APIs; what was fetched is decoded as what came in a body."""
    folder = write_mistral3(tmp_path / "seer")
    spec, tokenizer = read_model_spec(folder), read_model_tokenizer(folder, 100_000)
    config = RouterConfig(image_urls="images.example")
    inside = BodyReader(spec, tokenizer, config)
    hosts.answers["/x.svg"] = answer(b"<svg xmlns='http://www.w3.org/2000/svg'/>")
    url = "http://images.example/one.png"
    chat: list[dict[str, Any]] = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
    block = [chat[0], {"type": "image", "source": {"type": "url", "url": url}}]
    said = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": url}]
    bodies: dict[FrameKind, Any] = {
        FrameKind.CHAT: {"messages": [{"role": "user", "content": chat}]},
        FrameKind.MESSAGES: {"messages": [{"role": "user", "content": block}], "max_tokens": 3},
        FrameKind.RESPONSES: {"input": [{"role": "user", "content": said}]},
    }
    wanted = inside.chat(json.dumps({"messages": [asks("see", PNG)]}).encode()).prompts
    images = fetcher(hosts, image_url_timeout_s=WAIT_S)
    readers = TokenizerPool(setup_frame(spec, config, 100_000), 1, WAIT_S, images)
    begun = asyncio.Event()

    async def stuck(path: str, writer: asyncio.StreamWriter) -> None:
        begun.set()
        await asyncio.get_running_loop().create_future()

    hosts.answers["/stuck"] = stuck

    async def ask(kind: FrameKind, body: Any) -> PreparedRequest:
        return await readers.prepare(inside, kind, json.dumps(body).encode(), "")

    try:
        async with hosts.serving():
            for kind, body in bodies.items():
                assert (await ask(kind, body)).prompts == wanted
            counted = await readers.text(
                inside, FrameKind.COUNT_TOKENS, json.dumps(bodies[FrameKind.MESSAGES]).encode(), ""
            )
            assert json.loads(counted.body) == {"input_tokens": len(wanted[0].tokens)}
            bodies[FrameKind.RESPONSES]["input"][0]["content"][1]["image_url"] = "http://images.example/x.svg"
            with pytest.raises(RequestError, match=r"input\[0\]\.content\[1\]: SVG is not read here"):
                await ask(FrameKind.RESPONSES, bodies[FrameKind.RESPONSES])
            bodies[FrameKind.RESPONSES]["input"][0]["content"][1]["image_url"] = "http://b.example/x"
            with pytest.raises(RequestError, match=r"input\[0\]\.content\[1\]: .* no images from that host"):
                await ask(FrameKind.RESPONSES, bodies[FrameKind.RESPONSES])
            chat[1]["image_url"] = {"url": data_url(PNG)}
            assert (await ask(FrameKind.CHAT, bodies[FrameKind.CHAT])).prompts == wanted, "nothing is left of before"
            chat[1]["image_url"] = {"url": "http://images.example/stuck"}
            body, gone = json.dumps(bodies[FrameKind.CHAT]).encode(), list[Callable[[], object]]()
            left = asyncio.ensure_future(readers.prepare(inside, FrameKind.CHAT, body, "", gone.append))
            async with asyncio.timeout(WAIT_S):
                await begun.wait()
                gone[0]()
                with pytest.raises(ClientGone):
                    await left
            assert (images.held, images.busy) == (0, {})
    finally:
        await readers.close()

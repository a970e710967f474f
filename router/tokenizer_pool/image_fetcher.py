"""The image fetcher of a router: it gets images by their URLs, where the operator allows that.

All of it runs on the router's event loop, and nothing of it blocks: names are looked up on threads of its own. A URL is
connected to at an address that was checked (`contracts.image_urls`), and the name isn't looked up again for the
connection; the certificate must be the URL's host's. A redirect is a URL like any other, and there are few of them.

Everything has a bound: the bytes of an image, of a request's and of all that are held; the time of an image from the
first look-up to the last byte, however slowly it comes; how many are fetched at once in all, for a request, for a
tenant and from a host. So who names a slow host waits for it, and takes the places of no other tenant.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from urllib.parse import urljoin

import httpcore
import httpx
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import RequestError
from twinpool.contracts.image_urls import NO_ADDRESS, ImageUrl, RefusedUrl, UrlRules
from twinpool.router.metrics.request_tally import HistogramTally
from twinpool.router.openai.api_errors import BufferFull
from twinpool.router.text.pictures import WantedImage

AT_ONCE, AT_ONCE_OF_ONE, AT_ONCE_OF_REQUEST = 32, 8, 4
"""Images that are fetched at once: in all, for a tenant or from a host, and for a request."""
HELD_BYTES, REQUEST_BYTES = 512 * 1024**2, 64 * 1024**2
"""Bytes of fetched images that are held until a reader has them: of all requests, and of one."""
_REDIRECTS = 3
_ADDRESSES = 4
"""Addresses of a host that are tried."""
_TRY_S = 2.0
"""Seconds for a connection to one of several addresses, but the last."""
_MOVED = (301, 302, 303, 307, 308)
_HEADERS = ((b"Accept", b"image/*"), (b"Accept-Encoding", b"identity"), (b"User-Agent", b"twinpool"))

OUTCOMES = ("fetched", "refused", "late", "full", "given_up")
"""What became of an image: it is there; its URL or its host's answer is refused; it wasn't there in time; there was no
place for it, or no room; its client is gone, or another image of the same request can't be had."""
BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LookUp = Callable[[str, int], Iterable[str]]


class _Booked:
    """Bytes of one request's images that are held."""

    def __init__(self) -> None:
        self.nbytes = 0


class _Late(RefusedUrl):
    """Raised where an image isn't there in time."""


class ImageFetcher:
    """See the module's prose; for one event loop. `look_up`: the addresses of a name, which may block; `network`: what
    connects; `tls`: what certificates are checked by."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        look_up: LookUp | None = None,
        network: httpcore.AsyncNetworkBackend | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._rules = UrlRules(config.image_urls, config.image_url_networks)
        self._most, self._timeout_s = config.image_url_bytes, config.image_url_timeout_s
        self._look_up, self._network, self._tls = look_up or _addresses, network, tls
        self._threads: ThreadPoolExecutor | None = None
        self.busy = Counter[str]()
        """Places that are taken: in all, by tenant, by host."""
        self._waiting: list[asyncio.Future[None]] = []
        self.held = 0
        """Bytes of fetched images that no reader has yet."""
        self.outcomes, self.nbytes, self.seconds = dict.fromkeys(OUTCOMES, 0), 0, HistogramTally(BUCKETS_S)
        """Images since the start: by what became of them, the bytes that came of all, and the seconds that those took
        that are there, the wait for a place included."""

    def close(self) -> None:
        """Give up look-ups that haven't begun. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def families(self) -> Iterator[Metric]:
        """Yield the families of a scrape."""
        text = "Images that were asked for by URLs, by what became of them"
        images = CounterMetricFamily("twinpool_image_fetches", text, labels=["outcome"])
        for outcome, count in self.outcomes.items():
            images.add_metric([outcome], count)
        yield images
        text = "Bytes that came of images by URLs, of those too that were given up"
        yield CounterMetricFamily("twinpool_image_fetched_bytes", text, value=self.nbytes)
        yield self.seconds.family("twinpool_image_fetch_seconds", "Time of an image that was fetched, with its wait")
        text = "Images that are being fetched"
        yield GaugeMetricFamily("twinpool_image_fetches_running", text, value=self.busy["all"])
        text = "Bytes of fetched images that no reader has yet"
        yield GaugeMetricFamily("twinpool_image_held_bytes", text, value=self.held)

    @asynccontextmanager
    async def fetched(self, wanted: Sequence[WantedImage], tenant: str) -> AsyncIterator[dict[str, bytes]]:
        """Fetch the images of a request of `tenant`'s; by URL, they count as held inside the context. Raises
        `RequestError` naming the place of one that can't be had, and `BufferFull` where there is no room for more."""
        booked, turns = _Booked(), asyncio.Semaphore(AT_ONCE_OF_REQUEST)
        where = {image.url: image.where for image in reversed(wanted)}
        try:
            tasks = {url: asyncio.ensure_future(self._one(url, tenant, booked, turns)) for url in where}
            try:
                await asyncio.gather(*tasks.values())
            except RefusedUrl as error:
                failed = next(url for url, task in tasks.items() if task.done() and _failed_by(task, error))
                place = where[failed]
                raise RequestError(f"{place}: {error}", param=place.partition("[")[0]) from None
            finally:
                for task in tasks.values():
                    task.cancel()
                await asyncio.gather(*tasks.values(), return_exceptions=True)
            yield {url: task.result() for url, task in tasks.items()}
        finally:
            self.held -= booked.nbytes

    async def _one(self, text: str, tenant: str, booked: _Booked, turns: asyncio.Semaphore) -> bytes:
        """An image, which is counted."""
        now = asyncio.get_running_loop().time
        outcome, began = "given_up", now()
        try:
            found = await self._in_turn(text, tenant, booked, turns)
            outcome = "fetched"
            self.seconds.observe(now() - began)
        except RefusedUrl as error:
            outcome = "late" if isinstance(error, _Late) else "refused"
            raise
        except BufferFull:
            outcome = "full"
            raise
        finally:
            self.outcomes[outcome] += 1
        return found

    async def _in_turn(self, text: str, tenant: str, booked: _Booked, turns: asyncio.Semaphore) -> bytes:
        url = self._rules.check(text)
        keys = ["all", f"host {url.host}", *([f"tenant {tenant}"] if tenant else [])]
        async with turns:
            await self._take(keys)
            lookups: list[Future[list[str]]] = []
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._followed(url, text, booked, lookups)
            except TimeoutError:
                raise _Late(f"the image was not there within {self._timeout_s:g} s") from None
            finally:
                self._give_back(keys, lookups)

    async def _take(self, keys: Sequence[str]) -> None:
        """Wait for a place. Raises `BufferFull` where none is free in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while any(self.busy[key] >= _most(key) for key in keys):
                    self._waiting.append(asyncio.get_running_loop().create_future())
                    await self._waiting[-1]
        except TimeoutError:
            raise BufferFull("too many images are being fetched; try again later") from None
        self.busy.update(keys)

    def _give_back(self, keys: Sequence[str], lookups: Sequence[Future[list[str]]]) -> None:
        """Free a place, as soon as no thread looks a name up for it any more."""
        loop = asyncio.get_running_loop()

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # The loop is closed: nobody waits.
                loop.call_soon_threadsafe(self._free, keys)

        late = next((lookup for lookup in lookups if not lookup.done()), None)
        if late is None:
            self._free(keys)
        else:
            late.add_done_callback(ended)

    def _free(self, keys: Sequence[str]) -> None:
        self.busy.subtract(keys)
        self.busy += Counter()  # Without those that are 0.
        woken, self._waiting = self._waiting, []
        for future in woken:
            if not future.done():
                future.set_result(None)

    async def _followed(self, url: ImageUrl, text: str, booked: _Booked, lookups: list[Future[list[str]]]) -> bytes:
        """The bytes at a URL, or at the one that it leads to."""
        for _ in range(1 + _REDIRECTS):
            found = await self._get(url, await self._resolved(url, lookups), booked)
            if isinstance(found, bytes):
                return found
            try:
                text = urljoin(text, found)
            except ValueError:
                raise RefusedUrl("it leads to what is no URL") from None
            before, url = url, self._rules.check(text)
            if (before.scheme, url.scheme) == ("https", "http"):
                raise RefusedUrl("it leads from https to http")
        raise RefusedUrl(f"it leads on more than {_REDIRECTS} times")

    async def _resolved(self, url: ImageUrl, lookups: list[Future[list[str]]]) -> list[str]:
        """The addresses of a URL's host, all of which may be connected to."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="image-names")
        lookups.append(self._threads.submit(lambda: list(self._look_up(url.host, url.port))))
        try:
            found = await asyncio.wrap_future(lookups[-1])
        except (OSError, UnicodeError):
            raise RefusedUrl(NO_ADDRESS) from None
        return self._rules.check_addresses(found)[:_ADDRESSES]

    async def _get(self, url: ImageUrl, addresses: Sequence[str], booked: _Booked) -> bytes | str:
        """What a URL has, or where it leads."""
        if self._tls is None:
            self._tls = httpx.create_ssl_context()
        scheme, host = url.scheme.encode(), url.host.encode()
        connection = httpcore.AsyncHTTPConnection(
            httpcore.Origin(scheme, host, url.port),
            ssl_context=self._tls,
            network_backend=_CheckedNetwork(self._network or httpcore.AnyIOBackend(), addresses),
        )
        target = httpcore.URL(scheme=scheme, host=host, port=url.port, target=url.target.encode())
        request = httpcore.Request("GET", target, headers=[(b"Host", url.named_host.encode()), *_HEADERS])
        try:
            return await self._read(await connection.handle_async_request(request), booked)
        except (httpcore.ConnectError, OSError):
            raise RefusedUrl("its host can't be reached, or has no certificate of that name") from None
        except (httpcore.NetworkError, httpcore.ProtocolError):
            raise RefusedUrl("its host's answer is cut, or is no HTTP") from None
        finally:
            await connection.aclose()

    async def _read(self, response: httpcore.Response, booked: _Booked) -> bytes | str:
        headers = {name.lower(): value for name, value in response.headers}
        if response.status in _MOVED and b"location" in headers:
            return headers[b"location"].decode("latin-1")
        if response.status != 200:
            raise RefusedUrl(f"its host answered with status {response.status}")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RefusedUrl("its host answered with a content encoding, which was not asked for")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self._most:
            raise self._too_large()
        found = bytearray()
        async for part in response.aiter_stream():
            self.nbytes += len(part)
            self._book(len(part), booked)
            found += part
            if len(found) > self._most:
                raise self._too_large()
        return bytes(found)

    def _too_large(self) -> RefusedUrl:
        return RefusedUrl(f"the image has more than the {self._most} bytes that are fetched")

    def _book(self, nbytes: int, booked: _Booked) -> None:
        if self.held + nbytes > HELD_BYTES:
            raise BufferFull("fetched images fill their room; try again later", nbytes, self.held, HELD_BYTES)
        if booked.nbytes + nbytes > REQUEST_BYTES:
            raise RefusedUrl(f"the images of one request have more than {REQUEST_BYTES >> 20} MiB")
        self.held += nbytes
        booked.nbytes += nbytes


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to the addresses that were checked, whatever the host's name stands for by now."""

    def __init__(self, network: httpcore.AsyncNetworkBackend, addresses: Sequence[str]) -> None:
        self._network, self._addresses = network, addresses

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        *others, last = self._addresses
        for address in others:
            with suppress(httpcore.ConnectError, httpcore.ConnectTimeout, OSError):
                return await self._network.connect_tcp(address, port, _TRY_S, local_address, socket_options)
        return await self._network.connect_tcp(last, port, timeout, local_address, socket_options)


def _most(key: str) -> int:
    return AT_ONCE if key == "all" else AT_ONCE_OF_ONE


def _failed_by(task: asyncio.Future[bytes], error: Exception) -> bool:
    return not task.cancelled() and task.exception() is error


def _addresses(host: str, port: int) -> list[str]:
    """The addresses of a name. Raises `OSError`."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]

"""URLs of images: which of them may be fetched, and which addresses may be connected to for that.

A client names the URL, and this server's machine fetches it: without rules that is a way into every network that the
machine is in. So hosts are named (`router.image_urls`), and an address must be public whatever the host's name is,
unless the operator names its network (`router.image_url_networks`). IPv6 addresses that carry one of IPv4 are judged by
that one. What is told of a refusal is the same whether a name has no address or a private one: names of a private
network can't be guessed by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import quote, urlsplit

URL_CHARS = 4096
"""The longest URL that is fetched."""
NO_ADDRESS = "its host has no public address"
_PORTS = {"http": 80, "https": 443}
_NAT64 = IPv6Network("64:ff9b::/96")
_UNICAST = IPv6Network("2000::/3")
_RELAYS = IPv4Network("192.88.99.0/24")
_SAFE = "!#$%&'()*+,/:;=?@[]~"
"""What stands in a URL as it is; all else but letters, digits and -._ is escaped."""


class RefusedUrl(ValueError):
    """A URL that isn't fetched; the text says why."""


@dataclass(frozen=True, slots=True)
class ImageUrl:
    """A URL that may be fetched, in parts."""

    scheme: str
    host: str
    """A name in ASCII, in small letters, or an address."""
    port: int
    target: str
    """Path and query."""

    @property
    def named_host(self) -> str:
        """Host and port, as the header `Host` has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


class UrlRules:
    """Which URLs may be fetched. `hosts`: as `router.image_urls`; `networks`: as `router.image_url_networks`. Raises
    `ValueError` where one of them can't be read."""

    def __init__(self, hosts: str, networks: str) -> None:
        self._hosts = [_host_rule(part) for part in _parts(hosts)]
        self._networks = [ip_network(part) for part in _parts(networks)]

    def __bool__(self) -> bool:
        """Whether any may be."""
        return bool(self._hosts)

    def check(self, url: str) -> ImageUrl:
        """Take a URL apart. Raises `RefusedUrl`."""
        if len(url) > URL_CHARS:
            raise RefusedUrl(f"a URL may have {URL_CHARS} characters")
        if any(char <= " " or char in "\\\x7f" for char in url):
            raise RefusedUrl("a URL has no blanks, backslashes or control characters")
        try:
            parts = urlsplit(url)
            scheme, port = parts.scheme.lower(), parts.port
            host = (parts.hostname or "").rstrip(".")
            host = host if ":" in host else _ascii(host)
        except ValueError:
            raise RefusedUrl("the URL can't be read") from None
        if scheme not in _PORTS or not host or "%" in host:
            raise RefusedUrl("a URL is of http or https, and names a host")
        if parts.username is not None or parts.password is not None:
            raise RefusedUrl("a URL with a user's name or password is not fetched")
        port = _PORTS[scheme] if port is None else port
        if not any(_fits(rule, host, port) for rule in self._hosts):
            raise RefusedUrl("this server fetches no images from that host and port")
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return ImageUrl(scheme, host, port, quote(target, safe=_SAFE))

    def check_addresses(self, addresses: Iterable[str]) -> list[str]:
        """Return the addresses of a host, in order, each once. Raises `RefusedUrl` where there is none, or one of them
        may not be connected to."""
        found = list(dict.fromkeys(addresses))
        if not found or not all(map(self._reachable, found)):
            raise RefusedUrl(NO_ADDRESS)
        return found

    def _reachable(self, text: str) -> bool:
        try:
            address = ip_address(text)
        except ValueError:
            return False
        address = _carried(address)
        return _public(address) or any(address in network for network in self._networks)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _host_rule(text: str) -> tuple[str, int | None]:
    """A host and a port; without a port those of http and https."""
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = port, ""
    below = "*." if host.startswith("*.") else ""
    name = host.removeprefix("*.") if host != "*" else "any"
    if not name or any(char in "*/:@[] " for char in name) or (colon and not port.isdecimal()):
        raise ValueError(f"{text!r:.80} is no host: example.org, *.example.org, example.org:8080, or * for every one")
    if port and not 0 < int(port) < 65536:
        raise ValueError(f"{text!r:.80} has no port between 1 and 65535")
    return host if host == "*" else below + _ascii(name.rstrip(".")), int(port) if port else None


def _ascii(name: str) -> str:
    """A host's name as it is looked up. Raises `ValueError` for what can't be one."""
    return name.encode("idna").decode("ascii").lower()


def _fits(rule: tuple[str, int | None], host: str, port: int) -> bool:
    wanted, only = rule
    if port != only if only is not None else port not in _PORTS.values():
        return False
    return wanted in ("*", host) or (wanted.startswith("*.") and host.endswith(wanted[1:]))


def _carried(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address that one of IPv6 stands for: mapped, by 6to4, or by NAT64; any other itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def _public(address: IPv4Address | IPv6Address) -> bool:
    known = address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)
    if isinstance(address, IPv6Address):
        return known and address in _UNICAST and address.scope_id is None and address.teredo is None
    return known and address not in _RELAYS

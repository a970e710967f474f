"""The checks of the `security` section before anything starts, and the lines that say what is left open."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.config.security_config import FILES, SecurityConfig
from twinpool.contracts.credentials.certificate_files import read_curve_pair
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.key_file import read_key_file

TOKEN_VARIABLE = "TWINPOOL_ADMIN_TOKEN"
MAX_PORT = 65535


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def with_absolute_paths(config: Config) -> Config:
    """Return the configuration with `absolute_paths`."""
    return config_from_dict(absolute_paths(config.to_dict()))


def absolute_paths(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's sections with the files of `security` and the folder of storage as absolute paths: other
    processes start elsewhere. What lacks, or isn't of the type that it must have, stays so."""
    found = dict(sections)
    security, cache = found.get("security"), found.get("cache")
    storage = cache.get("storage") if isinstance(cache, Mapping) else None
    if isinstance(security, Mapping):
        found["security"] = _absolute(security, FILES)
    if isinstance(cache, Mapping) and isinstance(storage, Mapping) and storage.get("backend", "file") == "file":
        found["cache"] = {**cache, "storage": _absolute(storage, ("path",))}
    return found


def _absolute(section: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    given = {key: path for key in keys if isinstance(path := section.get(key), str) and path}
    return {**section, **{key: str(Path(os.path.expanduser(path)).absolute()) for key, path in given.items()}}


def check_security(security: SecurityConfig, host: str, port: int, *, routers: int = 1, bind: bool = True) -> None:
    """Check files, certificates and ports of `security`; `host` and `port` are the endpoint's. Each of so many
    `routers` has an operators' port of its own, counted up from `admin_port`. `bind`: whether these must be free now.
    Raises `ConfigError`."""
    if security.keys_file:
        read_key_file(Path(security.keys_file))
    elif not security.open and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: whoever reaches this machine could use the model. Make keys (twinpool keys new "
            "TENANT) and name their file by --set security.keys_file=FILE, or say --open if that is what you want"
        )
    for files in (security.https, security.cluster):
        if files is not None:
            files.check()
    if security.curve_key:
        read_curve_pair(Path(security.curve_key))
    if security.admin_keys_file:
        read_key_file(Path(security.admin_keys_file))
    if security.admin_port:
        ports = range(security.admin_port, security.admin_port + routers)
        _check_admin(security, port, ports)
        for number in ports if bind else ():
            _check_admin_port(security.admin_host, number)


def _check_admin(security: SecurityConfig, port: int, ports: range) -> None:
    if security.admin_port == port:
        raise ConfigError(f"security.admin_port and --port are both {port}: operators need a port of their own")
    if port in ports or ports[-1] > MAX_PORT:
        taken = f"--port is {port}" if port in ports else f"{MAX_PORT} is the last port"
        raise ConfigError(
            f"security.admin_port={ports[0]} and the ports after it, up to {ports[-1]}, are operators' ports of "
            f"{len(ports)} routers, and {taken}: choose another security.admin_port"
        )
    if not (security.admin_keys_file or os.environ.get(TOKEN_VARIABLE)) and not is_loopback(security.admin_host):
        raise ConfigError(
            f"security.admin_host={security.admin_host}: whoever reaches this machine could drain workers. Make keys "
            "(twinpool keys new OPERATOR --file FILE) and name their file by security.admin_keys_file"
        )


def _check_admin_port(host: str, port: int) -> None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host}:{port} ({error.strerror}); choose another security.admin_port"
        ) from None


def open_ways(security: SecurityConfig, host: str, node: str) -> list[str]:
    """Return a line for each thing that others on the network can read or use; `node`: this node's address in the
    cluster."""
    lines = []
    if not is_loopback(host):
        if security.open and not security.keys_file:
            lines.append(f"whoever reaches {host} can use the model, without a key (security.open)")
        if not security.tls_cert:
            lines.append(
                "clients' keys and prompts travel in the clear unless something before the router speaks TLS "
                "(security.tls_cert)"
            )
    if not is_loopback(node) and not security.cluster_ca:
        lines.append(
            "calls between router, workers and controller carry prompts and answers in the clear (twinpool certs new, "
            "security.cluster_ca)"
        )
    return lines

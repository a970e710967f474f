"""docs/threat-model.md: every file that opens a socket is in its table, and every file that it names is there."""

from __future__ import annotations

import re

import pytest

from tests.support.served_cluster import ROOT

PAGE = (ROOT / "docs" / "threat-model.md").read_text()
TABLE = PAGE.split("\n## Every socket\n")[1].split("\n## ")[0]
PACKAGES = (
    "cache",
    "cli",
    "cluster",
    "colocate",
    "contracts",
    "decode",
    "engine",
    "prefill",
    "router",
    "transfer",
    "worker",
)
OPENS = re.compile(
    r"create_server\(|\.bind\(|socket\.bind|\bbind\((?:socket|self\._)|add_(?:in)?secure_port\(|start_server\(|"
    r"socketpair\(|_bind\(self\._context|create_device\(hostname|nixl_agent\(|TCPStore\(|start_http_server\(|"
    r"HTTPServer\(|socketserver|(?:in)?secure_channel\(|memfd_create\(_|\.connect\((?:endpoint|self)"
)
HELPERS = {
    "contracts/credentials/certificate_files.py": "keys alone",
    "router/service/open_answers.py": "a stream's choices, no socket",
    "router/openai/response_stream.py": "a stream's choices, no socket",
}


def opening() -> list[str]:
    """Files that open a socket, or connect one."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if "proto/" not in name and OPENS.search(path.read_text()):
                found.append(name)
    return found


def test_every_file_that_opens_a_socket_is_in_the_table() -> None:
    found = opening()
    assert len(found) >= 15
    assert [name for name in found if f"`{name}`" not in TABLE and name not in HELPERS] == []


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([\w/]+\.py)`", PAGE))))
def test_a_file_that_the_page_names_is_there(name: str) -> None:
    assert (ROOT / name).is_file()


def test_every_row_says_what_is_not_defended() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 18
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 5
        assert all(cells), row

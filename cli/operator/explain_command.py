"""`twinpool explain`: what became of one request, or what it does now, as a text to read.

The router answers with a record for each choice (`contracts/messages/request_record.py`); here they are laid out: where
the time went, what happened in order, and who was considered for it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from twinpool.cli.admin_client import AdminClient, client_for
from twinpool.cli.command_parser import FINE, plain_table, print_table

KB, MB = 1000, 1_000_000
SHORT = 1e-4
"""Seconds below which times are shown in microseconds."""


def records_of(operator: AdminClient, request_id: str) -> list[dict[str, Any]]:
    """The records of a request's choices. Raises as `AdminClient.call` does."""
    records: list[dict[str, Any]] = operator.call("GET", f"/cluster/requests/{quote(request_id, safe='')}")["records"]
    return records


def explained(records: Sequence[Mapping[str, Any]]) -> Any:
    """What `twinpool explain` shows of these records."""
    from rich.console import Group

    return Group(*(part for record in records for part in _parts(record)))


def _parts(record: Mapping[str, Any]) -> Iterator[Any]:
    from rich.text import Text

    for line in _heading(record):
        yield Text(line)
    if record["refused_status"]:
        yield _events(record)
        yield _numbers(record["numbers"])
        yield Text("")
        return
    yield _spans(record)
    yield _events(record)
    for choice in record["choices"]:
        for line in _choice(choice):
            yield Text(line)
    if record["uncertainty_s"] >= SHORT:
        late = _seconds(record["uncertainty_s"])
        yield Text(f"Workers' times may lie up to {late} earlier: a router sees no command arrive.")
    if record["left_out"]:
        yield Text(f"{record['left_out']} more things happened than a record holds.")
    yield Text("")


def _heading(record: Mapping[str, Any]) -> Iterator[str]:
    came = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record["arrived"]))
    whose = f" of {record['tenant']}" if record["tenant"] else ""
    yield f"request {record['request_id']}{whose}, for {record['model']}, came to {record['router']} at {came} UTC"
    if record["client_id"]:
        yield f"x-request-id {record['client_id']}" + (f", trace {record['trace_id']}" if record["trace_id"] else "")
    total, first = _seconds(record["total_s"]), record["first_token_s"]
    if record["refused_status"]:
        yield f"refused after {total} with {record['refused_status']} ({record['outcome']}); it was placed nowhere"
        return
    token = f"first token after {_seconds(first)}" if first is not None else "no token was delivered"
    if record["outcome"] == "running":
        yield f"runs since {total}: {_now(record)}; {token}"
    else:
        why = f": {record['message']}" if record["message"] else ""
        yield f"ended after {total} ({record['outcome']}{why}); {token}"
    cached = ", ".join(f"{count} of {tier}" for tier, count in sorted(record["cached_tokens"].items()) if count)
    counts = [
        f"{record['prompt_tokens']} prompt tokens" + (f" ({cached} cached)" if cached else ""),
        f"{record['generated']} generated",
        f"{_bytes(record['transfer_bytes'])} sent to decode",
        _count(record["attempts"], "attempt"),
    ]
    counts += [_count(record[f"{what}s"], what) for what in ("retraction", "migration") if record[f"{what}s"]]
    yield ", ".join(counts)


def _now(record: Mapping[str, Any]) -> str:
    """What a running request does now, in words."""
    shown = [span for span in record["spans"] if not span["hidden"]]
    if not shown:
        return "it has only just come"
    last = shown[-1]
    where = f" on {last['worker']}" if last["worker"] else ""
    since = _seconds(record["total_s"] - last["start_s"])
    return f"{last['name']}{where} for {since}" + (f" ({last['detail']})" if last["detail"] else "")


def _spans(record: Mapping[str, Any]) -> Any:
    from rich.text import Text

    table = plain_table("where the time went", "where", "from", "took", "of all")
    table.add_column("")
    total, summed = record["total_s"], 0.0
    for span in record["spans"]:
        took = span["end_s"] - span["start_s"]
        summed += 0.0 if span["hidden"] else took
        share = "beside" if span["hidden"] else f"{took / total:.1%}" if total else ""
        cells = (span["name"], span["worker"] or "router", _seconds(span["start_s"]), _seconds(took), share)
        table.add_row(*cells, Text(span["detail"]))
    table.add_row("sum", "", "", _seconds(summed), f"{summed / total:.1%}" if total else "")
    return table


def _events(record: Mapping[str, Any]) -> Any:
    from rich.text import Text

    table = plain_table("what happened", "where", "at")
    table.add_column("")
    for event in record["events"]:
        table.add_row(event["kind"], event["worker"] or "router", _seconds(event["at_s"]), Text(event["text"]))
    return table


def _numbers(numbers: Mapping[str, float]) -> Any:
    """The numbers that decided about a refused request."""
    table = plain_table("number", "then")
    for name, number in numbers.items():
        table.add_row(name.replace("_", " "), f"{number:g}")
    return table


def _choice(choice: Mapping[str, Any]) -> Iterator[str]:
    role, able = choice["role"], len(choice["candidates"]) + choice["others"]
    why = f": {choice['why']}" if choice["why"] else f", by {choice['unit']}"
    yield f"attempt {choice['attempt']}, {role}: {choice['chosen']} of {able} that could{why}"
    for one in choice["candidates"]:
        chosen = "*" if one["worker"] == choice["chosen"] else " "
        had = f"{one['load']} in flight, holds {one['held']} of its tokens"
        yield f"  {chosen} {one['worker']}: cost {one['cost']:g}, {had}"
    if choice["others"]:
        yield f"    and {choice['others']} at a higher cost"
    for refused in choice["refused"]:
        named = ", ".join(refused["workers"]) + (", …" if refused["count"] > len(refused["workers"]) else "")
        yield f"    not {named}: {refused['reason']} ({refused['count']})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _seconds(seconds: float) -> str:
    """A time in a unit in which it has at least three digits."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= SHORT or seconds <= 0 else f"{seconds * 1e6:.0f} us"


def _bytes(nbytes: int) -> str:
    if nbytes >= MB:
        return f"{nbytes / MB:.1f} MB"
    return f"{nbytes / KB:.1f} kB" if nbytes >= KB else f"{nbytes} bytes"


def explain(args: argparse.Namespace) -> int:
    records = records_of(client_for(args.url, args.ca, args.model_name, changes=False)[0], args.request)
    if args.json:
        print(json.dumps(records))
    else:
        print_table(explained(records))
    return FINE

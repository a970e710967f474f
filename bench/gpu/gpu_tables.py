"""The tables of docs/benchmarks.md from what `bench.gpu` wrote: each figure beside what the GPU would allow.

A section that has no figures, or not all of them, has a table of what there is.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def tables(written: Mapping[str, Any]) -> str:
    """Markdown of all sections that are in `written`, the file's content."""
    gpu = written["gpu"]
    where = f"{gpu['name']}, CUDA {gpu['cuda']}" if gpu and not written["rehearsal"] else "A rehearsal on a CPU"
    parts = [f"{where}: `python -m bench.gpu`."]
    for name, section in written["sections"].items():
        passed = section["ok"]
        parts.append(f"### {name}: {'passed' if passed else section['ended']}, {section['seconds']:.0f} s")
        if section["figures"] is not None:
            parts += [block for block in _SECTIONS[name](section["figures"]) if block]
    return "\n\n".join(parts) + "\n"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; empty without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    head = ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    return "\n".join([*head, *lines]) if lines else ""


def _kernels(figures: Mapping[str, Any]) -> Iterator[str]:
    checks = [*figures.get("checks", ()), *figures.get("row_checks", ())]
    wrong = [f"{one['claim']} ({one['dtype']})" for one in checks if not one["ok"]]
    yield f"{len(checks) - len(wrong)} checks passed" + (f"; WRONG: {', '.join(wrong)}." if wrong else ".")
    yield table(
        ("attention", "Triton, µs", "SDPA", "reached"),
        (
            (
                f"{one['what']} {one['dtype']}, {one['batch']} x {one['context']}, {one['queries']} queries",
                f"{one['triton_us']:.0f}",
                f"{one['torch_us']:.0f}",
                f"{one['rate']:.0f} {'GB/s' if one['queries'] == 1 else 'TFLOP/s'}",
            )
            for one in figures.get("timings", ())
        ),
    )
    yield table(
        ("kernel", "Triton, µs", "torch", "reached"),
        (
            (one["what"], f"{one['triton_us']:.0f}", f"{one['torch_us']:.0f}",
             f"{one['rate']:.0f} {one['unit']}")
            for one in figures.get("row_timings", ())
        ),
    )  # fmt: skip


def _families(figures: Mapping[str, Any]) -> Iterator[str]:
    scenes: dict[str, list[str]] = {}
    for scene in figures.get("scenes", ()):
        scenes.setdefault(scene["scene"], []).append(scene["ended"])
    kinds = ("passed", "failed", "not run")
    yield table(("scene", *kinds), ((name, *(str(ends.count(k)) for k in kinds)) for name, ends in scenes.items()))


def _copies(figures: Mapping[str, Any]) -> Iterator[str]:
    for title, ways in figures.get("gb_per_s", {}).items():
        beside = figures.get("beside_products", {}).get(title, {})
        rows = []
        for name, rates in ways.items():
            ceiling = statistics.median(ways["one block up" if "up" in name else "one block down"])
            rate, kept = statistics.median(rates), beside.get(name)
            both = f"{kept['copy']:.0%}, {kept['products']:.0%}" if kept else ""
            rows.append((name, f"{rate:.1f}", f"{ceiling:.1f}", f"{rate / ceiling:.2f}", both))
        yield table((title, "GB/s", "limit", "of it", "kept beside products, and they"), rows)


def _handover(figures: Mapping[str, Any]) -> Iterator[str]:
    if "one block" not in figures:
        return
    limit = figures["one block"]["median_gb_per_s"]
    yield table(
        ("plane", "GB/s", "limit", "of it", "ms a chunk"),
        (
            (name, f"{one['median_gb_per_s']:.2f}", f"{limit:.2f}", f"{one['median_gb_per_s'] / limit:.3f}",
             f"{statistics.median(one['chunk_ms']):.2f}")
            for name, one in figures.items()
        ),
    )  # fmt: skip


def _engine(figures: Mapping[str, Any]) -> Iterator[str]:
    if "ceilings" not in figures:
        return
    limits = figures["ceilings"]
    yield f"A copy: {limits['bytes_per_s'] / 1e9:.0f} GB/s; a product: {limits['flops_per_s'] / 1e12:.1f} TFLOP/s."
    for name, model in figures["models"].items():
        scenarios = model.get("tokens_per_s", {})
        sides = list(dict.fromkeys(s for by in scenarios.values() for s in by if s != "predicted limit"))
        rows = []
        for scenario, by_side in scenarios.items():
            limit = by_side["predicted limit"]
            medians = [by_side[s]["median"] if s in by_side else None for s in sides]
            cells = ["-" if m is None else f"{m:,.0f} ({m / limit:.0%})" for m in medians]
            rows.append((scenario, *cells, f"{limit:,.0f}"))
        yield table((f"{name}, tokens/s (of the limit)", *sides, "limit"), rows)
        notes = [f"step graphs of {side}: {said}" for side, said in model.get("graphs", {}).items()]
        notes += [*(f"{what}: {why}" for what, why in model.get("left_out", {}).items()), model.get("failed", "")]
        yield "\n".join(f"- {note}" for note in notes if note)


def _serving(figures: Mapping[str, Any]) -> Iterator[str]:
    yield table(
        ("hand-over", "MiB", "exposed, ms", "hidden, ms", "limit: one block, ms", "first, second token, ms"),
        (
            (
                f"{side}, {length} tokens",
                f"{one['transfer_bytes'] / 2**20:.1f}",
                f"{one['exposed_ms']:.2f}",
                f"{one['hidden_ms']:.2f}",
                f"{one['block_ms']:.2f}",
                f"{one['first_token_ms']:.1f}, {one['second_token_ms']:.1f}",
            )
            for side, lengths in figures.get("handover", {}).items()
            for length, one in lengths.items()
        ),
    )
    goodput = figures.get("goodput", {})
    yield table(
        ("goodput, at requests/s", "good/s", "limit", "good", "TTFT, ms: median, 99 %", "ITL, ms", "handed over, MiB"),
        (
            (
                f"{side}, {one['rate']:g}",
                f"{one['goodput_per_s']:.2f}",
                f"{one['limit_per_s']:.1f}",
                f"{one['good']} of {one['requests']}",
                f"{one['ttft_ms'][0]:.0f}, {one['ttft_ms'][1]:.0f}",
                f"{one['itl_ms'][0]:.1f}, {one['itl_ms'][1]:.1f}",
                f"{one['transfer_bytes'] / 2**20:.0f}",
            )
            for side, rates in goodput.items()
            if isinstance(rates, list)
            for one in rates
        ),
    )
    notes = [f"{side}: not run: {one['not_run']}" for side, one in goodput.items() if isinstance(one, dict)]
    yield "\n".join(f"- {note}" for note in notes)


_SECTIONS = {
    "kernels": _kernels,
    "families": _families,
    "copies": _copies,
    "handover": _handover,
    "engine": _engine,
    "serving": _serving,
}

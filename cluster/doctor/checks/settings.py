"""The configuration's file and flags, as `serve` itself checks them."""

from __future__ import annotations

from collections.abc import Iterator

from twinpool.cluster.doctor.doctor_case import DoctorCase
from twinpool.cluster.doctor.finding import Finding, fine, from_refusal
from twinpool.cluster.serve.preflight import check_flags, check_settings
from twinpool.contracts import cpu_levels
from twinpool.contracts.errors import TwinpoolError


def check_configuration(case: DoctorCase) -> Iterator[Finding]:
    """The file, each `--set`, the flags, and what they are together."""
    if case.refused is not None:
        yield from_refusal(case.refused)
        return
    try:
        check_flags(case.options)
        check_settings(case.config, case.options)
    except TwinpoolError as refused:
        yield from_refusal(refused)
        return
    sizes = ", ".join(f"{count} {role}" for role, count in case.options.workers.items())
    yield fine(f"{case.options.file or 'defaults and flags'}: {sizes}")


def check_numerics(case: DoctorCase) -> Iterator[Finding]:
    """Whether this machine's processor can run the level that the cluster is pinned to."""
    from twinpool.cluster.doctor.finding import error, warning

    level, can = case.config.engine.numerics_class, cpu_levels.levels()
    if level not in ("auto", *can):
        yield error(
            f"engine.numerics_class={level}, and this processor runs {', '.join(can) or 'none of the levels'}",
            "set a level that every machine of the cluster runs",
        )
    elif level == "auto" and case.several_hosts and not case.wants_gpus:
        yield warning(
            "engine.numerics_class=auto with several machines: processors that aren't alike compute other bits",
            f"set engine.numerics_class to a level that all of them run (this one: {', '.join(can) or 'none'})",
            "workers whose bits differ refuse each other's state, so an answer can't go on elsewhere",
        )
    else:
        yield fine(f"{cpu_levels.described(level if level != 'auto' else '')}, engine.numerics_class={level}")

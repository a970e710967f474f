"""The Python and the packages that are installed, against those that this build asks for."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from twinpool.cluster.doctor.doctor_case import DoctorCase
from twinpool.cluster.doctor.finding import Finding, error, fine
from twinpool.contracts.config.ledger_place import on_server

_SHOWN = ("torch", "ray", "pyzmq", "grpcio")


def check_versions(case: DoctorCase) -> Iterator[Finding]:
    """Each package that is asked for, also those of extras that the configuration needs."""
    try:
        declared = metadata("twinpool")
    except PackageNotFoundError:
        yield fine("Twinpool runs from a folder of sources: versions aren't compared")
        return
    python = platform.python_version()
    wanted = str(declared["Requires-Python"] or "")
    if not SpecifierSet(wanted).contains(python, prereleases=True):
        yield error(
            f"Python {python}; supported is {wanted}", "install Twinpool into an environment with such a Python"
        )
    extras = _extras(case)
    seen = [f"Python {python}"]
    for text in declared.get_all("Requires-Dist") or ():
        asked = Requirement(text)
        if asked.marker is not None and not any(asked.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        try:
            there = case.host.version(asked.name)
        except PackageNotFoundError:
            yield error(f"{asked.name} isn't installed", f"pip install '{asked.name}{asked.specifier}'")
            continue
        if not asked.specifier.contains(there, prereleases=True):
            yield error(
                f"{asked.name} {there} is installed; supported is {asked.specifier}",
                f"pip install '{asked.name}{asked.specifier}'",
            )
        elif asked.name in _SHOWN:
            seen.append(f"{asked.name} {there}")
    yield fine(", ".join(seen))


def _extras(case: DoctorCase) -> list[str]:
    """The extras of the package that the configuration can't do without."""
    config = case.config
    redis = config.cache.storage.backend == "redis" or on_server(config.cluster.ledger) or config.cluster.ray_storage
    wanted = {"redis": bool(redis), "nixl": config.transfer.plane == "nixl", "cuda": case.wants_gpus}
    return [name for name, needed in wanted.items() if needed]

"""Compile every kernel as production launches it, for compute capability 9.0; run by `test_compiled_kernels.py`.

Prints one JSON object: under ``rows`` those of the table (`tests.support.launches.compiled_table`).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from tests.support.launches import compiled_table


def main(capability: int) -> None:
    found = [{**asdict(row), "faults": row.faults()} for row in compiled_table.rows(capability)]
    sys.stdout.write(json.dumps({"rows": found}))


if __name__ == "__main__":
    main(90)

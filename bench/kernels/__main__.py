"""The Triton kernels: on a GPU, are they right and how fast; without one, what does their compiled code say?

    python -m bench.kernels                             # checks and times on a GPU (kernel_timings says what)
    python -m bench.kernels --compiled [--chip 90 ...]  # the table of compiled code, on any machine
    python -m bench.kernels --compiled --only "Gemma 3" # of some kernels or models
    python -m bench.kernels --tune                      # on a GPU: fill the table of warps and stages (tune_launches)

`--compiled` launches every kernel as production does, on tensors without contents, and compiles it for GPUs that need
not be there: registers, spills, shared memory, how many blocks a multiprocessor runs at once, and which loops copy
asynchronously. Exit code 1 where a kernel is as none may be (`compiled_table.TableRow.faults`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import triton

from bench.common.bench_report import flag_parser
from bench.kernels import kernel_timings, tune_launches
from tests.kernels.ordered_dot import use_ordered_dot
from tests.support.launches import compiled_table
from tests.support.launches.chip_limits import CHIPS


def main(argv: Sequence[str] | None = None) -> int:
    flags = flag_parser(__doc__)
    flags.add_argument("--compiled", action="store_true", help="the table of compiled code; needs no GPU")
    flags.add_argument("--tune", action="store_true", help="measure options on this GPU, and write their table")
    flags.add_argument(
        "--chip", type=int, nargs="+", choices=sorted(CHIPS), default=[90], help="compute capability * 10"
    )
    flags.add_argument("--only", default="", help="kernels or models with this in their name")
    args = flags.parse_args(argv)
    interpreted = bool(triton.knobs.runtime.interpret)
    if args.compiled:
        if interpreted:
            flags.error("nothing is compiled in Triton's interpreter; unset TRITON_INTERPRET")
        return compiled_table.main(args.chip, args.only, args.json)
    if args.tune:
        return tune_launches.main()
    if not interpreted and not torch.cuda.is_available():
        print(
            "bench.kernels: torch sees no GPU; --compiled needs none, and TRITON_INTERPRET=1 runs the checks in small",
            file=sys.stderr,
        )
        return 2
    if interpreted:
        use_ordered_dot()
    return kernel_timings.main(args.json, interpreted)


if __name__ == "__main__":
    sys.exit(main())

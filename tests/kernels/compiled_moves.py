"""Compile the kernel that copies pages for a GPU that need not be there; run as a script by `test_move_kernels.py`.

Prints one JSON object: word and "even" or "odd" strides -> bits that one thread loads at once.
"""

from __future__ import annotations

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twinpool.cache.memory.triton_pages import copy_rows_kernel


def load_bits(word: str, even: bool) -> int:
    """The widest load of the code for words of a type (Triton's name); `even`: strides are multiples of 16 words."""
    names = copy_rows_kernel.arg_names
    pointers = {"source_ptr": f"*{word}", "target_ptr": f"*{word}", "sources_ptr": "*i64", "targets_ptr": "*i64"}
    aligned = {at for at, name in enumerate(names) if name in pointers or (even and name != "PIECE")}
    source = ASTSource(
        fn=copy_rows_kernel,
        signature={name: "constexpr" if name == "PIECE" else pointers.get(name, "i32") for name in names},
        constexprs={(names.index("PIECE"),): 1024},
        attrs={(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    loads = re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", code)
    return max(int(many or 1) * int(bits) for many, bits in loads)


if __name__ == "__main__":
    words = ("i64", "i32", "i16", "i8")
    found = {f"{word} {'even' if even else 'odd'}": load_bits(word, even) for word in words for even in (True, False)}
    sys.stdout.write(json.dumps(found))

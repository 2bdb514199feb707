"""Checks the machine code of the kernels for an H200, without one: make gpu-compile-check.

    python -m tests.operation.kernels.ptx

No kernel may spill a register, and no product may be contracted into a sum over lanes: it is
rounded in one lane and not in the other, so the two lanes would hold different sums.
"""

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax

from experiments import compiled
from experiments.common.peers import OURS_PALLAS

RECEIVED = re.compile(r"shfl\.sync\.bfly\.b32\s+(%r\d+)")
ADDED = re.compile(r"fma\.rn\.f32\s+%r\d+, \S+, \S+, (%r\d+);")


def contracted(ptx: str) -> int:
    """Returns the number of products that are contracted into a value of another lane."""
    received = set(RECEIVED.findall(ptx))
    return sum(register in received for register in ADDED.findall(ptx))


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Discards what native code writes to stderr."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # otherwise jax looks for the device and fails
    device = compiled.described(compiled.GPU)[:1]
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        for case in compiled.every_case(compiled.GPU):
            if OURS_PALLAS in case:
                with silent():  # Mosaic also asks for nvdisasm, which is not installed
                    compiled.count(device, case)
        kernels = [path.read_text() for path in Path(folder).glob("*.ptx")]
        said = "".join(path.read_text() for path in Path(folder).glob("*.ptxas"))
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", said)]
    spilled = sum(int(number) for number in re.findall(r"(\d+) bytes spill stores", said))
    products = sum(map(contracted, kernels))
    print(f"{len(kernels)} kernels: at most {max(registers, default=0)} registers,")
    print(f"{spilled} bytes spilled, {products} products contracted into a sum over lanes")
    return int(not kernels or len(registers) < len(kernels) or spilled > 0 or products > 0)


if __name__ == "__main__":
    sys.exit(main())

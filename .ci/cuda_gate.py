# SPDX-License-Identifier: Apache-2.0
"""Checks the kernels of a built CUDA module: no spill or stack frame, and the instructions meant.

usage: cuda_gate.py MODULE ARCHITECTURE...    (cuobjdump and nvdisasm on PATH)

For every architecture each kernel must have no stack frame (where spills would be) and no access to
local memory, and those on tensor cores must be made of the instructions that they were designed of.
Those that wait for the launch before them must not touch device memory ahead of the wait, to where
ptxas moves read-only loads.
"""

import collections
import re
import subprocess
import sys
from collections.abc import Iterator


def expected_counts(kernel):
    """(pattern of instructions, least, most) for a mangled kernel name."""
    if "MoeGemmKernel" in kernel:
        # A step of 64 of the depth: 32 rows of a warp, 64 tokens. With 8-bit weights there are two
        # loops over it: for scales of outputs, and for those of blocks.
        is_eight_bit = re.search("Int8|Float8", kernel) is not None
        products = 128 if is_eight_bit else 64
        loads = 8 if is_eight_bit else 24  # weights, and tokens where they lie as mma wants them
        copies = 32 if is_eight_bit else 36  # at each of the places that issue a stage
        return [
            ("HMMA.16816.F32", products, products),
            ("LDSM.*\\.M88\\.4", loads, loads),
            ("LDGSTS.*\\.128", copies, copies),
        ]
    if match := re.search(r"Latent(?:Prefill)?KernelI\w*?ELi(\d+)ELb([01])E", kernel):
        # S: two steps of 32 dimensions in a loop and one behind it; O: 32 tokens.
        rows, is_eight_bit = int(match[1]), match[2] == "1"
        groups = 2 if rows == 64 else 1
        v_loads = 16 if rows == 64 else 8
        mma = 3 * 2 * groups + v_loads * (2 if rows == 16 else 4)
        copies = 16 if is_eight_bit else 24  # at two places of the loader
        return [
            ("HMMA.16816.F32", mma, mma),
            ("LDSM.*\\.M88\\.4", 3 * (groups + 2), 3 * (groups + 2)),
            ("LDSM.*\\.MT88\\.4", v_loads, v_loads),
            ("LDGSTS.*\\.128", copies, copies),
        ]
    match = re.search(r"(Decode|Prefill)Kernel\w*?ELi(\d+)E(?:LNS0_8PageKindE([012])E)?", kernel)
    if not match:
        return []
    steps = int(match[2]) // 16  # of mma.m16n8k16 over head_dim
    if match[1] == "Decode":
        if match[3] == "2":  # bytes, 2 steps in one load, for each of 3 dtypes
            loads = (steps + 1) // 2 * 3
            queries = 3 * steps if steps > 8 else 0  # in shared memory
            return [
                ("HMMA.16816.F32", 24 * steps, 24 * steps),  # S; O of one term of P, and of two
                ("LDSM.*\\.M88\\.4", loads + queries, loads + queries),
                ("LDSM.*\\.MT88\\.4", 2 * loads, 2 * loads),
                ("LDGSTS.*\\.128", steps, 10 * steps),
            ]
        transposed = steps if match[3] == "1" else 0  # V of vllm5d lies in memory as mma wants it
        mma = 4 * steps  # S: 2 per step, O: 2 per step
        return [
            ("HMMA.16816.F32", mma, mma),
            # K, and Q where it is in shared memory
            ("LDSM.*\\.M88\\.4", steps + transposed, 2 * steps + transposed),
            ("LDSM.*\\.MT88\\.4", steps - transposed, steps - transposed),  # V
            # K and V, at two places of the loader
            ("LDGSTS.*\\.128", 4 * steps, 10 * steps),
        ]
    # A warp's tile: 32 rows x 64 tokens, or 16 x 32 above head_dim 128.
    row_tiles, token_tiles = (2, 4) if steps <= 8 else (1, 2)
    mma = 4 * row_tiles * token_tiles * steps  # S and O, half each
    v_loads = token_tiles * steps
    transposed = v_loads if match[3] == "1" else 0
    loads = (row_tiles + token_tiles) * steps + transposed  # Q and K
    copies = token_tiles * steps
    if match[3] == "2":  # bytes; where they are no multiple of what all threads copy, a few more
        copies = (copies // 4 + 1) // 2 * 4
        mma, v_loads = mma // 2 * 3, 2 * v_loads  # V: with scales per token, and without
    return [
        ("HMMA.16816.F32", mma, mma),
        ("LDSM.*\\.M88\\.4", loads, loads),
        ("LDSM.*\\.MT88\\.4", v_loads - transposed, v_loads - transposed),  # V
        ("LDGSTS.*\\.128", copies, copies),  # K and V, at two places
    ]


def dump(option, module):
    """Lines of what cuobjdump tells of a module."""
    command = ["cuobjdump", option, module]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield from child.stdout
    if child.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit status {child.returncode}")


def by_kernel(lines: Iterator[str]):
    """((architecture, kernel), line) for the lines that belong to a kernel."""
    arch = kernel = ""
    for line in lines:
        if match := re.match(r"arch = (\S+)", line):
            arch, kernel = match[1], ""
        elif match := re.search(r"Function (?:: )?([^\s:]+)", line):
            kernel = match[1]
        elif kernel:
            yield (arch, kernel), line


def main(module, *architectures):
    registers, wrong = {}, collections.defaultdict(list)
    for key, line in by_kernel(dump("-res-usage", module)):
        if not (usage := dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", line))):
            continue
        registers[key] = int(usage["REG"])
        if usage["STACK"] != "0" or usage["LOCAL"] != "0":
            wrong[key].append(f"{usage['STACK']} bytes of stack, {usage['LOCAL']} of local memory")

    counts, early = collections.defaultdict(collections.Counter), collections.defaultdict(list)
    for key, line in by_kernel(dump("-sass", module)):
        if match := re.search(r"\*/\s+(?:@!?\w+ )?([A-Z][A-Z0-9_.]+)", line):
            counts[key][match[1]] += 1
            if not counts[key]["ACQBULK"] and re.match("LDG|STG|ATOM|RED", match[1]):
                early[key].append(match[1])
    if set(counts) != set(registers):
        sys.exit(f"{module}: no SASS of {sorted(set(registers) ^ set(counts))[:3]} and so on")
    designed = collections.Counter()
    for key, found in counts.items():
        if local := sum(n for name, n in found.items() if name.startswith(("LDL", "STL"))):
            wrong[key].append(f"{local} local-memory accesses")
        if found["ACQBULK"] and early[key]:
            wrong[key].append(f"{early[key][0]} before the wait for the launch before it")
        for pattern, least, most in expected_counts(key[1]):
            designed[key] += 1
            n = sum(n for name, n in found.items() if re.search(pattern, name))
            if not least <= n <= most:
                wrong[key].append(f"{n} {pattern}, expected {least} to {most}")

    for (arch, kernel), found in wrong.items():
        print(f"{arch} {kernel}: {'; '.join(found)}")
    for arch in architectures:
        kernels = [key for key in registers if key[0] == arch]
        if not kernels:
            sys.exit(f"{module}: no kernels for {arch}")
        print(
            f"{arch}: {len(kernels)} kernels, most registers {max(registers[k] for k in kernels)}, "
            f"the instructions of {sum(k in designed for k in kernels)} checked"
        )
    sys.exit(bool(wrong))


main(*sys.argv[1:])

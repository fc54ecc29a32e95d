"""Checks that the kernels on tensor cores are made of the instructions that they were meant to use.

usage: cuobjdump -sass OBJECT | python sass_counts.py LABEL
"""

import collections
import re
import sys


def expected_counts(kernel):
    """(pattern of instructions, least, most) for a mangled kernel name."""
    if "MoeGemmKernel" in kernel:
        # A step of 64 of the depth: 32 rows of a warp, 64 tokens.
        is_eight_bit = re.search("Int8|Float8", kernel) is not None
        loads = 4 if is_eight_bit else 24  # weights, and tokens where they lie as mma wants them
        copies = 32 if is_eight_bit else 36  # at each of the places that issue a stage
        return [
            ("HMMA.16816.F32", 64, 64),
            ("LDSM.*\\.M88\\.4", loads, loads),
            ("LDGSTS.*\\.128", copies, copies),
        ]
    match = re.search(r"(Decode|Prefill)Kernel\w*?ELi(\d+)E(?:LNS0_8PageKindE([012])E)?", kernel)
    if not match:
        return []
    steps = int(match[2]) // 16  # of mma.m16n8k16 over head_dim
    if match[1] == "Decode":
        transposed = steps if match[3] == "1" else 0  # V of vllm5d lies in memory as mma wants it
        is_eight_bit = match[3] == "2"  # half the bytes; O once more for the rest of P
        mma = (6 if is_eight_bit else 4) * steps  # S: 2 per step, O: 2 per step
        least_copies = steps if is_eight_bit else 4 * steps
        return [
            ("HMMA.16816.F32", mma, mma),
            # K, and Q where it is in shared memory
            ("LDSM.*\\.M88\\.4", steps + transposed, 2 * steps + transposed),
            ("LDSM.*\\.MT88\\.4", steps - transposed, steps - transposed),  # V
            # K and V, at two places of the loader
            ("LDGSTS.*\\.128", least_copies, 10 * steps),
        ]
    # A warp's tile: 32 rows x 64 tokens, or 16 x 32 above head_dim 128.
    row_tiles, token_tiles = (2, 4) if steps <= 8 else (1, 2)
    mma = 4 * row_tiles * token_tiles * steps  # S and O, half each
    v_loads = token_tiles * steps
    transposed = v_loads if match[3] == "1" else 0
    loads = (row_tiles + token_tiles) * steps + transposed  # Q and K
    return [
        ("HMMA.16816.F32", mma, mma),
        ("LDSM.*\\.M88\\.4", loads, loads),
        ("LDSM.*\\.MT88\\.4", v_loads - transposed, v_loads - transposed),  # V
        ("LDGSTS.*\\.128", token_tiles * steps, token_tiles * steps),  # K and V, at two places
    ]


counts = collections.defaultdict(collections.Counter)
kernel = ""
for line in sys.stdin:
    if match := re.search(r"Function : (\S+)", line):
        kernel = match[1]
    elif match := re.search(r"\*/\s+(?:@!?\w+ )?([A-Z][A-Z0-9_.]+)", line):
        counts[kernel][match[1]] += 1

failed = False
for kernel, found in counts.items():
    local = sum(n for name, n in found.items() if name.startswith(("LDL", "STL")))
    wrong = [f"{local} local-memory accesses"] if local else []
    for pattern, least, most in expected_counts(kernel):
        n = sum(n for name, n in found.items() if re.search(pattern, name))
        if not least <= n <= most:
            wrong.append(f"{n} {pattern}, expected {least} to {most}")
    if wrong:
        failed = True
        print(f"{sys.argv[1]} {kernel}: {'; '.join(wrong)}")
if not counts:
    sys.exit(f"{sys.argv[1]}: no SASS to look at")
print(f"{sys.argv[1]}: instruction counts of {len(counts)} kernels are as designed")
sys.exit(failed)

"""Checks that the decode kernels are made of the instructions that they were designed around.

usage: cuobjdump -sass OBJECT | python sass_counts.py LABEL
"""

import collections
import re
import sys

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
    if match := re.search(r"DecodeKernel\w*?ELi(\d+)ELb([01])E", kernel):
        head_dim = int(match[1])
        steps = head_dim // 16
        transposed = steps if match[2] == "1" else 0  # V of vllm5d lies in memory as mma wants it

        def total(pattern, found=found):
            return sum(n for name, n in found.items() if re.search(pattern, name))

        for name, least, most in [
            ("HMMA.16816.F32", 4 * steps, 4 * steps),  # S: 2 per step, O: 2 per step
            # K, and Q where it is in shared memory
            ("LDSM.*\\.M88\\.4", steps + transposed, 2 * steps + transposed),
            ("LDSM.*\\.MT88\\.4", steps - transposed, steps - transposed),  # V
            ("LDGSTS.*\\.128", 4 * steps, 10 * steps),  # K and V, at two places of the loader
        ]:
            n = total(name)
            if not least <= n <= most:
                wrong.append(f"{n} {name}, expected {least} to {most}")
    if wrong:
        failed = True
        print(f"{sys.argv[1]} {kernel}: {'; '.join(wrong)}")
if not counts:
    sys.exit(f"{sys.argv[1]}: no SASS to look at")
print(f"{sys.argv[1]}: instruction counts of {len(counts)} kernels are as designed")
sys.exit(failed)

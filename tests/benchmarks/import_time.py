"""What `import dtensor_ext` adds to `import torch.distributed.tensor`: both in fresh processes, in turn, in one run.

python tests/benchmarks/import_time.py [runs]
"""

from __future__ import annotations

import statistics
import subprocess
import sys

CODE = """
import time
start = time.perf_counter()
import torch.distributed.tensor
core = time.perf_counter() - start
start = time.perf_counter()
import dtensor_ext
print(core, time.perf_counter() - start)
"""


def main(runs: int) -> None:
    core, ours = [], []
    for _ in range(runs):
        out = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True).stdout
        a, b = map(float, out.split())
        core.append(a)
        ours.append(b)
    extra = statistics.median(ours)
    base = statistics.median(core)
    print(f"import torch.distributed.tensor: median {base * 1e3:.0f} ms of {runs} runs")
    print(
        f"then import dtensor_ext:         median {extra * 1e3:.1f} ms ({min(ours) * 1e3:.1f} to {max(ours) * 1e3:.1f})"
    )
    print(f"ratio: {1 + extra / base:.3f}x")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)

"""The peak of memory while a model is loaded, beside what its weights take afterwards.

Each case is a process of its own. Memory is resident: anonymous pages and pages of mapped files, as
``/proc`` counts them, less those before the load. ``over`` is the peak over the loaded weights.

``python bench/load_memory.py MODEL [MODEL ...] [--quantization int4]``
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from quire_bench.reports import print_json, print_table

LOAD = """
import json, sys, torch
from pathlib import Path
from quire.build import layer_kernels
from quire.models.loading import load_model

def resident(*names):
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(lines[name].split()[0]) / 1024 for name in names]

path, dtype, quantization = sys.argv[1:]
kernels = layer_kernels(torch.device("cpu"), quantization or None)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
(before,) = resident("VmRSS")
model = load_model(path, dtype=dtype, kernels=kernels)
peak, anonymous, mapped = resident("VmHWM", "RssAnon", "RssFile")
print(json.dumps([peak - before, anonymous + mapped - before, model.parameter_bytes / 2**20, str(model.dtype)]))
"""


def measured(path: str, dtype: str, quantization: str) -> dict[str, object]:
    """Return a row of the table."""
    command = [sys.executable, "-c", LOAD, path, dtype, quantization]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, after, size, kind = json.loads(done.stdout.splitlines()[-1])
    return {
        "model": f"{Path(path).name} {quantization}".strip(),
        "dtype": kind.removeprefix("torch."),
        "weights MiB": round(size),
        "peak MiB": round(peak),
        "after MiB": round(after),
        "over": round(peak / size, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="", help="int8 or int4")
    given = parser.parse_args()
    rows = [measured(model, given.dtype, given.quantization) for model in given.models]
    print_table(rows)
    print_json({"load memory": rows})


if __name__ == "__main__":
    main()

"""All benchmarks, one after the other: ``python -m benchmarks``, or ``make bench``; under 15 minutes on two cores.

What cannot be measured on this machine (no root for the link, no accelerator) says so and is left out; anything else
that fails makes this fail. ``--quick`` runs each once at its smallest, to see that it runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

CANNOT_MEASURE_HERE = 3
"""Exit code of a benchmark that says that this machine cannot run it."""

_ALL = {
    "host_overhead": ("--repetitions 200", "--layers 2 --repetitions 2"),
    "step_time": ("--repetitions 15", "--layers 1 --hidden 64 --microbatches 1 --repetitions 1"),
    "memory": ("", "--quick"),
    "scaling": ("--repetitions 5", "--repetitions 1"),
    "overlap": ("--repetitions 5", "--layers 1 --microbatches 2 --ratios 1 --repetitions 1"),
    "prediction": ("--repetitions 5", "--layers 1 --microbatches 2 --repetitions 1"),
    "gpu": ("", ""),
}


def main() -> int:
    """Run them; 0 if each ran or said why it cannot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(_ALL)}; all by default")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in _ALL]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; choose from {', '.join(_ALL)}")
    failed = []
    for name in options.names or _ALL:
        usual, quick = _ALL[name]
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            f"benchmarks.{name}",
            *(quick if options.quick else usual).split(),
        ]
        code = subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}, check=False).returncode
        print(f"   {time.perf_counter() - start:.0f} s", flush=True)
        if code not in (0, CANNOT_MEASURE_HERE):
            failed.append(f"{name} (exit code {code})")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

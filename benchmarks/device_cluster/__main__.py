"""Runs the whole product on one GPU: ``python -m benchmarks.device_cluster --out DIR [--wheels FOLDER]``.

A router, a prefill worker and a decode worker that share the GPU (``gpus: 0.5`` each). Tokens of real requests are
compared with the engine alone, with KV by every path; then TTFT, TPOT and tokens/s are measured. Parts, limits, report
and options are those of ``benchmarks.device_run``.

On a machine without Ray, ``--wheels`` names the folder ``.device-wheels-cluster`` that ``make device-wheels`` filled.
Ray's wheel lies there in pieces, so that a machine which takes little at a time can be given one after the other.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.device_cluster.wheels import install


def main() -> int:
    """Exit status 0 when all parts passed."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--wheels", type=Path, help="folder of wheels for a machine that lacks Ray")
    own, options = parser.parse_known_args()
    if importlib.util.find_spec("ray") is None:
        if own.wheels is None:
            sys.exit("Ray is not installed. Install baton, or run `make device-wheels` and add --wheels FOLDER.")
        packages = install(own.wheels, Path(tempfile.gettempdir()) / "baton-device-wheels")
        path = os.pathsep.join((str(packages), str(Path.cwd()), os.environ.get("PYTHONPATH", "")))
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONPATH": path})
    # These need what the wheels bring.
    from benchmarks.device_cluster.parts import cluster_parts
    from benchmarks.device_run import __main__ as device_run

    return device_run.main(options, cluster_parts())


if __name__ == "__main__":
    sys.exit(main())

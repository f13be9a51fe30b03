"""Runs the whole product on one GPU: ``python -m benchmarks.device_cluster --out DIR [--wheels FOLDER]``.

A router, a prefill worker and a decode worker that share the GPU (``gpus: 0.5`` each). Tokens of real requests are
compared with the engine alone, with KV by every path, and TTFT, TPOT and tokens/s are measured. Each part is a process
of its own, as in ``benchmarks.device_run``, and the report in ``DIR`` looks the same.

On a machine without Ray, ``--wheels`` names the folder ``.device-wheels-cluster`` that ``make device-wheels`` filled.
Ray's wheel lies there in pieces, so that a machine which takes little at a time can be given one after the other.
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from benchmarks.device_cluster.parts import cluster_parts
from benchmarks.device_cluster.wheels import WheelsError, install
from benchmarks.device_run.__main__ import main as main_of_parts
from benchmarks.device_run.__main__ import make_parser

_ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Runs the command. Exit status 0: all parts passed or cannot run here; 2: an option is wrong."""
    with tempfile.TemporaryDirectory(prefix="baton-device-cluster-") as folder:
        parts = cluster_parts(Path(folder))
        parser = make_parser(parts, __doc__)
        parser.add_argument("--wheels", type=Path, help="folder of wheels for a machine that lacks Ray")
        try:
            _provide_ray(parser.parse_args().wheels)
        except (WheelsError, OSError) as error:
            parser.error(str(error))
        return main_of_parts(parts=parts, parser=parser)


def _provide_ray(wheels: Path | None) -> None:
    """Makes Ray importable here and in every process that this one starts.

    Raises:
        WheelsError: Ray is neither installed nor among the wheels.
    """
    if wheels is not None and not wheels.is_dir():
        raise WheelsError(f"--wheels: {wheels} is not a folder. `make device-wheels` fills .device-wheels-cluster.")
    if find_spec("ray") is not None:
        return
    if wheels is None:
        raise WheelsError("Ray is not installed. Install baton, or run `make device-wheels` and add --wheels FOLDER.")
    packages = str(install(wheels, Path(tempfile.gettempdir()) / f"baton-device-wheels-{os.getuid()}"))
    sys.path.insert(0, packages)
    os.environ["PYTHONPATH"] = os.pathsep.join((packages, str(_ROOT), os.environ.get("PYTHONPATH", "")))
    if find_spec("ray") is None:
        raise WheelsError(f"--wheels: {wheels} has no wheel of Ray. `make device-wheels` fills .device-wheels-cluster.")


if __name__ == "__main__":
    sys.exit(main())

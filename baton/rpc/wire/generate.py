"""Generates the stubs of this package: ``python -m baton.rpc.wire.generate [OUTPUT_ROOT]``, or ``make proto``."""

from __future__ import annotations

import sys
from pathlib import Path

SCHEMAS = ("kv.proto", "worker.proto")


def generate(repository: Path, output_root: Path) -> None:
    """Writes ``baton/rpc/wire/*_pb2*.py`` below ``output_root``. Raises RuntimeError if a schema does not compile."""
    from grpc_tools import protoc

    # The virtual path makes the generated modules import each other as baton.rpc.wire.*, not as top-level modules.
    arguments = [
        "protoc",
        f"-Ibaton/rpc/wire={repository / 'proto'}",
        f"--python_out={output_root}",
        f"--pyi_out={output_root}",
        f"--grpc_python_out={output_root}",
        *(f"baton/rpc/wire/{schema}" for schema in SCHEMAS),
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError(f"protoc failed for one of {', '.join(SCHEMAS)}; see its message above")


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[3]
    generate(root, Path(sys.argv[1]) if len(sys.argv) > 1 else root)

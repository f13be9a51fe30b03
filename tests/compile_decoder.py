"""Compiles the CPU decoder for the data types that tests use: once per machine, and beside the first tests."""

from __future__ import annotations

import torch

from baton.engine.cpu.build import load_program


def main() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        load_program(dtype)


if __name__ == "__main__":
    main()

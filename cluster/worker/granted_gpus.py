"""The GPUs that Ray granted to this process. Imports no torch, which must not start before they are known."""

from __future__ import annotations

import os

import ray


def hide_ungranted_gpus() -> None:
    """In an actor without a granted GPU, hides the node's GPUs, which Ray leaves visible.

    Call this before anything uses CUDA.
    """
    if not ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

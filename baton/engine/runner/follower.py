"""The process of a follower: ``python -m baton.engine.runner.follower RANK DESCRIPTOR PARENT``."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import socket
import sys
from typing import Any

import torch

from baton.engine.kv_cache.shared_tensors import SharedTensors
from baton.engine.parallel.channel import Inbox
from baton.engine.parallel.followers import EXCHANGE_TIMEOUT_S, device_of
from baton.engine.parallel.group import join_ranks, reach_store
from baton.engine.runner.ranks import Follower

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def main(rank: int, descriptor: int, parent: int) -> None:
    """Joins the ranks, builds the runner that rank 0 asks for, and follows until rank 0 ends."""
    _end_with(parent)
    inbox = Inbox(socket.socket(fileno=descriptor))
    begin = inbox.receive()
    if begin is None:
        return
    _, size, port, device_type, builder, argument, log_level = begin
    logging.basicConfig(level=log_level, format=f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s")
    device = device_of(rank, device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = join_ranks(rank, size, reach_store(port, size, EXCHANGE_TIMEOUT_S), device, EXCHANGE_TIMEOUT_S)
    module_name, _, function_name = builder.partition(":")
    build: Any = getattr(importlib.import_module(module_name), function_name)
    tensors = SharedTensors()
    runner = build(argument, group, device, tensors.allocate)
    inbox.done()
    Follower(runner, tensors, group).run(inbox)


def _end_with(parent: int) -> None:
    """Makes Linux kill this process as soon as its parent ends, even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        sys.exit(1)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except Exception:
        logger.critical("a rank of this worker has failed", exc_info=True)
    # Without the destructors of the process group and of CUDA, which wait for ranks that may have ended.
    logging.shutdown()
    os._exit(1)

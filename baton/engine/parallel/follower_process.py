"""The process of a follower: ``python -m baton.engine.parallel.follower_process RANK DESCRIPTOR PARENT``.

It gives signs of life before it imports torch, which takes seconds.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
from typing import Any

from baton.core.errors import BatonError
from baton.engine.parallel.channel import Inbox
from baton.process.parent import end_with

logger = logging.getLogger(__name__)


def main(rank: int, descriptor: int, parent: int) -> None:
    """Does what rank 0 asks for until it ends."""
    end_with(parent)
    inbox = Inbox(socket.socket(fileno=descriptor))
    begin = inbox.receive()
    if begin is None:
        return
    _, follow, log_level, *arguments = begin
    logging.basicConfig(level=log_level, format=f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s")
    module_name, _, function_name = follow.partition(":")
    function: Any = getattr(importlib.import_module(module_name), function_name)
    function(inbox, rank, *arguments)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except BatonError as error:  # rank 0 has it too
        logger.info("%s", error.message)
    except Exception:
        logger.critical("a rank of this worker has failed", exc_info=True)
    # Without the destructors of the process group and of CUDA, which wait for ranks that may have ended.
    logging.shutdown()
    os._exit(1)

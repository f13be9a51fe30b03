"""Replays beside each other: ``map`` over processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any


@contextmanager
def mapping(num_processes: int) -> Iterator[Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]]:
    """Like ``map``, with results in order as they come, over so many processes; in this one where it is one.

    The processes are new ones: a fork of a process with threads, such as gRPC's, may wait for ever for their locks.
    """
    if num_processes == 1:
        _say_less()
        yield map
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"), initializer=_say_less) as pool:
        yield pool.map


def _say_less() -> None:
    """Studies try pools that are too small on purpose, in which attempts fail and are repeated."""
    logging.getLogger("cluster").setLevel(logging.ERROR)

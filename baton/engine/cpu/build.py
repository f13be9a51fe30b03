"""Compiles the program for this CPU, once per machine, and keeps the result in baton's cache."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from inspect import getfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from baton.core import kv_spec
from baton.core.errors import NotFusableError
from baton.core.progress import report_progress
from baton.engine.cpu.emitter import features
from baton.engine.cpu.threads import Serve
from baton.engine.cpu.tiles import has_tiles
from baton.engine.kv_cache import kv_int8
from baton.engine.models.model_cache import CACHE_VARIABLE, cache_dir

logger = logging.getLogger(__name__)

_SIGNATURE = "void(int64, int64)"
_CONSTANTS = (kv_int8, kv_spec)
"""Modules whose constants are part of the compiled code."""


@cache
def load_program(dtype: torch.dtype) -> Serve:
    """Returns the compiled program for weights of ``dtype``.

    The first time on a machine this takes up to a minute, and :func:`baton.core.progress.report_progress` says how far
    it is.

    Raises:
        NotFusableError: numba is not installed or cannot compile here.
    """
    try:
        numba: Any = import_module("numba")
    except ImportError as error:
        raise NotFusableError(f"numba cannot be used: {error}") from error
    folder = cache_dir() / "kernels" / _version(numba.__version__)
    with _kept_in(folder, numba, f".{dtype}.lock") as is_kept:
        try:
            program: Any = import_module("baton.engine.cpu.program")
            whole_program: Any = import_module("baton.engine.cpu.whole_program")
            source = program.serve_bfloat16 if dtype == torch.bfloat16 else program.serve_float32
            with whole_program.compiled_as_a_whole(_report):
                compiled = _compile(numba, source, folder if is_kept else None)
        except (numba.errors.NumbaError, RuntimeError, OSError) as error:
            raise NotFusableError(f"the program cannot be compiled here: {error}") from error
    if not compiled.cache_hits:
        logger.info("compiled the fused decoder for %s", dtype)
    serve: Serve = compiled.ctypes
    return serve


def _compile(numba: Any, source: Any, folder: Path | None) -> Any:
    """Compiles a function, and keeps the result in ``folder`` if it can be written."""
    if folder is not None:
        try:
            return numba.cfunc(_SIGNATURE, cache=True)(source)
        except OSError as error:  # the disk is full
            _warn(folder, error)
    return numba.cfunc(_SIGNATURE)(source)


def _warn(folder: Path, error: OSError) -> None:
    logger.warning(
        "the compiled program cannot be stored in %s (%s), so every start takes longer; set %s to a writable folder",
        folder,
        error,
        CACHE_VARIABLE,
    )


def _report(num_compiled: int, num_functions: int) -> None:
    """Reports each tenth of the functions; optimising the whole program takes the time of the last tenths."""
    tenths = 10 * num_compiled // num_functions
    if num_compiled == 1 or tenths > 10 * (num_compiled - 1) // num_functions:
        bar = "#" * tenths + "." * (10 - tenths)
        report_progress(f"compiling the CPU decoder, once on this machine [{bar}] {10 * tenths} %")


@contextmanager
def _kept_in(folder: Path, numba: Any, lock_name: str) -> Iterator[bool]:
    """Makes numba keep what it compiles inside the block in ``folder``; yields False if that is not writable.

    One process compiles; others that need the same program wait for it. Each program has a file of its own.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / lock_name)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report_progress("another process compiles the CPU decoder; waiting for it")
            lock.acquire()
    except OSError as error:
        _warn(folder, error)
        yield False
        return
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)  # read when a function is declared, not when it is compiled
    try:
        yield True
    finally:
        numba.config.CACHE_DIR = before
        lock.release()


def _version(numba_version: str) -> str:
    """Digest of everything that the compiled code depends on; numba itself checks only one file and the CPU."""
    digest = hashlib.blake2b(f"{numba_version} {has_tiles()} {sorted(features())}".encode(), digest_size=8)
    folder = Path(__file__).parent
    digest.update(str(folder).encode())  # numba finds programs by the path of their source
    for source in (*sorted(folder.glob("*.py")), *(Path(getfile(module)) for module in _CONSTANTS)):
        digest.update(source.read_bytes())
    return digest.hexdigest()

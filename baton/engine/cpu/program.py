"""One forward of a decoder, run by every thread at once.

A forward is a fixed sequence of stages, each divided into chunks. A thread takes chunks of its own share first and then
remaining chunks of others, and continues when all chunks of the stage are done. So no thread waits for one that came
late or lost its core, except for the one chunk that it may hold.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from baton.engine.cpu.arithmetic import numbers
from baton.engine.cpu.linear import is_alone
from baton.engine.cpu.stages import compute_chunk, num_chunks
from baton.engine.cpu.subnormals import ignore_subnormals, restore_subnormals
from baton.engine.cpu.tables import Model, Pool, Stage, Step
from baton.engine.cpu.tiles import CONFIGURATION_BYTES, configure_tiles, release_tiles
from baton.engine.cpu.vectors import atomic_add, atomic_load, relax

LINE = 64
"""Bytes between counters, so that cores do not contend for one cache line."""
_SPINS_BEFORE_YIELD = 4000
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_sem_post = types.ExternalFunction("sem_post", types.int32(types.int64))
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.int64))


@njit(inline="always", error_model="numpy")
def num_phases(num_layers):
    """Number of stages over all layers, and those after the last."""
    return num_layers * Stage.FEATURES + Stage.LOGITS + 1 - Stage.FEATURES


def counter_bytes(num_layers: int, num_threads: int) -> int:
    """Size of the counters of one forward, which must be zero at its start."""
    return int(num_phases.py_func(num_layers)) * (num_threads + 1) * LINE


@njit(error_model="numpy")
def _wait(spins):
    """Waits briefly; longer waits yield the core to other threads, which may hold the missing chunk."""
    if spins < _SPINS_BEFORE_YIELD:
        relax()
    else:
        _sched_yield()
    return spins + 1


@njit(error_model="numpy")
def _take(counters, phase, thread, num_threads, num_chunks):
    """Takes a free chunk; returns -1 if there is none."""
    share = (num_chunks + num_threads - 1) // num_threads
    base = counters + phase * (num_threads + 1) * LINE
    for turn in range(num_threads):
        owner = (thread + turn) % num_threads
        first = owner * share
        size = min(share, num_chunks - first)
        line = base + owner * LINE
        if size > 0 and atomic_load(line) < size:
            number = atomic_add(line, 1)
            if number < size:
                return first + number
    return -1


@njit(inline="always", error_model="numpy")
def _finish(counters, phase, num_threads, num_chunks, num_done):
    """Reports a thread's chunks, and waits until all are done."""
    line = counters + (phase * (num_threads + 1) + num_threads) * LINE
    if num_done > 0:
        atomic_add(line, num_done)
    spins = 0
    while atomic_load(line) < num_chunks:
        spins = _wait(spins)


@njit(inline="always", error_model="numpy")
def _run(kind, model, step, thread):
    num_layers, num_threads = model[Model.NUM_LAYERS], step[Step.NUM_THREADS]
    counters = step[Step.COUNTERS]
    scratch = step[Step.SCRATCH] + thread * step[Step.SCRATCH_BYTES]
    num_inner = num_layers * Stage.FEATURES
    if model[Model.TILES]:
        configure_tiles(model[Model.TILES] + (CONFIGURATION_BYTES if is_alone(step) else 0))
    for phase in range(num_phases(num_layers)):
        layer, stage = phase // Stage.FEATURES, phase % Stage.FEATURES
        if phase >= num_inner:
            layer, stage = num_layers - 1, Stage.FEATURES + phase - num_inner
        if model[Model.TILES] != 0 and is_alone(step) and (stage == Stage.ATTEND or stage == Stage.OUTPUT):
            # Attention has a row for each query head even for a single token.
            configure_tiles(model[Model.TILES] + (CONFIGURATION_BYTES if stage == Stage.OUTPUT else 0))
        total = num_chunks(kind, model, step, stage)
        done = 0
        chunk = _take(counters, phase, thread, num_threads, total)
        while chunk >= 0:
            compute_chunk(kind, model, step, layer, stage, chunk, scratch)
            done += 1
            chunk = _take(counters, phase, thread, num_threads, total)
        _finish(counters, phase, num_threads, total, done)
    if model[Model.TILES]:
        release_tiles()


@njit(inline="always", error_model="numpy")
def _serve(kind, pool, thread):
    leads = thread == 0
    table = numbers(pool, Pool.SEMAPHORES)
    while True:
        if leads:
            atomic_add(pool + 8 * Pool.OPEN, 1)
            for helper in range(table[Pool.NUM_THREADS] - 1):
                _sem_post(pool + 8 * (Pool.SEMAPHORES + Pool.LINE * helper))
        else:
            _sem_wait(pool + 8 * (Pool.SEMAPHORES + Pool.LINE * (thread - 1)))
            if atomic_load(pool + 8 * Pool.STOPPED) > 0:
                return
            atomic_add(pool + 8 * Pool.ACTIVE, 1)
        # The leader first closes the forward and then checks for active helpers, so one of the two sees the other.
        if atomic_load(pool + 8 * Pool.OPEN) > 0 and thread < table[Pool.NUM_THREADS]:
            before = ignore_subnormals()
            _run(kind, numbers(table[Pool.MODEL], Model.COLUMNS), numbers(table[Pool.STEP], Step.COLUMNS), thread)
            restore_subnormals(before)
        if leads:
            atomic_add(pool + 8 * Pool.OPEN, -1)
            spins = 0
            while atomic_load(pool + 8 * Pool.ACTIVE) > 0:
                spins = _wait(spins)
            return
        atomic_add(pool + 8 * Pool.ACTIVE, -1)


def serve_bfloat16(pool: int, thread: int) -> None:
    """Thread 0 runs one forward; others join forwards until the pool is stopped. ``pool`` is the table's address."""
    _serve(np.uint16(0), pool, thread)


def serve_float32(pool: int, thread: int) -> None:
    """Like :func:`serve_bfloat16`, for a model in float32."""
    _serve(np.float32(0), pool, thread)

"""Profiles from real runs, made of the fits that routers store for every kind of worker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from baton.core.errors import ConfigError
from baton.core.roles import DECODE, PREFILL
from baton.engine.models.model_cache import cache_dir
from cluster.latency.store import FitStore
from cluster.simulation.profile import StepTimes, TimingProfile

_POOL = 1
"""Index of the pool in a worker's kind; see :func:`cluster.latency.feed.traits_of`."""


def newest_fits(folder: Path | None = None) -> dict[str, tuple[float, ...]]:
    """Step coefficients by pool, of the kind of worker with the newest fit.

    Args:
        folder: folder of :class:`cluster.latency.store.FitStore`; ``None`` means the default one.
    """
    folder = folder or cache_dir() / "latency"
    store, fits = FitStore(folder), {}
    for file in sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime):
        try:
            kind = tuple(json.loads(file.read_text(encoding="utf-8"))["kind"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        coefficients = store.load(kind)
        if coefficients and len(kind) > _POOL:
            fits[kind[_POOL]] = coefficients
    return fits


def fitted_profile(base: TimingProfile, fits: Mapping[str, tuple[float, ...]]) -> TimingProfile:
    """``base`` with the step costs of real workers.

    Raises:
        ConfigError: a pool has no fit.
    """
    for pool in (PREFILL, DECODE):
        if pool not in fits:
            raise ConfigError(
                f"There are no measurements of real {pool} workers. Run a cluster under load for a minute "
                "and stop it with "
                "`baton down`; its router stores what it has learned."
            )
    return base.model_copy(update={"step": _step(fits[PREFILL]), "decode_step": _step(fits[DECODE])})


def profile_text(profile: TimingProfile) -> str:
    """The profile as YAML for :func:`cluster.simulation.profile.load_profile`."""
    return yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False)


def _step(coefficients: tuple[float, ...]) -> StepTimes:
    values = (float(f"{value:.6g}") for value in coefficients)
    return StepTimes(**dict(zip(StepTimes.model_fields, values, strict=True)))

"""Stores the fit of each kind of worker in the cache folder, as the prior of the next start."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from baton.core.files import replace_file
from baton.core.step_costs import STEP_PRIOR
from baton.engine.models.model_cache import cache_dir

logger = logging.getLogger(__name__)

_VERSION = 1
_SMALLEST = 1e-3
"""Lower bound of a loaded coefficient as a share of the default prior, since priors must be above zero."""

Kind = tuple[str, ...]


class FitStore:
    """One small file per kind of worker. An invalid file is ignored with a warning.

    Args:
        folder: ``None`` means ``latency`` in :func:`baton.engine.models.model_cache.cache_dir`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_dir() / "latency"
        self._is_failing = False

    def load(self, kind: Kind) -> tuple[float, ...]:
        """Coefficients for :meth:`cluster.latency.latency_model.LatencyModel.add_worker`; empty if there are none."""
        file = self._file(kind)
        try:
            return _read(json.loads(file.read_text(encoding="utf-8")), kind)
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            logger.warning("the stored latency model %s cannot be used and is ignored: %s", file, error)
            return ()

    def save(self, kind: Kind, coefficients: Sequence[float]) -> None:
        """Replaces the file atomically. The first of several failures in a row is logged as a warning."""
        document = {"version": _VERSION, "kind": list(kind), "coefficients": [float(value) for value in coefficients]}
        try:
            replace_file(self._file(kind), json.dumps(document))
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                logger.warning("the latency model cannot be stored in %s: %s", self._folder, error)
            self._is_failing = True

    def _file(self, kind: Kind) -> Path:
        digest = hashlib.blake2b(json.dumps(kind).encode(), digest_size=16).hexdigest()
        return self._folder / f"{digest}.json"


def _read(document: object, kind: Kind) -> tuple[float, ...]:
    """Parses the coefficients. Raises :class:`ValueError` if the document is not a fit of that kind of worker."""
    if not isinstance(document, dict) or document.get("version") != _VERSION or document.get("kind") != list(kind):
        raise ValueError("it belongs to another version or kind of worker")
    values = [float(value) for value in document["coefficients"]]
    if len(values) != len(STEP_PRIOR) or not all(isfinite(value) and value >= 0 for value in values) or not any(values):
        raise ValueError(f"{len(STEP_PRIOR)} coefficients were expected, none negative and at least one positive")
    return tuple(max(value, _SMALLEST * usual) for value, usual in zip(values, STEP_PRIOR, strict=True))

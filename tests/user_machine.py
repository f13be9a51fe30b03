"""The environment of a user's shell, for tests of what users type."""

from __future__ import annotations

import os
from pathlib import Path

from baton.engine.models.model_cache import cache_dir
from baton.process.worker_environment import worker_variables

ROOT = Path(__file__).parents[1]
_OF_THE_TESTS = {"BATON_ENDPOINT", "OMP_NUM_THREADS", *worker_variables()}
"""Variables that a user's shell does not have."""


def user_environment(folder: Path) -> dict[str, str]:
    """Variables with a record of what runs in ``folder``, and the models and the compiled code of the real cache."""
    (folder / "cache").mkdir()
    for kept in ("models", "kernels"):
        (cache_dir() / kept).mkdir(parents=True, exist_ok=True)
        (folder / "cache" / kept).symlink_to(cache_dir() / kept)
    return {
        **{name: value for name, value in os.environ.items() if name not in _OF_THE_TESTS},
        "BATON_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "80",
    }

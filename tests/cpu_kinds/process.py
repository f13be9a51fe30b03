"""Makes a test process run as on another kind of CPU."""

from __future__ import annotations

import os

VARIABLE = "BATON_TEST_CPU_KIND"
"""The kind as which a test process runs. If it is unset, the CPU is used as it is."""


def take_on_kind() -> None:
    """Switches to the kind that :data:`VARIABLE` names, if any. Call this before numba and torch are loaded.

    Raises:
        ValueError: there is no such kind, or this CPU cannot run as it.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return
    # Imported late: every test process calls this, and most do not need numba.
    from tests.cpu_kinds.kinds import KINDS, environment_of, host_features, how_to_run

    if name not in KINDS:
        raise ValueError(f"{VARIABLE} is {name!r}, expected one of {', '.join(KINDS)}.")
    kind, features = KINDS[name], host_features()
    how = how_to_run(kind, features)
    if how is None:
        raise ValueError(f"{VARIABLE} is {name!r}, for which this CPU cannot stand in.")
    os.environ.update(environment_of(kind, features))
    if how == "emulated":
        from tests.cpu_kinds.emulation import emulate  # loads numba, which reads the environment

        emulate(kind, features)

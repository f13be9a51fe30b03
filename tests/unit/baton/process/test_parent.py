"""Children that end with their parent."""

from __future__ import annotations

import subprocess
import sys

import psutil

from baton.process.parent import tied

_FOREVER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
_PARENT = f"""
import subprocess, sys, time
from baton.process.parent import tied
child = subprocess.Popen(tied({_FOREVER!r}), stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), child.pid, flush=True)
time.sleep(600)
"""


def test_a_tied_program_is_the_child_itself_and_has_its_arguments() -> None:
    command = [sys.executable, "-c", "import os, sys; print(os.getpid(), sys.argv[1:])", "a b", "-c"]
    with subprocess.Popen(tied(command), stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate(timeout=60)
    assert out.strip() == f"{process.pid} ['a b', '-c']"


def test_a_tied_program_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        started, pid = parent.stdout.readline().split()
        child = psutil.Process(int(pid))
        assert started == "up"
        parent.kill()
        assert child.wait(60) is None  # raises TimeoutExpired if it goes on

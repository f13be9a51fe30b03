"""The console script, before there is anything to run."""

from __future__ import annotations

import signal
import subprocess
import sys

INTERRUPTED = """
import os, signal, sys
from importlib.abc import MetaPathFinder

class Interrupts(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "cluster.cli.cli":
            os.kill(os.getpid(), signal.SIGINT)

{before}
sys.meta_path.insert(0, Interrupts())
sys.argv = ["baton", "version"]
from cluster.cli.command import main
main()
"""


def test_ctrl_c_during_the_imports_exits_without_a_traceback() -> None:
    # Tests that run in the background may inherit an ignored signal.
    code = INTERRUPTED.format(before="signal.signal(signal.SIGINT, signal.default_int_handler)")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr == ""


def test_a_process_started_with_sigint_ignored_still_ignores_it() -> None:
    code = INTERRUPTED.format(before="signal.signal(signal.SIGINT, signal.SIG_IGN)")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("baton ")

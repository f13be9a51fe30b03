"""The commands of the pages in docs/start to docs/internals, typed in the order of the pages, on one cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs_commands import SHOWN, blocks_to_run
from tests.docs_pages import ROOT, Block
from tests.user_machine import user_environment

BLOCKS = list(blocks_to_run())
DEFAULT_ENDPOINT = "http://127.0.0.1:8000"
LIMIT_S = 240
BATON = f"""#!/bin/sh
# As installed, but on a free port.
command=$1; shift
case $command in up) set -- "$@" --set router.port=0 ;; esac
exec {sys.executable} -m cluster.cli.cli "$command" "$@"
"""


class Shell:
    """A user's shell in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        programs = folder / "bin"
        programs.mkdir()
        (programs / "baton").write_text(BATON)
        (programs / "baton").chmod(0o755)
        (folder / "deploy").symlink_to(ROOT / "deploy")
        self.folder = folder
        self.endpoint = DEFAULT_ENDPOINT
        environment = user_environment(folder)
        path = f"{programs}:{Path(sys.executable).parent}:{environment['PATH']}"
        self.environment = {**environment, "PATH": path, "COLUMNS": "140"}

    def run(self, text: str) -> str:
        """Types the lines of a block and returns what they print. The first one that fails ends it."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text.replace(DEFAULT_ENDPOINT, self.endpoint)],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        if re.search(r"^baton up\b", text, re.MULTILINE):
            [self.endpoint] = re.findall(r"^(http://\S+)$", done.stdout, re.MULTILINE)
        return done.stdout


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("reader"))
    yield shell
    shell.run("baton down")


def name_of(block: Block) -> str:
    return f"{block.page.removeprefix('docs/')}: {block.text.splitlines()[0][:40]}"


@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_the_commands_do_what_the_page_says(shell: Shell, block: Block) -> None:
    printed = shell.run(block.text)
    sys.stdout.write(printed)  # pytest -rP shows it
    for command, expected in SHOWN.items():
        if command in block.text:
            assert re.search(expected, printed), printed

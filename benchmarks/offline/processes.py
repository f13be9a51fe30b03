"""An engine in its own process."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from baton.core.errors import ConfigError
from baton.process.worker_environment import worker_variables

_LOAD_TIMEOUT_S = 600.0
_JOB_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 20.0
# Threads of the previous engine may spin for a moment.
_PAUSE_S = 0.4
_TAIL = 2000
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A process that answers one job at a time and sleeps between jobs."""

    name: str
    commands: IO[str]
    replies: IO[str]
    log_file: Path

    def seconds(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """The seconds to answer all prompts with exactly ``max_tokens`` tokens.

        Raises:
            ConfigError: the process ended, took too long, or gave wrong numbers of tokens.
        """
        time.sleep(_PAUSE_S)
        try:
            self.commands.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
            self.commands.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None
        reply = self.reply(_JOB_TIMEOUT_S)
        if reply["num_tokens"] != [max_tokens] * len(prompts):
            raise self._failure(f"answered with {reply['num_tokens']} tokens instead of {max_tokens} for each prompt")
        return float(reply["seconds"])

    def reply(self, timeout_s: float) -> dict[str, Any]:
        """The process's next reply."""
        line = _read_line(self.replies, timeout_s)
        if not line:
            raise self._failure(f"ended or sent no reply within {timeout_s:g} s")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _failure(self, what: str) -> ConfigError:
        output = self.log_file.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
        return ConfigError(f"The engine {self.name} {what}. Its last output:\n{output}")


@contextmanager
def started(name: str, command: Sequence[str], log_file: Path, *, is_ours: bool = True) -> Iterator[EngineProcess]:
    """Starts an engine, waits until its model is loaded, and stops it at the end.

    Args:
        is_ours: whether to set the environment of workers; peers use their own.

    Raises:
        ConfigError: the engine did not start.
    """
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1"}
    environment |= worker_variables() if is_ours else {}
    with log_file.open("w", encoding="utf-8") as log:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
            )
        except OSError as error:
            raise ConfigError(f"The engine {name} cannot be started: {error}.") from error
    commands, replies = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)
    engine = EngineProcess(name, commands, replies, log_file)
    try:
        engine.reply(_LOAD_TIMEOUT_S)
        yield engine
    finally:
        with suppress(BrokenPipeError):
            commands.close()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        replies.close()


def _read_line(stream: IO[str], timeout_s: float) -> str:
    """The next line; empty when the stream ended or nothing arrived in time."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline() if selector.select(timeout_s) else ""

"""Compares two checkouts of baton: options, configuration keys, metrics, error texts, and tokens through a cluster.

    python -m tests.compare_checkouts OLD NEW [--tokens]

Prints what only one of them has. With ``--tokens``, starts a 1 + 1 cluster of the default model from each checkout, one
after the other, and sends both the same requests: every speculation method, greedy and sampled. Exits with 1 if tokens
differ.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

_IS_MEASUREMENT = ("benchmarks/", "tests/")
_METRIC = re.compile(r"baton_[a-z0-9_]+")
_METHODS = ("none", "auto", "ngram", "suffix", "lookahead", "eagle3")
_PROMPTS = (
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "Write a Python function that adds two numbers.",
    "Count from one to twenty.",
    "Tell me a short story about a sailor and a storm.",
)
_START_TIMEOUT_S = 600.0
_OPTIONS = """
import importlib, json, sys, typer
try:
    cli = importlib.import_module("cluster.cli.cli")
except ModuleNotFoundError:
    cli = importlib.import_module("cluster.cli")
found = []
def walk(command, path):
    for parameter in command.params:
        found.append(" ".join([*path, *parameter.opts, *parameter.secondary_opts, f"(default {parameter.default!r})"]))
    for name, child in sorted(getattr(command, "commands", {}).items()):
        walk(child, [*path, name])
walk(typer.main.get_command(cli.app), ["baton"])
try:
    config = importlib.import_module("cluster.config.config")
except ModuleNotFoundError:
    config = importlib.import_module("cluster.config")
def keys(model, path):
    for name, field in model.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            keys(field.annotation, [*path, name])
        else:
            default = field.get_default(call_default_factory=True)
            found.append(f"config {'.'.join([*path, name])}: {field.annotation} = {default!r}")
keys(config.BatonConfig, [])
print(json.dumps(found))
"""
_UP = """
import importlib, sys
try:
    cli = importlib.import_module("cluster.cli.cli")
except ModuleNotFoundError:
    cli = importlib.import_module("cluster.cli")
sys.exit(cli.run(sys.argv[1:]))
"""


def run(checkout: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=checkout,
        env=_environment(checkout),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def _environment(checkout: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(checkout)}


def options(checkout: Path) -> set[str]:
    """Options of all commands with their defaults, and all keys of the configuration with types and defaults."""
    return set(json.loads(run(checkout, _OPTIONS)))


def served_sources(checkout: Path) -> Iterator[ast.Module]:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    for name in listed.stdout.split():
        if not name.startswith(_IS_MEASUREMENT) and (checkout / name).exists():
            yield ast.parse((checkout / name).read_text(encoding="utf-8"))


def metrics(checkout: Path) -> set[str]:
    """The names in string constants that look like names of metrics."""
    return {
        name
        for tree in served_sources(checkout)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in _METRIC.findall(node.value)
    }


def error_texts(checkout: Path) -> set[str]:
    """The texts of raised exceptions, with ``{}`` in place of expressions."""
    return {
        text
        for tree in served_sources(checkout)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        for argument in node.exc.args
        if (text := _text(argument))
    }


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(value.value) if isinstance(value, ast.Constant) else "{}" for value in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return ""


def tokens(checkout: Path) -> dict[str, Any]:
    """The answers of a cluster of this checkout, by method and temperature."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = (f"router.port={port}", "dtype=float32", "engine.threads=1", "routing.local_prefill=never")
    command = [sys.executable, "-c", _UP, "up", *(word for setting in settings for word in ("--set", setting))]
    process = subprocess.Popen(command, cwd=checkout, env=_environment(checkout))
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120.0) as client:
            _wait(client, process)
            return {
                f"{method}, temperature {temperature}, prompt {number}": _answer(
                    client, prompt, method, temperature, number
                )
                for method in _METHODS
                for temperature in (0.0, 0.8)
                for number, prompt in enumerate(_PROMPTS)
            }
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60.0)


def _wait(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError(f"baton up ended with {process.returncode}")
        try:
            if client.get("/ready").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(1.0)
    raise TimeoutError(f"the cluster was not ready within {_START_TIMEOUT_S:g} s")


def _answer(client: httpx.Client, prompt: str, method: str, temperature: float, seed: int) -> str:
    body = {
        "model": client.get("/v1/models").json()["data"][0]["id"],
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 48,
        "temperature": temperature,
        "seed": seed,
        "speculation": {"method": method},
    }
    response = client.post("/v1/chat/completions", json=body)
    return str(response.json()["choices"][0]["message"]["content"]) if response.is_success else response.text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=lambda text: Path(text).resolve())
    parser.add_argument("new", type=lambda text: Path(text).resolve())
    parser.add_argument("--tokens", action="store_true", help="compare tokens through a cluster, too")
    arguments = parser.parse_args()
    for collect in (options, metrics, error_texts):
        old, new = collect(arguments.old), collect(arguments.new)
        print(f"== {collect.__name__}: {len(old)} before, {len(new)} after")  # noqa: T201 - a report
        for sign, texts in (("-", old - new), ("+", new - old)):
            for text in sorted(texts):
                print(sign, text)  # noqa: T201 - a report
    if not arguments.tokens:
        return 0
    old_tokens, new_tokens = tokens(arguments.old), tokens(arguments.new)
    different = [case for case in old_tokens if old_tokens[case] != new_tokens[case]]
    print(f"== tokens: {len(old_tokens) - len(different)} of {len(old_tokens)} answers are equal")  # noqa: T201 - a report
    for case in different:
        print("!", case, repr(old_tokens[case]), repr(new_tokens[case]), sep="\n  ")  # noqa: T201 - a report
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())

"""The stubs that are checked in are those that the schemas give."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.rpc.wire import kv_pb2, worker_pb2
from baton.rpc.wire.generate import SCHEMAS, generate

REPOSITORY = Path(__file__).resolve().parents[4]


def test_checked_in_stubs_are_up_to_date(tmp_path: Path) -> None:
    generate(REPOSITORY, tmp_path)
    fresh = {path.name: path.read_text() for path in (tmp_path / "baton" / "rpc" / "wire").iterdir()}
    kept = {path.name: path.read_text() for path in (REPOSITORY / "baton" / "rpc" / "wire").glob("*_pb2*.py*")}
    assert fresh.keys() == kept.keys()
    # gRPC's stubs name the version that wrote them; everything else must be equal.
    assert {name: _without_version(text) for name, text in fresh.items()} == {
        name: _without_version(text) for name, text in kept.items()
    }, "run `make proto`"


def _without_version(text: str) -> list[str]:
    return [line for line in text.splitlines() if "VERSION" not in line and "Version" not in line]


def test_every_schema_is_generated() -> None:
    assert {path.name for path in (REPOSITORY / "proto").iterdir()} == set(SCHEMAS)


def test_a_schema_that_does_not_compile_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "proto").mkdir()
    for schema in SCHEMAS:
        (tmp_path / "proto" / schema).write_text("syntax = 'proto3'; message {")
    with pytest.raises(RuntimeError, match="protoc failed"):
        generate(tmp_path, tmp_path)


def test_the_stubs_are_inside_the_package() -> None:
    assert kv_pb2.DESCRIPTOR.name == "baton/rpc/wire/kv.proto"
    assert worker_pb2.DESCRIPTOR.name == "baton/rpc/wire/worker.proto"

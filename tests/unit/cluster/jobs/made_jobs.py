"""Jobs and files for the tests of the store."""

from __future__ import annotations

from typing import Any

from cluster.jobs.job_types import Job, Result, StoredFile, new_id

MODEL = "tiny"
LEASE_S = 10.0


def stored_file(owner: str = "", **changes: Any) -> StoredFile:
    values = {"purpose": "batch", "filename": "in.jsonl", "num_bytes": 5, "created_at": 100, **changes}
    return StoredFile(new_id("file-"), owner, **values)


def made_job(file: StoredFile, **changes: Any) -> Job:
    values = {
        "model": MODEL,
        "endpoint": "/v1/completions",
        "input_file_id": file.id,
        "completion_window": "24h",
        "created_at": 100,
        "expires_at": 1000,
        "keep_s": 500,
        **changes,
    }
    return Job(new_id("batch_"), file.owner, **values)


def result(number: int, text: bytes = b"{}", *, failed: bool = False) -> Result:
    return Result(number, failed, text)

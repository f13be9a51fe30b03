"""What a large upload costs a router in memory: ``python -m tests.large_upload [--help]``.

A process serves files and batches with the gateway's own HTTP server over a fake router. Another one uploads a file of
so many MiB, which must be kept or, over the limit, refused, and prints the largest resident memory of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from cluster.jobs.jobs_config import JobsConfig
from tests.job_services import app_with_jobs
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import FakeGenerator
from tests.unit.cluster.gateway.edge_serving import serving

_MIB = 2**20
_PERIOD_S = 0.02


async def serve(folder: Path, max_mib: int) -> None:
    """Serves until it is killed; prints the address."""
    tokenizer = byte_level_tokenizer()
    config = JobsConfig(dir=str(folder), max_file_bytes=max_mib * _MIB)
    async with (
        app_with_jobs(FakeGenerator(tokenizer, lambda _: []), tokenizer, config) as app,
        serving(app) as (host, port),
    ):
        sys.stdout.write(f"http://{host}:{port}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


class Peak:
    """The largest resident memory of a process, in bytes."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.first = self.largest = self._process.memory_info().rss

    @contextmanager
    def watched(self) -> Iterator[None]:
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_PERIOD_S):
                self.largest = max(self.largest, self._process.memory_info().rss)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def upload(url: str, size_mib: int, peak: Peak) -> str:
    """Uploads a file of so many MiB and describes the answer."""
    with tempfile.TemporaryFile() as content, httpx.Client(base_url=url, timeout=600.0) as http:
        content.truncate(size_mib * _MIB)
        began_s = time.monotonic()
        with peak.watched():
            answer = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("large.jsonl", content)})
        values = answer.json()
        found = values.get("bytes") or values["error"]["code"]
        return f"{answer.status_code} {found} after {time.monotonic() - began_s:.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.large_upload", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the file")
    parser.add_argument("--limit-mib", type=int, default=2048, help="jobs.max_file_bytes")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        asyncio.run(serve(options.serve, options.limit_mib))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.large_upload", "--serve", folder]
        server = subprocess.Popen([*command, "--limit-mib", str(options.limit_mib)], stdout=subprocess.PIPE, text=True)
        try:
            url = server.stdout.readline().strip() if server.stdout is not None else ""
            upload(url, 1, Peak(server.pid))  # what is imported and allocated once
            peak = Peak(server.pid)
            answer = upload(url, options.mib, peak)
        finally:
            server.kill()
            server.wait()
    before, largest = (f"{num_bytes / _MIB:.0f} MiB" for num_bytes in (peak.first, peak.largest))
    sys.stdout.write(f"{answer}\nresident memory: {before} before, at most {largest} during it\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

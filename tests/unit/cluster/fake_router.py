"""A fake router for tests of its clients: real HTTP on a free port of 127.0.0.1 with fixed answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeRouter(ThreadingHTTPServer):
    """Echoes prompts. ``FAIL`` in a prompt gives 400; ``BUSY`` gives 429 once for each prompt."""

    daemon_threads = True
    request_queue_size = 128  # with the default of 5, simultaneous connections are reset

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.bodies: list[dict[str, Any]] = []
        self.turned_away: set[str] = set()
        self.pools = {"prefill": 1, "decode": 1}
        self.states = "ready"
        self.pins = False
        """Whether the autoscaler is on, so that manually set sizes are pinned."""
        self.reason = ""
        self.timelines: dict[str, dict[str, Any]] = {}
        self.admin_answers: dict[str, dict[str, Any]] = {}
        """The answers by path."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keeps clients that disconnect during a request out of standard error."""

    def status(self) -> dict[str, Any]:
        return {
            "model": "fake [model]",
            "uptime_s": 3725.0,
            "requests": {"in_flight": 1, "finished": 20, "cancelled": 4, "rejected": 3, "failed": 2},
            "pools": {name: {"target": count, "workers": self._workers(name)} for name, count in self.pools.items()},
        }

    def _workers(self, pool: str) -> list[dict[str, Any]]:
        worker = {
            "state": self.states, "reason": self.reason, "address": "127.0.0.1:1",
            "in_flight": 3, "running": 2, "max_running": 64, "waiting": 1,
            "kv_blocks_total": 100, "kv_blocks_used": 7, "kv_blocks_cached": 5, "device": "cpu", "pid": 4242,
            "node": "here", "uptime_s": 59.0,
        }  # fmt: skip
        return [{"id": f"{pool}-{index + 1}", **worker} for index in range(self.pools[pool])]


@contextmanager
def running() -> Iterator[FakeRouter]:
    """A router that serves until the block ends."""
    router = FakeRouter()
    thread = threading.Thread(target=router.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield router
    finally:
        router.shutdown()
        thread.join()
        router.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeRouter
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the body waits 40 ms for the acknowledgement of the headers

    def do_GET(self) -> None:
        if self.path == "/admin/status":
            self._send(200, self.server.status())
        elif self.path in self.server.admin_answers:
            self._send(200, self.server.admin_answers[self.path])
        elif self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": "fake", "object": "model"}]})
        elif self.path == "/v1/requests/one/timeline":
            spans = [{"name": name, "start_ms": 0.0, "duration_ms": 2.5} for name in ("queue", "prefill", "total")]
            attributes = {"kv_bytes": 1_000_000}
            self._send(200, {"request_id": "one", "events": [], "spans": spans, "attributes": attributes})
        elif self.path.startswith("/v1/requests?order="):
            limit = int(self.path.rpartition("=")[2])
            listed = [
                {"request_id": name, "outcome": timeline["attributes"].get("outcome")}
                for name, timeline in self.server.timelines.items()
            ]
            self._send(200, {"object": "list", "data": listed[:limit]})
        elif (found := self.server.timelines.get(self.path.split("/")[-2])) is not None:
            self._send(200, found)
        elif self.path == "/broken":
            self._send_bytes(200, b"<html>", "text/html")
        else:
            self._fail(404, "not_found", f"There is no {self.path}.")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.path == "/admin/scale":
            numbers = {name: count for name, count in body.items() if count != "auto"}
            if max(numbers.values(), default=0) > 8:
                return self._fail(400, "invalid_config", "No node has room for so many workers.")
            self.server.pools.update(numbers)
            pools = {name: {"target": count} for name, count in self.server.pools.items()}
            for name in numbers if self.server.pins else ():
                pools[name]["pinned"] = True
            return self._send(200, {"pools": pools})
        if self.path == "/admin/move":
            return self._send(200, {"pools": {name: {"target": count} for name, count in self.server.pools.items()}})
        chat = "messages" in body
        prompt = body["messages"][-1]["content"] if chat else str(body["prompt"])
        if "FAIL" in prompt:
            return self._fail(400, "context_length_exceeded", "The prompt is [too] long.")
        if "BUSY" in prompt and prompt not in self.server.turned_away:
            self.server.turned_away.add(prompt)
            return self._fail(429, "overloaded", "Too many requests.", {"Retry-After": "0.01"})
        if body.get("stream"):
            return self._stream(prompt, chat)
        text = f"echo {prompt}"
        choice = {"index": 0, "finish_reason": "stop"}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return self._send(200, {"id": "one", "choices": [choice], "usage": {"completion_tokens": 3}})

    def _stream(self, prompt: str, chat: bool) -> None:
        lines = [": a comment", ""]
        for word in ["echo", " ", prompt]:
            piece = {"delta": {"content": word}} if chat else {"text": word}
            lines += [f"data: {json.dumps({'id': 'one', 'choices': [{'index': 0, **piece}]})}", ""]
        end = {"index": 0, "delta": {}, "finish_reason": "length"} if chat else {"text": "", "finish_reason": "length"}
        lines += [f"data: {json.dumps({'id': 'one', 'choices': [end]})}", ""]
        if "DIE" in prompt:
            lines += [f"data: {json.dumps({'error': {'message': 'The worker died.', 'code': 'worker_lost'}})}", ""]
        else:
            usage = {"prompt_tokens": 11, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
            lines += [f"data: {json.dumps({'id': 'one', 'choices': [], 'usage': usage})}", ""]
        if "CUT" not in prompt:
            lines += ["data: [DONE]", ""]
        self._send_bytes(200, "\n".join([*lines, ""]).encode(), "text/event-stream")

    def _fail(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        error = {"message": message, "type": "invalid_request_error", "code": code, "param": None}
        self._send_bytes(status, json.dumps({"error": error}).encode(), "application/json", headers)

    def _send(self, status: int, values: dict[str, Any]) -> None:
        self._send_bytes(status, json.dumps(values).encode(), "application/json")

    def _send_bytes(self, status: int, content: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing."""

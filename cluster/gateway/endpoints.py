"""The endpoints of the gateway, as `GET /`, ``/openapi.json`` and error messages list them."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.gateway.anthropic.parameter_table import COUNT_TOKENS, MESSAGES
from cluster.gateway.openai.parameters import CHAT, COMPLETIONS
from cluster.gateway.responses.parameter_table import RESPONSES


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of a path. ``answer`` names the schema of its answer in ``/openapi.json``; empty if it is not JSON."""

    method: str
    path: str
    summary: str
    answer: str = "Object"

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


ENDPOINTS = (
    Endpoint("GET", "/", "Name, version and endpoints; for browsers, a page"),
    Endpoint("GET", "/health", "Whether the router answers"),
    Endpoint("GET", "/version", "The version of baton", answer="Version"),
    Endpoint("GET", "/ready", "Whether every pool has a healthy worker"),
    Endpoint("GET", "/metrics", "Metrics in Prometheus' text format", answer=""),
    Endpoint("GET", "/openapi.json", "This description of the API"),
    Endpoint("GET", "/docs", "This description of the API as a page", answer=""),
    Endpoint("GET", "/v1/models", "The names of the served model", answer="ModelList"),
    Endpoint("GET", "/v1/models/{model}", "The served model by one of its names", answer="Model"),
    Endpoint("GET", "/v1/speculation", "The speculation methods, and which can run here", answer="MethodList"),
    Endpoint("POST", COMPLETIONS, "Continue prompts", answer="Completion"),
    Endpoint("POST", CHAT, "Answer a conversation", answer="ChatCompletion"),
    Endpoint("POST", RESPONSES, "Answer a conversation, in the form of OpenAI's Responses API", answer="Response"),
    Endpoint("POST", MESSAGES, "Answer a conversation, in the form of Anthropic's Messages API", answer="Message"),
    Endpoint("POST", COUNT_TOKENS, "The number of tokens of such a conversation", answer="TokenCount"),
    Endpoint("POST", "/v1/files", "Upload a file of requests", answer="File"),
    Endpoint("GET", "/v1/files", "List your files", answer="FileList"),
    Endpoint("GET", "/v1/files/{file_id}", "One of your files", answer="File"),
    Endpoint("DELETE", "/v1/files/{file_id}", "Delete a file", answer="DeletedFile"),
    Endpoint("GET", "/v1/files/{file_id}/content", "The content of a file", answer=""),
    Endpoint("POST", "/v1/batches", "Run the requests of a file in spare capacity", answer="Batch"),
    Endpoint("GET", "/v1/batches", "List your batches", answer="BatchList"),
    Endpoint("GET", "/v1/batches/{batch_id}", "One of your batches", answer="Batch"),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", "End a batch; what is done is kept", answer="Batch"),
    Endpoint("POST", "/tokenize", "Token ids of a text or a conversation", answer="Tokens"),
    Endpoint("POST", "/detokenize", "The text of token ids", answer="Text"),
    Endpoint("GET", "/v1/requests", "Requests whose timelines are kept"),
    Endpoint("GET", "/v1/requests/{id}/timeline", "Where the time of a request went"),
    Endpoint("GET", "/admin/status", "Pools, workers and requests in flight"),
    Endpoint("GET", "/admin/live", "Snapshots of status, plan and slow requests, as server-sent events", answer=""),
    Endpoint("POST", "/admin/scale", "Set the number of workers of pools"),
    Endpoint("POST", "/admin/move", "Move a worker to the other pool"),
    Endpoint("GET", "/admin/plan", "The autoscaler's next decision and its reasons"),
    Endpoint("GET", "/admin/advise", "A better use of the same workers, and better drafts"),
    Endpoint("GET", "/admin/trace", "Times, lengths and shared prefixes of recorded requests"),
)

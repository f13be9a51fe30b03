"""The parameters of ``/v1/messages`` and ``/v1/messages/count_tokens``, and what the gateway does with each."""

from __future__ import annotations

from cluster.gateway.openai.parameters import Parameter, accepted, honoured, refused
from cluster.gateway.openai.shared_parameters import EXTENSIONS, as_in_chats

MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
_BOTH = (MESSAGES, COUNT_TOKENS)
_STATELESS = "nothing is stored; send the whole conversation"
_NO_CONTAINER = "there are no server tools"
_CLEAR_NOTHING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

PROMPT_PARAMETERS: tuple[Parameter, ...] = (
    honoured("model", "Anthropic", "any name in `/v1/models`, which the answer echoes; absent: the first one", _BOTH),
    honoured("messages", "Anthropic", "text, tool uses, their results, thinking; an assistant's last text is continued",
             endpoints=_BOTH),
    honoured("system", "Anthropic", "text or blocks of text", _BOTH),
    honoured("tools", "Anthropic", "client tools only; strict with `strict: true`", _BOTH, max_items=1024),
    honoured("tool_choice", "Anthropic", "`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`", _BOTH),
    honoured("thinking", "Anthropic", "`enabled`, `adaptive`, `disabled`; `budget_tokens` is not enforced", _BOTH),
    honoured("output_config", "Anthropic", "`effort`, and `format` with a JSON schema", _BOTH),

    accepted("cache_control", "Anthropic", "object", "the prefix cache is automatic", _BOTH),
    accepted("metadata", "Anthropic", "object", "nothing is stored", _BOTH, max_items=64),
    accepted("diagnostics", "Anthropic", "object", "`usage` has the number of cached tokens", _BOTH),

    refused("speed", "Anthropic", "send `service_tier`", "standard", endpoints=_BOTH),
    refused("context_management", "Anthropic", "shorten the messages", {"edits": []}, _CLEAR_NOTHING, {},
            endpoints=_BOTH),
    refused("compaction", "Anthropic", "shorten the messages", endpoints=_BOTH),
    refused("mcp_servers", "Anthropic", _NO_CONTAINER, [], endpoints=_BOTH),
    refused("billing_policy", "Anthropic", "there are no bills", endpoints=_BOTH),
)  # fmt: skip
"""Those of both endpoints."""

MESSAGES_PARAMETERS: tuple[Parameter, ...] = (
    *PROMPT_PARAMETERS,
    honoured("max_tokens", "Anthropic", "required; the rest of the context is its limit", (MESSAGES,)),
    honoured("stop_sequences", "Anthropic", "up to 16, of up to 1,024 characters each", (MESSAGES,)),
    honoured("stream", "Anthropic", "server-sent events", (MESSAGES,)),
    honoured("service_tier", "Anthropic", "`auto`, `standard_only`, or an [SLO class](slo.md)", (MESSAGES,)),
    *as_in_chats(MESSAGES, ("temperature", "top_p", *EXTENSIONS)),

    refused("container", "Anthropic", _NO_CONTAINER, endpoints=(MESSAGES,)),
    refused("inference_geo", "Anthropic", "the router chooses the workers", endpoints=(MESSAGES,)),
    refused("fallbacks", "Anthropic", "one model is served", [], endpoints=(MESSAGES,)),
    refused("fallback_credit_token", "Anthropic", "one model is served", endpoints=(MESSAGES,)),
    refused("thread", "Anthropic", _STATELESS, endpoints=(MESSAGES,)),
)  # fmt: skip

"""The parameters of ``/v1/responses``, and what the gateway does with each."""

from __future__ import annotations

from cluster.gateway.openai.parameters import Parameter, accepted, honoured, refused
from cluster.gateway.openai.shared_parameters import EXTENSIONS, as_in_chats

RESPONSES = "/v1/responses"
_HERE = (RESPONSES,)
_STATELESS = "nothing is stored; send the whole conversation as `input`"

RESPONSES_PARAMETERS: tuple[Parameter, ...] = (
    honoured("input", "OpenAI", "text, or items: messages, function calls and their outputs, reasoning", _HERE),
    honoured("instructions", "OpenAI", "a system message before the input", _HERE),
    honoured("max_output_tokens", "OpenAI", "default: the rest of the context, whose limit it is", _HERE),
    honoured("text", "OpenAI", "`format`: `text`, `json_object`, `json_schema`; `verbosity`: medium", _HERE),
    honoured("reasoning", "OpenAI", "`effort`; the answer has the reasoning itself, so `summary` has no effect", _HERE),
    honoured("tools", "OpenAI", "functions only; strict with `strict: true` alone", _HERE, max_items=1024),
    honoured("tool_choice", "OpenAI", "`auto`, `none`, `required`, a function, or `allowed_tools`", _HERE),
    honoured("parallel_tool_calls", "OpenAI", "false: the answer has one call at most", _HERE),
    honoured("metadata", "OpenAI", "part of the answer; nothing is stored", _HERE, max_items=64),
    honoured("include", "OpenAI", "any known value but `message.output_text.logprobs`; there is nothing to add", _HERE),
    *as_in_chats(RESPONSES, ("model", "temperature", "top_p", "stream", "service_tier")),
    *as_in_chats(RESPONSES, ("chat_template_kwargs", *EXTENSIONS)),

    *as_in_chats(RESPONSES, ("user", "safety_identifier", "prompt_cache_key")),
    accepted("max_tool_calls", "OpenAI", "integer", "limits hosted tools, of which there are none", _HERE),
    accepted("image", "OpenAI", "object", "there are no images", _HERE),

    refused("store", "OpenAI", "nothing is stored; an absent value is taken for false", False, endpoints=_HERE,
            expected="false or absent, because nothing is stored"),
    refused("previous_response_id", "OpenAI", _STATELESS, endpoints=_HERE),
    refused("conversation", "OpenAI", _STATELESS, endpoints=_HERE),
    refused("background", "OpenAI", "stream the answer", False, endpoints=_HERE),
    refused("prompt", "OpenAI", "there are no stored prompts; send `input`", endpoints=_HERE),
    refused("stream_options", "OpenAI", "streams are not obfuscated", {"include_obfuscation": False}, {},
            endpoints=_HERE),
    refused("truncation", "OpenAI", "shorten the input", "disabled", endpoints=_HERE),
    refused("context_management", "OpenAI", "shorten the input", [], endpoints=_HERE),
    refused("top_logprobs", "OpenAI", "send the request to `/v1/chat/completions`", 0, endpoints=_HERE),
    refused("access_programs", "OpenAI", "there are none", {}, endpoints=_HERE),
    *as_in_chats(RESPONSES, ("moderation", "prompt_cache_retention", "prompt_cache_options")),
)  # fmt: skip

"""Bad requests and the answers they must get, as data: the same table runs against fakes and against a live cluster."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class BadInput:
    """A request that must be refused.

    Attributes:
        body: bytes are sent unchanged, other values as JSON; ``None`` sends no body.
        code: ``error.code`` of the answer.
        param: ``error.param`` of the answer.
        fragment: must occur in ``error.message``.
    """

    name: str
    path: str
    body: Any
    status: int
    code: str
    param: str | None
    fragment: str
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})

    @property
    def content(self) -> bytes | None:
        if self.body is None or isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body).encode()


def bad_inputs(model: str, context_length: int) -> list[BadInput]:
    """Every bad request, for an endpoint that serves ``model`` with a context of ``context_length`` tokens."""
    return [
        *_malformed_bodies(),
        *_routes(),
        *_common_parameters(model, context_length),
        *_completions(model, context_length),
        *_chats(model, context_length),
        *_admin(),
    ]


def _malformed_bodies() -> list[BadInput]:
    def body(name: str, content: bytes, fragment: str, path: str = COMPLETIONS) -> BadInput:
        return BadInput(name, path, content, 400, "invalid_request", None, fragment)

    json_type = {"Content-Type": "application/json"}
    invalid = "invalid_request"
    media_type = "unsupported_media_type"
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    latin = {"Content-Type": "application/json; charset=latin-1"}
    gzip = {**json_type, "Content-Encoding": "gzip"}
    duplicate = b'{"model": "m", "model": "m"}'
    huge = b'{"model": "m", "prompt": "' + b"a" * (10 * 1024 * 1024) + b'"}'
    return [
        body("no body", b"", "not valid JSON"),
        body("not JSON", b"hello", "not valid JSON"),
        body("cut JSON", b'{"model": "m", "prompt": "a', "not valid JSON"),
        body("trailing comma", b'{"model": "m",}', "not valid JSON", CHAT),
        body("NaN", b'{"temperature": NaN}', "not valid JSON"),
        body("Infinity", b'{"temperature": Infinity}', "not valid JSON"),
        body("not UTF-8", b'{"model": "caf\xe9"}', "not UTF-8: byte 14 is 0xE9"),
        body("UTF-16", '{"model": "m"}'.encode("utf-16"), "not UTF-8: byte 0 is 0xFF"),
        body("broken escape", b'{"prompt": "\\ud80"}', "not valid JSON"),
        body("deep arrays", b"[" * 200_000, "not valid JSON"),
        body("deep objects", b'{"a":' * 20_000, "not valid JSON", CHAT),
        body("an array", b"[]", "must be a JSON object, got an array"),
        body("a string", b'"hi"', "must be a JSON object, got a string"),
        body("null", b"null", "must be a JSON object, got null"),
        BadInput("key twice", COMPLETIONS, duplicate, 400, invalid, "model", "'model' occurs twice"),
        BadInput("form", COMPLETIONS, b"a=b", 415, media_type, None, "must be application/json", headers=form),
        BadInput("no type", COMPLETIONS, b"{}", 415, media_type, None, "Content-Type is missing", headers={}),
        BadInput("other charset", CHAT, b"{}", 415, media_type, None, "must be UTF-8", headers=latin),
        BadInput("compressed", CHAT, b"{}", 415, media_type, None, "uncompressed", headers=gzip),
        BadInput("10 MB", COMPLETIONS, huge, 413, "request_too_large", None, "larger than the limit"),
        BadInput("10 MB chat", CHAT, huge, 413, "request_too_large", None, "larger than the limit"),
    ]


def _routes() -> list[BadInput]:
    return [
        BadInput("no route", "/v1/completion", {}, 404, "not_found", None, "Did you mean POST /v1/completions"),
        BadInput("no such API", "/v1/embeddings", {}, 404, "not_found", None, "no endpoint"),
        BadInput("wrong method", COMPLETIONS, None, 405, "invalid_request", None, "must be POST", method="GET"),
        BadInput("model of others", "/v1/models/gpt-4", None, 404, "model_not_found", "model", "'gpt-4'", "GET"),
        BadInput(
            "timeline of nobody", "/v1/requests/no-such-id/timeline", None, 404, "not_found", "request_id",
            "'no-such-id'", "GET",
        ),
    ]  # fmt: skip


def _common_parameters(model: str, context_length: int) -> list[BadInput]:
    cases: list[tuple[str, dict[str, Any], str, str, str]] = [
        ("max_tokens zero", {"max_tokens": 0}, "invalid_request", "max_tokens", "at least 1, got 0"),
        ("max_tokens negative", {"max_tokens": -5}, "invalid_request", "max_tokens", "at least 1, got -5"),
        ("max_tokens beyond 64 bits", {"max_tokens": 10**30}, "invalid_request", "max_tokens", "an integer"),
        ("max_tokens string", {"max_tokens": "5"}, "invalid_request", "max_tokens", "got a string ('5')"),
        ("max_tokens fraction", {"max_tokens": 5.5}, "invalid_request", "max_tokens", "got a number (5.5)"),
        ("max_tokens boolean", {"max_tokens": True}, "invalid_request", "max_tokens", "got a boolean (true)"),
        ("temperature string", {"temperature": "hot"}, "invalid_request", "temperature", "must be a number"),
        ("temperature boolean", {"temperature": True}, "invalid_request", "temperature", "must be a number"),
        ("temperature negative", {"temperature": -0.1}, "invalid_request", "temperature", "between 0 and 100"),
        ("top_p below zero", {"top_p": -0.1}, "invalid_request", "top_p", "[0, 1]"),
        ("top_p above one", {"top_p": 1.1}, "invalid_request", "top_p", "[0, 1]"),
        ("top_k negative", {"top_k": -2}, "invalid_request", "top_k", "-1"),
        ("top_k fraction", {"top_k": 1.5}, "invalid_request", "top_k", "an integer"),
        ("min_p above one", {"min_p": 2}, "invalid_request", "min_p", "[0, 1]"),
        ("penalty zero", {"repetition_penalty": 0}, "invalid_request", "repetition_penalty", "between 0.01 and 100"),
        ("presence", {"presence_penalty": 3}, "invalid_request", "presence_penalty", "between -2 and 2"),
        ("frequency", {"frequency_penalty": -3}, "invalid_request", "frequency_penalty", "between -2 and 2"),
        ("n zero", {"n": 0}, "invalid_request", "n", "between 1 and 128"),
        ("n huge", {"n": 10**6}, "invalid_request", "n", "between 1 and 128"),
        ("seed string", {"seed": "1"}, "invalid_request", "seed", "must be an integer"),
        ("seed beyond 64 bits", {"seed": 2**63}, "invalid_request", "seed", "2^63"),
        ("seed of 70 bits", {"seed": 2**70}, "invalid_request", "seed", "between -2^63 and 2^63 - 1, got 118"),
        ("stop number", {"stop": 5}, "invalid_request", "stop", "string or an array of strings"),
        ("stop mixed", {"stop": ["a", 1]}, "invalid_request", "stop", "string or an array of strings"),
        ("stop empty string", {"stop": ""}, "invalid_request", "stop", "1 to"),
        ("too many stops", {"stop": ["a"] * 17}, "invalid_request", "stop", "at most 16"),
        ("stream string", {"stream": "yes"}, "invalid_request", "stream", "must be a boolean"),
        ("stream option unknown", {"stream": True, "stream_options": {"include_usag": True}}, "invalid_request",
         "stream_options.include_usag", "did you mean 'include_usage'"),
        ("obfuscation", {"stream": True, "stream_options": {"include_obfuscation": True}}, "unsupported_parameter",
         "stream_options", "include_obfuscation"),
        ("bias key", {"logit_bias": {"one": 1}}, "invalid_request", "logit_bias", "token ids"),
        ("bias of no token", {"logit_bias": {"99999999": 1}}, "invalid_request", "logit_bias", "99999999"),
        ("bias too strong", {"logit_bias": {"1": 101}}, "invalid_request", "logit_bias", "between -100 and 100"),
        ("bias array", {"logit_bias": [1]}, "invalid_request", "logit_bias", "must be an object"),
        ("stop token unknown", {"stop_token_ids": [10**9]}, "invalid_request", "stop_token_ids", "token ids go from 0"),
        ("stop token boolean", {"stop_token_ids": [True]}, "invalid_request", "stop_token_ids[0]", "integer"),
        ("min above max", {"min_tokens": 9, "max_tokens": 4}, "invalid_request", "min_tokens", "max_tokens"),
        ("ignore_eos number", {"ignore_eos": 1}, "invalid_request", "ignore_eos", "must be a boolean"),
        ("unknown", {"temprature": 1.0}, "invalid_request", "temprature", "did you mean 'temperature'"),
        ("extra_body", {"extra_body": {}}, "invalid_request", "extra_body", "write its keys beside the other"),
        ("ignore_eos", {"ignore_eos": True, "regex": "a"}, "invalid_request", "ignore_eos", "schema, got true."),
        ("other model", {"model": "gpt-4"}, "model_not_found", "model", model),
        ("model number", {"model": 4}, "invalid_request", "model", "must be a string"),
        ("stored", {"store": True}, "unsupported_parameter", "store", "must be false"),
        ("unknown tier", {"service_tier": "scale"}, "invalid_request", "service_tier", "auto, default, flex, priority"),
        ("tier number", {"service_tier": 1}, "invalid_request", "service_tier", "must be a string"),
        ("user number", {"user": 7}, "invalid_request", "user", "must be a string"),
        ("odd metadata", {"metadata": "a"}, "invalid_request", "metadata", "an object"),
        ("odd priority", {"priority": "high"}, "invalid_request", "priority", "an integer"),
        ("truncated to nothing", {"truncate_prompt_tokens": 0}, "invalid_request", "truncate_prompt_tokens", "least 1"),
    ]  # fmt: skip
    inputs = []
    for path, base in (
        (COMPLETIONS, {"model": model, "prompt": "hello"}),
        (CHAT, {"model": model, "messages": [{"role": "user", "content": "hello"}]}),
    ):
        for name, changes, code, param, fragment in cases:
            status = 404 if code == "model_not_found" else 400
            inputs.append(BadInput(f"{path}: {name}", path, {**base, **changes}, status, code, param, fragment))
    return inputs


def _completions(model: str, context_length: int) -> list[BadInput]:
    def case(name: str, changes: dict[str, Any], param: str, fragment: str, code: str = "invalid_request") -> BadInput:
        return BadInput(name, COMPLETIONS, {"model": model, "prompt": "hello", **changes}, 400, code, param, fragment)

    too_long = [1] * context_length
    return [
        case("prompt missing", {"prompt": None}, "prompt", "prompt is missing"),
        case("prompt empty", {"prompt": ""}, "prompt", "empty"),
        case("prompt empty array", {"prompt": []}, "prompt", "empty"),
        case("prompt with an empty one", {"prompt": ["a", ""]}, "prompt", "prompt 1 is empty"),
        case("prompt with empty tokens", {"prompt": [[]]}, "prompt", "empty"),
        case("prompt number", {"prompt": 5}, "prompt", "got an integer"),
        case("prompt object", {"prompt": {"text": "a"}}, "prompt", "got an object"),
        case("prompt booleans", {"prompt": [True, False]}, "prompt", "entry 0 is a boolean"),
        case("prompt fractions", {"prompt": [1, 2.5]}, "prompt", "entry 1 is a number"),
        case("prompt mixed", {"prompt": ["a", [1]]}, "prompt", "must not mix"),
        case("token id negative", {"prompt": [1, -1]}, "prompt", "token id -1"),
        case("token id too high", {"prompt": [1, 10**9]}, "prompt", "token id 1000000000"),
        case("token id in a list of lists", {"prompt": [[1], [10**15]]}, "prompt", "token ids go from 0 to"),
        case("token id beyond 64 bits", {"prompt": [2**70]}, "prompt", "a token id of more than 64 bits"),
        case("prompt fills the context", {"prompt": too_long}, "prompt", str(context_length),
             "context_length_exceeded"),
        case("max_tokens huge", {"max_tokens": 10**18}, "max_tokens", str(context_length), "context_length_exceeded"),
        case("prompt plus output too long", {"prompt": too_long[2:], "max_tokens": 3}, "max_tokens",
             "ask for at most 2", "context_length_exceeded"),
        case("text over the context", {"prompt": "hello world, " * 3 * context_length}, "prompt",
             str(context_length), "context_length_exceeded"),
        case("text far over the context", {"prompt": "a " * 2_000_000}, "prompt", str(context_length),
             "context_length_exceeded"),
        case("too many sequences", {"prompt": ["a"] * 100, "n": 100}, "n", "at most 1024"),
        case("too many prompts", {"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
        case("logprobs too many", {"logprobs": 21}, "logprobs", "between 0 and 20"),
        case("logprobs negative", {"logprobs": -1}, "logprobs", "between 0 and 20"),
        case("logprobs boolean", {"logprobs": True}, "logprobs", "must be an integer"),
        case("prompt_logprobs high", {"prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
        case("echo of too many logprobs", {"echo": True, "logprobs": 21}, "logprobs", "between 0 and 20"),
        case("no tokens without echo", {"max_tokens": 0, "logprobs": 1}, "max_tokens", "at least 1"),
        case("best_of", {"best_of": 3}, "best_of", "equals n", "unsupported_parameter"),
        case("suffix", {"suffix": "end"}, "suffix", "'end'", "unsupported_parameter"),
        case("messages", {"messages": []}, "messages", "of /v1/chat/completions only", "unsupported_parameter"),
        case("max_completion_tokens", {"max_completion_tokens": 5}, "max_completion_tokens", "chat/completions only",
             "unsupported_parameter"),
    ]  # fmt: skip


def _chats(model: str, context_length: int) -> list[BadInput]:
    hello = {"role": "user", "content": "hello"}

    def case(name: str, changes: dict[str, Any], param: str, fragment: str, code: str = "invalid_request") -> BadInput:
        return BadInput(name, CHAT, {"model": model, "messages": [hello], **changes}, 400, code, param, fragment)

    def message(name: str, body: Any, path: str, fragment: str, code: str = "invalid_request") -> BadInput:
        return case(f"message: {name}", {"messages": [body]}, f"messages[0]{path}", fragment, code)

    unsupported = "unsupported_parameter"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    return [
        case("messages missing", {"messages": None}, "messages", "missing"),
        case("messages empty", {"messages": []}, "messages", "at least one"),
        case("messages string", {"messages": "hello"}, "messages", "must be an array"),
        message("string", "hello", "", "messages[0] must be an object"),
        message("no role", {"content": "a"}, ".role", "messages[0].role"),
        message("odd role", {"role": "robot", "content": "a"}, ".role", "'robot'"),
        message("role list", {"role": ["user"], "content": "a"}, ".role", "messages[0].role"),
        message("result of no call", {"role": "tool", "content": "a"}, ".tool_call_id", "must be the id of a call"),
        message("function role", {"role": "function", "content": "a", "name": "f"}, ".role", "'function'", unsupported),
        message("content number", {"role": "user", "content": 5}, ".content", "a string or an array of text parts"),
        message("image", {"role": "user", "content": [image]}, ".content[0].type", "'image_url'", unsupported),
        message("part string", {"role": "user", "content": ["a"]}, ".content[0]", "must be an object"),
        message("part without text", {"role": "user", "content": [{"type": "text"}]}, ".content[0].text", "a string"),
        message("unknown key", {**hello, "nam": "x"}, ".nam", "did you mean 'name'"),
        message("name number", {**hello, "name": 5}, ".name", "messages[0].name"),
        message("call without id", {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
                ".tool_calls[0].id", "must be a string"),
        message("call that is no object", {"role": "assistant", "tool_calls": ["f"]}, ".tool_calls[0]", "an object"),
        message("calls that are no array", {"role": "assistant", "tool_calls": tool}, ".tool_calls", "an array"),
        message("call of a custom tool", {"role": "assistant", "tool_calls": [{"id": "a", "type": "custom"}]},
                ".tool_calls[0].type", "'custom'", unsupported),
        message("arguments as a list", {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f",
                "arguments": []}}]}, ".tool_calls[0].function.arguments", "must be a string"),
        case("tool of another type", {"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'", unsupported),
        case("tool without a function", {"tools": [{"type": "function"}]}, "tools[0].function", "an object"),
        case("tool without a name", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name",
             "got null"),
        case("tool with an odd name", {"tools": [{"type": "function", "function": {"name": "a b"}}]},
             "tools[0].function.name", "'a b'"),
        case("two tools of one name", {"tools": [tool, tool]}, "tools", "two functions"),
        case("many tools", {"tools": [tool] * 1025}, "tools", "at most 1024"),
        case("tool with an unknown key", {"tools": [{**tool, "functoin": {}}]}, "tools[0].functoin",
             "'function'"),
        case("strict number", {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
             "tools[0].function.strict", "must be a boolean"),
        case("call without tools", {"tool_choice": "required"}, "tool_choice", "tools is empty"),
        case("choice of an unknown tool", {"tools": [tool], "tool_choice": {"type": "function", "function":
             {"name": "g"}}}, "tool_choice", "'g'"),
        case("odd choice", {"tools": [tool], "tool_choice": "any"}, "tool_choice", "'any'"),
        case("choice without a name", {"tools": [tool], "tool_choice": {"type": "function"}},
             "tool_choice.function.name", "must be a string"),
        case("choice with an unknown key", {"tools": [tool], "tool_choice": {"type": "function", "function":
             {"name": "f", "nam": 1}}}, "tool_choice.function.nam", "did you mean 'name'"),
        case("choice with a bare name", {"tools": [tool], "tool_choice": {"type": "function", "name": "f"}},
             "tool_choice.name", "put it into 'function'"),
        case("parameters beside a function", {"tools": [{"type": "function", "parameters": {}}]},
             "tools[0].parameters", "put it into 'function'"),
        case("tool in Anthropic's form", {"tools": [{"type": "function", "function": {"name": "f",
             "input_schema": {}}}]}, "tools[0].function.input_schema", "send it as 'parameters'"),
        case("strict as text", {"response_format": {"type": "json_schema", "json_schema": {"schema": {},
             "strict": "x"}}}, "response_format.json_schema.strict", "must be a boolean, got 'x'"),
        case("schema as a number", {"guided_json": 5}, "guided_json", "guided_json must be an object, got"),
        case("choices that are numbers", {"guided_choice": [5]}, "guided_choice[0]", "must be a string"),
        case("allowed tools with an unknown key", {"tools": [tool], "tool_choice": {"type": "allowed_tools",
             "allowed_tools": {"mode": "auto", "tools": [tool], "strict": True}}}, "tool_choice.allowed_tools.strict",
             "expected one of mode, tools"),
        case("allowed tools without tools", {"tools": [tool], "tool_choice": {"type": "allowed_tools"}},
             "tool_choice.allowed_tools", "at least one of the tools"),
        case("parallel calls as a number", {"parallel_tool_calls": 1}, "parallel_tool_calls", "must be a boolean"),
        case("functions", {"functions": [{"name": "f"}]}, "functions", "not supported", unsupported),
        case(
            "another format",
            {"response_format": {"type": "structural_tag"}},
            "response_format.type",
            "json_schema",
            unsupported,
        ),
        case("audio", {"audio": {"voice": "a", "format": "wav"}}, "audio", "not supported", unsupported),
        case("modalities", {"modalities": ["text", "audio"]}, "modalities", "text", unsupported),
        case("web search", {"web_search_options": {}}, "web_search_options", "not supported", unsupported),
        case("reasoning", {"reasoning_effort": "extreme"}, "reasoning_effort", "'none', 'minimal', 'low'"),
        message("reasoning number", {"role": "assistant", "reasoning_content": 5}, ".reasoning_content", "a string"),
        message("refusal list", {"role": "assistant", "refusal": ["no"]}, ".refusal", "must be a string"),
        case("tools that are no array", {"tools": tool, "tool_choice": "none"}, "tools", "must be an array"),
        case("verbosity", {"verbosity": "low"}, "verbosity", '"medium"', unsupported),
        case("prediction", {"prediction": {"type": "content", "content": "a"}}, "prediction", "not", unsupported),
        case("top_logprobs alone", {"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        case("top_logprobs high", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
        case("logprobs number", {"logprobs": 1}, "logprobs", "must be a boolean"),
        case("bounds that differ", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "contradict"),
        case("bound zero", {"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        case("long chat", {"messages": [{"role": "user", "content": "hello, " * 3 * context_length}]}, "messages",
             str(context_length), "context_length_exceeded"),
        case("prompt and continuation", {"add_generation_prompt": True, "continue_final_message": True},
             "continue_final_message", "cannot both"),
        case("own template", {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs",
             "'chat_template'"),
        case("template option", {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "'tokenize'"),
        case("prompt in a chat", {"prompt": "a"}, "prompt", "of /v1/completions only", "unsupported_parameter"),
    ]  # fmt: skip


def _admin() -> list[BadInput]:
    def case(name: str, body: Any, param: str | None, fragment: str) -> BadInput:
        return BadInput(f"scale: {name}", "/admin/scale", body, 400, "invalid_request", param, fragment)

    return [
        case("nothing", {}, None, "at least one pool"),
        case("unknown pool", {"prefil": 1}, "prefil", "did you mean 'prefill'"),
        case("negative", {"prefill": -1}, "prefill", "between 1"),
        case("none", {"prefill": 0}, "prefill", "between 1"),
        case("string", {"decode": "2"}, "decode", "'2'"),
        case("boolean", {"decode": True}, "decode", "true"),
        case("huge", {"decode": 10**9}, "decode", "between 1"),
        case("array", [1], None, "JSON object"),
    ]

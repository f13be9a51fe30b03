"""The parameters of OpenAI, vLLM, SGLang and baton, and what the gateway does with each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from cluster.gateway.openai.parameters import CHAT, COMPLETIONS, Parameter, accepted, honoured, refused

MAX_TOKEN_ENTRIES = 1024
"""Highest number of entries in ``logit_bias`` and ``stop_token_ids``; each costs time in every step of all requests."""
_MAX_TOOLS = 1024
_ONLY_CHAT, _ONLY_COMPLETIONS = (CHAT,), (COMPLETIONS,)
_OLD_TOOLS = "send `tools`"
_NO_MEDIA = "models take and give text only"
_NO_CODE = "requests cannot bring code"
_GRAMMAR = "see [structured output](structured-output.md)"
_PROMPT_SCORES = "see [log probabilities](api.md#log-probabilities-of-prompts)"
_ALWAYS_PARSED = "reasoning is always divided from the answer"
_OWN_ROUTING = "the router chooses the workers"
_OWN_ID = "send the header X-Request-Id"

PARAMETERS = (
    honoured("messages", "OpenAI", "text or text parts; roles: system, developer, user, assistant, tool", _ONLY_CHAT),
    honoured("prompt", "OpenAI", "text, token ids, or a list of either", _ONLY_COMPLETIONS),
    honoured("model", "OpenAI", "any name in `/v1/models`, which the answer echoes; absent: the first one"),
    honoured("max_tokens", "OpenAI", "default: 16 in completions (0: only with `echo` or `prompt_logprobs`), the rest "
             "of the context in chats, whose limit it is"),
    honoured("max_completion_tokens", "OpenAI", "same as `max_tokens`", _ONLY_CHAT),
    honoured("temperature", "OpenAI", "0 is greedy; at most 100"),
    honoured("top_p", "OpenAI", "1 switches it off; 0 leaves the most probable token"),
    honoured("n", "OpenAI", "at most 128, and with the number of prompts at most `router.max_inflight`"),
    honoured("seed", "OpenAI", "see [seeds](api.md#seeds)"),
    honoured("stop", "OpenAI", "a string or up to 16, of up to 1,024 characters each"),
    honoured("stream", "OpenAI", "server-sent events"),
    honoured("stream_options", "OpenAI", "`include_usage`, `continuous_usage_stats`; no `include_obfuscation: true`"),
    honoured("presence_penalty", "OpenAI", "of output tokens, from -2 to 2"),
    honoured("frequency_penalty", "OpenAI", "of output tokens, from -2 to 2"),
    honoured("logit_bias", "OpenAI", "by token id, from -100 to 100", max_items=MAX_TOKEN_ENTRIES),
    honoured("logprobs", "OpenAI", "chat: true or false; completions: at most 20"),
    honoured("top_logprobs", "OpenAI", "at most 20; needs `logprobs`", _ONLY_CHAT),
    honoured("echo", "OpenAI", "the prompt before the output; " + _PROMPT_SCORES, _ONLY_COMPLETIONS),
    honoured("best_of", "OpenAI", "only when equal to `n`", _ONLY_COMPLETIONS),
    honoured("service_tier", "OpenAI", "`auto`, `default`, `flex`, `priority`, or the name of an [SLO class](slo.md)"),
    honoured("reasoning_effort", "OpenAI", "for the chat template; `none` adds `enable_thinking: false`", _ONLY_CHAT),
    honoured("tools", "OpenAI", "functions only; see [tools](tools.md)", _ONLY_CHAT, max_items=_MAX_TOOLS),
    honoured("tool_choice", "OpenAI", "`auto`, `none`, `required`, a function, or `allowed_tools`", _ONLY_CHAT),
    honoured("parallel_tool_calls", "OpenAI", "false: the answer has one call at most", _ONLY_CHAT),
    honoured("response_format", "OpenAI", "`text`, `json_object`, `json_schema`; " + _GRAMMAR),
    honoured("top_k", "vLLM", "0 and -1 switch it off"),
    honoured("min_p", "vLLM", "0 switches it off"),
    honoured("repetition_penalty", "vLLM", "of prompt and output tokens; 1 switches it off"),
    honoured("ignore_eos", "vLLM", "continue after the end-of-sequence token"),
    honoured("min_tokens", "vLLM", "no stop before so many tokens"),
    honoured("stop_token_ids", "vLLM", "tokens that end the output", max_items=MAX_TOKEN_ENTRIES),
    honoured("include_stop_str_in_output", "vLLM", "the output ends with the stop string"),
    honoured("skip_special_tokens", "vLLM", "false shows special tokens in the output"),
    honoured("add_special_tokens", "vLLM", "those of the tokenizer, often one at the start; default: completions only"),
    honoured("add_generation_prompt", "vLLM", "given to the chat template", _ONLY_CHAT),
    honoured("continue_final_message", "vLLM", "the output continues the last message", _ONLY_CHAT),
    honoured("chat_template_kwargs", "vLLM", "variables of the chat template", _ONLY_CHAT, max_items=64),
    honoured("truncate_prompt_tokens", "vLLM", "only so many of the prompt's last tokens are used; -1: as many as fit"),
    honoured("cache_salt", "vLLM", "only requests of the same salt share [prefixes](security.md#between-clients)"),
    honoured("return_token_ids", "vLLM", "every choice has `token_ids`, the exact tokens of its text"),
    honoured("prompt_logprobs", "vLLM", "of each token and at most 20 likelier ones; " + _PROMPT_SCORES),
    honoured("structured_outputs", "vLLM", "`json`, `json_object`, `regex`, `choice` or `grammar`; " + _GRAMMAR),
    honoured("guided_json", "vLLM", _GRAMMAR),
    honoured("guided_regex", "vLLM", _GRAMMAR),
    honoured("guided_choice", "vLLM", _GRAMMAR),
    honoured("guided_grammar", "vLLM", _GRAMMAR),
    honoured("guided_whitespace_pattern", "vLLM", "white space within JSON, for `guided_json` and `json_schema`"),
    honoured("json_schema", "SGLang", _GRAMMAR),
    honoured("regex", "SGLang", _GRAMMAR),
    honoured("ebnf", "SGLang", _GRAMMAR),
    honoured("speculation", "baton", '`method`: `auto`, `none`, or a [method](speculation.md) by name; '
             "`trace`: true for a [trace](api.md#traces-of-speculation) in the answer"),

    accepted("user", "OpenAI", "string", "nothing is kept about users"),
    accepted("metadata", "OpenAI", "object", "nothing is stored", max_items=64),
    accepted("safety_identifier", "OpenAI", "string", "nothing is kept about users"),
    accepted("prompt_cache_key", "OpenAI", "string", "the router finds workers with shared prefixes by itself"),
    accepted("priority", "vLLM", "integer", "priorities are those of SLO classes: see `service_tier`"),
    accepted("session_id", "vLLM", "string", "the router finds workers with shared prefixes by itself"),
    accepted("length_penalty", "vLLM", "number", "only beam search uses it"),
    accepted("spaces_between_special_tokens", "vLLM", "boolean", "fast tokenizers never add such spaces"),
    accepted("stream_interval", "vLLM", "integer", "tokens are sent as they come"),
    accepted("return_token_offsets", "vLLM", "boolean", "has no effect on generation in vLLM either"),
    accepted("return_mm_kwargs", "vLLM", "boolean", "has no effect on generation in vLLM either"),
    accepted("guided_decoding_backend", "vLLM", "string", "there is one library for grammars"),
    accepted("custom_labels", "SGLang", "object", "metrics have no labels of clients", max_items=64),

    refused("audio", "OpenAI", _NO_MEDIA, endpoints=_ONLY_CHAT),
    refused("modalities", "OpenAI", _NO_MEDIA, ["text"], endpoints=_ONLY_CHAT),
    refused("functions", "OpenAI", _OLD_TOOLS, [], endpoints=_ONLY_CHAT, expected="absent or an empty array"),
    refused("function_call", "OpenAI", _OLD_TOOLS, "none", "auto", endpoints=_ONLY_CHAT),
    refused("prediction", "OpenAI", "speculation finds repeated text by itself", endpoints=_ONLY_CHAT),
    refused("moderation", "OpenAI", "there is no moderation", endpoints=_ONLY_CHAT),
    refused("web_search_options", "OpenAI", "there is no search", endpoints=_ONLY_CHAT),
    refused("store", "OpenAI", "nothing is stored", False, expected="false, because nothing is stored"),
    refused("verbosity", "OpenAI", "state the length in the prompt", "medium", endpoints=_ONLY_CHAT,
            expected='"medium"; state the length of the answer in the prompt'),
    refused("suffix", "OpenAI", "insertion is not supported", "", endpoints=_ONLY_COMPLETIONS,
            expected="empty; insertion is not supported"),
    refused("prompt_cache_retention", "OpenAI", "cached prefixes have no fixed age", "in_memory", endpoints=_ONLY_CHAT),
    refused("prompt_cache_options", "OpenAI", "the prefix cache is automatic", {"mode": "implicit"}, {"mode": None}, {},
            endpoints=_ONLY_CHAT,
            expected='{"mode": "implicit"}; the prefix cache is automatic and has no time to live'),

    refused("structural_tag", "vLLM", "send a grammar"),
    refused("include_reasoning", "vLLM", _ALWAYS_PARSED, True, endpoints=_ONLY_CHAT),
    refused("thinking_token_budget", "vLLM", "reasoning has no limit of its own", -1),
    refused("use_beam_search", "vLLM", "beam search is not supported", False),
    refused("watermarking", "vLLM", "output has no watermark", False),
    refused("truncation_side", "vLLM", "prompts are truncated on the left", "left"),
    refused("logprob_token_ids", "vLLM", "send `top_logprobs`"),
    refused("allowed_token_ids", "vLLM", "send `logit_bias`"),
    refused("bad_words", "vLLM", "send `logit_bias`", []),
    refused("logits_processors", "vLLM", _NO_CODE, []),
    refused("echo", "vLLM", "answers have the new text only", False, endpoints=_ONLY_CHAT),
    refused("documents", "vLLM", "write them into the messages", [], endpoints=_ONLY_CHAT),
    refused("chat_template", "vLLM", _NO_CODE + "; the template is the model's", endpoints=_ONLY_CHAT),
    refused("media_io_kwargs", "vLLM", _NO_MEDIA, {}, endpoints=_ONLY_CHAT),
    refused("mm_processor_kwargs", "vLLM", _NO_MEDIA, {}, endpoints=_ONLY_CHAT),
    refused("prompt_embeds", "vLLM", "prompts are text or token ids", endpoints=_ONLY_COMPLETIONS),
    refused("request_id", "vLLM", _OWN_ID),
    refused("return_tokens_as_token_ids", "vLLM", "send `return_token_ids`", False),
    refused("return_prompt_text", "vLLM", "the rendered prompt is not returned", False, endpoints=_ONLY_CHAT),
    refused("routed_experts_prompt_start", "vLLM", "experts are not reported", 0),
    refused("kv_transfer_params", "vLLM", _OWN_ROUTING),
    refused("ec_transfer_params", "vLLM", _NO_MEDIA),
    refused("vllm_xargs", "vLLM", "there are no extensions of the engine", {}),
    refused("repetition_detection", "vLLM", "output does not end for its repetitions; send `repetition_penalty`"),

    refused("separate_reasoning", "SGLang", _ALWAYS_PARSED, True, endpoints=_ONLY_CHAT),
    refused("stream_reasoning", "SGLang", _ALWAYS_PARSED, True, endpoints=_ONLY_CHAT),
    refused("reasoning", "SGLang", "send `reasoning_effort`", {}, endpoints=_ONLY_CHAT),
    refused("stop_regex", "SGLang", "send `stop`", [], ""),
    refused("no_stop_trim", "SGLang", "send `include_stop_str_in_output`", False),
    refused("custom_logit_processor", "SGLang", _NO_CODE, []),
    refused("custom_params", "SGLang", _NO_CODE, {}),
    refused("lora_path", "SGLang", "adapters are not supported"),
    refused("session_params", "SGLang", "send the whole conversation", {}),
    refused("input_ids", "SGLang", "send them as `prompt` to `/v1/completions`", endpoints=_ONLY_CHAT),
    refused("task", "SGLang", "write it into the messages", endpoints=_ONLY_CHAT),
    refused("return_hidden_states", "SGLang", "hidden states are not returned", False),
    refused("return_routed_experts", "SGLang", "experts are not reported", False),
    refused("routed_experts_start_len", "SGLang", "experts are not reported", 0),
    refused("return_cached_tokens_details", "SGLang", "`usage` has the number of cached tokens", False),
    refused("return_prompt_token_ids", "SGLang", "the tokens of the prompt are not returned", False),
    refused("return_meta_info", "SGLang", "`GET /v1/requests/{id}/timeline` has details of a request", False),
    refused("images_config", "SGLang", _NO_MEDIA, {}),
    refused("max_dynamic_patch", "SGLang", _NO_MEDIA, endpoints=_ONLY_CHAT),
    refused("min_dynamic_patch", "SGLang", _NO_MEDIA, endpoints=_ONLY_CHAT),
    refused("use_audio_in_video", "SGLang", _NO_MEDIA, False, endpoints=_ONLY_CHAT),
    refused("rid", "SGLang", _OWN_ID),
    refused("extra_key", "SGLang", "send `cache_salt`"),
    refused("ngram_corpus_id", "SGLang", "send `speculation`"),
    refused("bootstrap_host", "SGLang", _OWN_ROUTING),
    refused("bootstrap_port", "SGLang", _OWN_ROUTING),
    refused("bootstrap_room", "SGLang", _OWN_ROUTING),
    refused("routed_dp_rank", "SGLang", _OWN_ROUTING),
    refused("disagg_prefill_dp_rank", "SGLang", _OWN_ROUTING),
    refused("data_parallel_rank", "SGLang", _OWN_ROUTING),
)  # fmt: skip
"""Every known parameter, those of one treatment and origin together. A name may have a row for each endpoint."""


@cache
def parameters_of(endpoint: str) -> Mapping[str, Parameter]:
    """The parameters that an endpoint knows, by name."""
    return {parameter.name: parameter for parameter in PARAMETERS if endpoint in parameter.endpoints}


@cache
def endpoints_of(name: str) -> tuple[str, ...]:
    """The endpoints that know a parameter."""
    return tuple(endpoint for parameter in PARAMETERS if parameter.name == name for endpoint in parameter.endpoints)

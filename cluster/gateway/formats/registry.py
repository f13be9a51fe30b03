"""All output formats, by name and by the marks in a chat template."""

from __future__ import annotations

from cluster.gateway.formats import deepseek, harmony, hermes, kimi, llama_json, mistral, pythonic, tagged_families
from cluster.gateway.formats.base import ToolFormat
from cluster.gateway.formats.reasoning import ReasoningFormat

AUTO, NONE = "auto", "none"

TOOL_FORMATS: dict[str, ToolFormat] = {
    form.name: form
    for form in (
        hermes.Hermes(),
        tagged_families.QWEN_XML,
        tagged_families.GLM,
        tagged_families.GLM_47,
        tagged_families.MINIMAX,
        llama_json.LlamaJson(),
        pythonic.Pythonic(),
        mistral.Mistral("mistral", is_list=True),
        mistral.Mistral("mistral_args", is_list=False),
        deepseek.DeepSeek("deepseek_v3", is_fenced=True),
        deepseek.DeepSeek("deepseek_v31", is_fenced=False),
        kimi.Kimi(),
        harmony.Harmony(),
    )
}

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    form.name: form
    for form in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("magistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    )
}

DEFAULT_TOOL_FORMAT = "hermes"

# In this order: a template may have the marks of several. All texts of a row must be in it.
_TOOL_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((harmony.CHANNEL,), "harmony"),
    ((deepseek.CALLS, "```json"), "deepseek_v3"),
    ((deepseek.CALLS,), "deepseek_v31"),
    ((mistral.CALLS, mistral.ARGS), "mistral_args"),
    ((mistral.CALLS,), "mistral"),
    ((kimi.CALLS,), "kimi"),
    ((tagged_families.MINIMAX.calls,), "minimax"),
    (("</arg_key><arg_value>",), "glm47"),
    ((tagged_families.GLM.key,), "glm"),
    ((tagged_families.QWEN_XML.function, tagged_families.QWEN_XML.key), "qwen_xml"),
    ((hermes.OPEN,), "hermes"),
    ((pythonic.START,), "pythonic"),
    (("func_name1(",), "pythonic"),
    (("<|start_header_id|>", '"parameters"'), "llama_json"),
)


def tool_format(name: str, chat_template: str, default: str = DEFAULT_TOOL_FORMAT) -> ToolFormat | None:
    """The format ``name``, or with ``auto`` the one whose marks are in the template, or ``default``; ``None`` for
    ``none``."""
    if name == AUTO:
        found = (known for marks, known in _TOOL_MARKS if all(mark in chat_template for mark in marks))
        name = next(found, default)
    return None if name == NONE else TOOL_FORMATS[name]


def reasoning_format(name: str, chat_template: str) -> ReasoningFormat | None:
    """The format ``name``, or with ``auto`` the one whose closing mark is in the template, if any."""
    if name == AUTO:
        return next((form for form in REASONING_FORMATS.values() if form.close in chat_template), None)
    return None if name == NONE else REASONING_FORMATS[name]

"""The families whose calls are :class:`~cluster.gateway.formats.tagged.Tagged`."""

from __future__ import annotations

from dataclasses import replace

from cluster.gateway.formats.tagged import Tagged

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_MINIMAX, _MINIMAX_END = "<minimax:tool_call>", "</minimax:tool_call>"

QWEN_XML = Tagged(
    name="qwen_xml",
    markers=(_OPEN, _CLOSE),
    calls=_OPEN,
    calls_end=_CLOSE,
    function="<function=",
    name_end=">",
    function_end="</function>",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    value_gap="\n",
)
GLM = Tagged(
    name="glm",
    markers=(_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _VALUE_END),
    calls=_OPEN,
    function_end=_CLOSE,
    key=_KEY,
    key_end=_KEY_END,
    value=_VALUE,
    value_end=_VALUE_END,
)
GLM_47 = replace(GLM, name="glm47", gap="")
MINIMAX = Tagged(
    name="minimax",
    markers=(_MINIMAX, _MINIMAX_END),
    calls=_MINIMAX,
    calls_end=_MINIMAX_END,
    holds_all=True,
    function='<invoke name="',
    name_end='">',
    function_end="</invoke>",
    key='<parameter name="',
    key_end='">',
    value_end="</parameter>",
)

"""Chat templates that treat tools, calls and reasoning as those of well-known families do."""

from __future__ import annotations

QWEN = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '<tools>' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools> Use <tool_call></tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for tool_call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

LLAMA = """{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('only one call at once') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}
{{- message.content + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

MISTRAL = """{%- for message in messages %}
{%- if message.tool_calls is defined %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have length 9') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}
{{- ']' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids have length 9') }}{%- endif %}
{{- '[TOOL_RESULTS] ' + message.content + ' ' + message.tool_call_id + '[/TOOL_RESULTS]' }}
{%- else %}
{%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- endif %}
{%- endfor %}"""

DEEPSEEK = """{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'system' %}{{- '<｜User｜>' + message.content }}{%- endif %}
{%- if message.role == 'assistant' and message.tool_calls is defined %}
{{- '<｜Assistant｜>' + message.content }}
{%- for tool in message.tool_calls %}
{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool.type }}
{{- '<｜tool▁sep｜>' + tool.function.name + '\\n```json\\n' }}
{{- tool.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}
{%- elif message.role == 'assistant' %}
{{- '<｜Assistant｜>' + message.content.split('</think>')[-1] }}
{%- endif %}
{%- if message.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""

GPT_OSS = """{%- if tools %}{{- '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}{{- raise_exception('content or thinking') }}{%- endif %}
{%- if message.content %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

SMOL = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

QWEN_XML = QWEN.replace("<tool_call></tool_call>", "<tool_call><function=name><parameter=key>value").replace(
    """{{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}""",
    """{{- '\\n<tool_call>\\n<function=' + tool_call.function.name + '>\\n' }}
{%- for key, value in tool_call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}{{- '</function>\\n</tool_call>' }}""",
)

_ARGUMENTS = "tool_call.function.arguments | items"
_VALUE = "(value if value is string else value | tojson)"
_HERMES_CALL = """{{- '\\n<tool_call>\\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
{{- tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}"""

GLM = QWEN.replace("<tool_call></tool_call>", "<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value").replace(
    _HERMES_CALL,
    f"""{{{{- '\\n<tool_call>' + tool_call.function.name }}}}
{{%- for key, value in {_ARGUMENTS} %}}
{{{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' + {_VALUE} + '</arg_value>' }}}}
{{%- endfor %}}{{{{- '\\n</tool_call>' }}}}""",
)

MINIMAX = QWEN.replace("<tool_call></tool_call>", "<minimax:tool_call><invoke name=").replace(
    _HERMES_CALL,
    f"""{{{{- '\\n<minimax:tool_call>\\n<invoke name="' + tool_call.function.name + '">\\n' }}}}
{{%- for key, value in {_ARGUMENTS} %}}
{{{{- '<parameter name="' + key + '">' + {_VALUE} + '</parameter>\\n' }}}}
{{%- endfor %}}{{{{- '</invoke>\\n</minimax:tool_call>' }}}}""",
)

KIMI = """{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_' + message.role + '|>' + (message.name or message.role) + '<|im_middle|>' }}
{%- if message.role == 'assistant' and message.tool_calls %}{{- message.content or '' }}
{{- '<|tool_calls_section_begin|>' }}
{%- for call in message.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + (call.function.arguments | tojson) }}
{{- '<|tool_call_end|>' }}
{%- endfor %}{{- '<|tool_calls_section_end|>' }}
{%- elif message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\\n' + message.content }}
{%- else %}{{- message.content }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""

TEMPLATES = {
    "hermes": QWEN,
    "qwen_xml": QWEN_XML,
    "glm": GLM,
    "minimax": MINIMAX,
    "kimi": KIMI,
    "llama_json": LLAMA.replace("<|start_header_id|>user", '"parameters"<|start_header_id|>user'),
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK,
    "harmony": GPT_OSS,
    "none": SMOL,
}
"""By the tool format that they show."""

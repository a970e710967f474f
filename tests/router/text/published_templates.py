"""Chat templates that write calls as the published ones of each family do, shortened to that.

What they write for a call, its result and a new answer is the published templates'; system prompts and the
descriptions of tools are left out.
"""

from __future__ import annotations

_CHATML = """
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- if m.tool_calls %}{% for c in m.tool_calls %}CALL{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_GLM = """[gMASK]<sop>
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|user|>BREAK' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '<|assistant|>BREAK<think>' + (m.reasoning_content or '') + '</think>' }}
{%- if m.content %}{{ 'BREAK' + m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- 'BREAK<tool_call>' + c.function.name + 'BREAK' }}
{%- for k, v in c.function.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key>BREAK<arg_value>' }}
{{- v if v is string else v | tojson(ensure_ascii=False) }}
{{- '</arg_value>BREAK' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{{- '<|observation|>BREAK<tool_response>BREAK' + m.content + 'BREAK</tool_response>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

_DSML = """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<｜Assistant｜></think>' + m.content }}
{%- if m.tool_calls %}
{{- '\\n\\n<｜DSML｜AROUND>\\n' }}
{%- for c in m.tool_calls %}
{{- '<｜DSML｜invoke name="' + c.function.name + '">\\n' }}
{%- for k, v in c.function.arguments | items %}
{{- '<｜DSML｜parameter name="' + k + '" string="' + ('true' if v is string else 'false') + '">' }}
{{- v if v is string else v | tojson }}{{ '</｜DSML｜parameter>\\n' }}
{%- endfor %}
{{- '</｜DSML｜invoke>\\n' }}
{%- endfor %}
{{- '</｜DSML｜AROUND>' }}
{%- endif %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}{{ '\\n\\n<function_results>\\n<result>' + m.content + '</result>\\n</function_results>' }}
{%- else %}{{ '<｜User｜>' + m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜></think>' }}{% endif %}"""

TEMPLATES = {
    "hermes": _CHATML.replace(
        "CALL",
        '{{ \'\\n<tool_call>\\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
        "{{- c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}",
    ),
    "qwen3_coder": _CHATML.replace(
        "CALL",
        "{{ '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
        "{%- for k, v in c.function.arguments | items %}{{ '<parameter=' + k + '>\\n' }}"
        "{{- v if v is string else v | tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}"
        "{{- '</function>\\n</tool_call>' }}",
    ),
    "nemotron_json": _CHATML.replace(
        "{% for c in m.tool_calls %}CALL{% endfor %}",
        "{{ '<TOOLCALL>[' }}{% for c in m.tool_calls %}"
        "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' }}{{ c.function.arguments | tojson }}{{ '}' }}"
        "{{- ', ' if not loop.last }}{% endfor %}{{ ']</TOOLCALL>' }}",
    ),
    "glm45": _GLM.replace("BREAK", "\\n"),
    "glm47": _GLM.replace("BREAK", ""),
    "llama3_json": """{{- bos_token }}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call a message') }}{% endif %}
{%- set c = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + c.name + '", "parameters": ' }}
{{- c.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}{#- <|python_tag|> #}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "deepseek_v3": """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜>' if messages[loop.index0 - 1].role == 'user' }}{{ m.content }}
{%- if m.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' }}
{%- for c in m.tool_calls %}
{{- '\\n' if not loop.first }}
{{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' }}
{{- c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}
{%- endif %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}""",
    "deepseek_v31": """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜></think>' if messages[loop.index0 - 1].role == 'user' }}{{ m.content }}
{%- if m.tool_calls %}
{{- '<｜tool▁calls▁begin｜>' }}
{%- for c in m.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}
{%- endif %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜></think>' }}{% endif %}""",
    "deepseek_v32": _DSML.replace("AROUND", "function_calls"),
    "deepseek_v4": _DSML.replace("AROUND", "tool_calls"),
    "minimax_m2": """{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- ']~b]ai\\n' }}
{%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- m.content }}
{%- if m.tool_calls %}
{{- '\\n<minimax:tool_call>\\n' }}
{%- for c in m.tool_calls %}
{{- '<invoke name="' + c.function.name + '">\\n' }}
{%- for k, v in c.function.arguments | items %}
{{- '<parameter name="' + k + '">' }}{{ v if v is string else v | tojson(ensure_ascii=False) }}
{{- '</parameter>\\n' }}
{%- endfor %}
{{- '</invoke>\\n' }}
{%- endfor %}
{{- '</minimax:tool_call>' }}
{%- endif %}
{{- '[e~[\\n' }}
{%- elif m.role == 'tool' %}{{ ']~b]tool\\n<response>' + m.content + '</response>[e~[\\n' }}
{%- else %}{{ ']~b]' + m.role + '\\n' + m.content + '[e~[\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\\n<think>\\n' }}{% endif %}""",
    "kimi_k2": """{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|im_assistant|>assistant<|im_middle|>' + m.content }}
{%- if m.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for c in m.tool_calls %}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}{{ c.function.arguments | tojson }}
{{- '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{%- elif m.role == 'tool' %}
{{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' + m.content }}
{%- else %}{{ '<|im_user|>user<|im_middle|>' + m.content }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}""",
    "seed_oss": """{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<seed:bos>assistant' }}
{%- if m.reasoning_content %}{{ '\\n<seed:think>' + m.reasoning_content | trim + '</seed:think>' }}{% endif %}
{%- if m.content %}{{ '\\n' + m.content | trim }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '\\n<seed:tool_call>\\n<function=' + c.function.name + '>\\n' }}
{%- for k, v in c.function.arguments | items %}
{{- '<parameter=' + k + '>' }}{{ v if v is string else v | tojson }}{{ '</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</seed:tool_call>' }}
{%- endfor %}
{{- '<seed:eos>' }}
{%- else %}{{ '<seed:bos>' + m.role + '\\n' + m.content + '<seed:eos>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<seed:bos>assistant\\n' }}{% endif %}""",
    "apriel": """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|tool_result|>\\n' + m.content + '\\n<|end|>\\n' }}
{%- else %}
{{- '<|' + m.role + '|>\\n' + m.content }}
{%- if m.tool_calls %}
{{- '\\n<tool_calls>[' }}
{%- for c in m.tool_calls %}
{{- '{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments | tojson }}{{ '}' }}
{{- ', ' if not loop.last }}
{%- endfor %}
{{- ']</tool_calls>' }}
{%- endif %}
{{- '\\n<|end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}""",
    "granite": """{%- for m in messages %}
{{- '<|start_of_role|>' + ('tool_response' if m.role == 'tool' else m.role) + '<|end_of_role|>' }}
{%- if m.tool_calls %}
{{- '<|tool_call|>[' }}
{%- for c in m.tool_calls %}
{{- c.function | tojson }}{{ ', ' if not loop.last }}
{%- endfor %}
{{- ']' }}
{%- else %}{{ m.content }}
{%- endif %}
{{- '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}""",
    "mistral": """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ m.content }}
{%- for c in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}{{ c.function.arguments | tojson }}
{%- endfor %}
{{- eos_token }}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ '[INST]' + m.content + '[/INST]' }}
{%- endif %}
{%- endfor %}""",
    "mistral_json": """{{- bos_token }}
{%- for m in messages %}
{%- if m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' }}{{ ', ' if not loop.last else ']' + eos_token }}
{%- endfor %}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- endif %}
{%- endfor %}""",
    "gemma4": """{{- bos_token }}
{%- macro value(v) %}
{%- if v is string %}{{ '<|"|>' + v + '<|"|>' }}
{%- elif v is boolean %}{{ 'true' if v else 'false' }}
{%- elif v is mapping %}
{{- '{' }}{% for k, part in v | dictsort %}{{ k }}:{{ value(part) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}
{%- elif v is sequence %}
{{- '[' }}{% for part in v %}{{ value(part) }}{{ ',' if not loop.last }}{% endfor %}{{ ']' }}
{%- else %}{{ v }}
{%- endif %}
{%- endmacro %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|tool_response>response:' + (m.name or 'unknown') + '{value:' }}{{ value(m.content) }}{{ '}<tool_response|>' }}
{%- else %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
{%- if m.reasoning_content and m.tool_calls %}
{{- '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}
{%- endif %}
{{- m.content | trim }}
{%- for c in m.tool_calls or [] %}
{{- '<|tool_call>call:' + c.function.name }}{{ value(c.function.arguments) }}{{ '<tool_call|>' }}
{%- endfor %}
{{- '<turn|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}""",
    "harmony": """{%- set last = namespace(name=none) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}
{%- if m.content and m.thinking %}{{ raise_exception('content and thinking') }}{% endif %}
{%- if m.thinking or m.content %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.thinking or m.content) + '<|end|>' }}
{%- endif %}
{%- set c = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}
{{- c.arguments | tojson }}{{ '<|call|>' }}
{%- set last.name = c.name %}
{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content | tojson }}{{ '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
}
"""By format of calls."""
ENDS = (
    "<turn|>\n", "<|im_end|>\n", "<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "[e~[\n", "</s>", "\n<|end|>\n",
    "<|end_of_text|>\n", "<seed:eos>",
)  # fmt: skip
"""What ends an assistant's turn."""
_SHOWN = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
_LLAMA = """{{- bos_token }}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- set c = m.tool_calls[0].function %}
{{- 'BEGINassistantEND\\n\\n{"name": "' + c.name + '", ' }}{{ '"parameters": ' }}{{ c.arguments | tojson }}{{ '}STOP' }}
{%- else %}{{ 'BEGIN' + ('ipython' if m.role == 'tool' else m.role) + 'END\\n\\n' + m.content | trim + 'STOP' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'BEGINassistantEND\\n\\n' }}{% endif %}"""
_PHI = """{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
_COMMAND = """{{- bos_token }}
{%- for m in messages %}
{{- '<|START_OF_TURN_TOKEN|><|' + m.role | upper + '_TOKEN|>' }}
{%- if m.tool_calls %}
{{- '<|START_ACTION|>[' }}
{%- for c in m.tool_calls %}
{{- '{"tool_call_id": "' ~ loop.index0 ~ '", "tool_name": "' + c.function.name + '", "parameters": ' }}
{{- c.function.arguments | tojson }}{{ '}' }}
{%- endfor %}
{{- ']<|END_ACTION|>' }}
{%- else %}{{ '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}
{%- endif %}
{{- '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""
FURTHER = {
    "Llama 3.2": (
        "llama3_json", "template",
        _SHOWN + _LLAMA.replace("BEGIN", "<|start_header_id|>").replace("END", "<|end_header_id|>")
        .replace("STOP", "<|eot_id|>"),
    ),
    "Llama 4": (
        "llama3_json", "template",
        _SHOWN + _LLAMA.replace("BEGIN", "<|header_start|>").replace("END", "<|header_end|>")
        .replace("STOP", "<|eot|>"),
    ),
    "Granite 4": ("hermes", "template", _SHOWN + TEMPLATES["hermes"]),
    "Phi-3.5": ("hermes", "generic", _PHI),
    "Phi-4-mini": (
        "hermes", "generic",
        "{% if messages[0].tools %}{{ '<|tool|>' + messages[0].tools + '<|/tool|>' }}{% endif %}" + _PHI,
    ),
    "Gemma 3": (
        "hermes", "generic",
        "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m.role.replace('assistant', 'model') }}"
        "{{- '\\n' + m.content | trim + '<end_of_turn>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    ),
    "DeepSeek V3.1": ("hermes", "generic", TEMPLATES["deepseek_v31"]),
    "Command R7B": (None, None, _SHOWN + _COMMAND),
    "LFM2": (
        None, None,
        _SHOWN + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{{ '<|im_end|>\\n' }}"
        "{% endfor %}{#- <|tool_call_start|>[f(a=1)]<|tool_call_end|> #}",
    ),
}  # fmt: skip
"""By family: the format of calls and what shows the model its tools, as `/v1/models` tells them, and the template.
Where both are None the template shows tools, and calls are in no known format: tools are refused."""

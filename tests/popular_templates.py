"""Chat templates in the manner of popular models: written here, short, with the constructs by which
the published ones write calls, results, thoughts and missing contents.
"""

from __future__ import annotations

CHATML = r"""
{%- if tools %}{{- '<|im_start|>system\n' }}{% for tool in tools %}{{- tool | tojson + '\n' }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role }}
        WRITE
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}ASK{% endif %}"""
_TAGGED = r"""
        {%- for call in m.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}"""


def _chatml(write: str, ask: str = "") -> str:
    return CHATML.replace("WRITE", write).replace("ASK", ask)


QWEN_2_5 = _chatml(r"{%- if m.content %}{{- '\n' + m.content }}{%- endif %}" + _TAGGED)
QWEN_3 = _chatml(
    r"""
        {%- set content = m.content if m.content is string else '' %}{%- set thought = '' %}
        {%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '\n' }}
        {%- if thought and m.role == 'assistant' %}{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}{%- set call = call.function %}
            {%- if not loop.first or content %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}""",
    r"{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}",
)
QWEN_3_FIRST = QWEN_3.replace("m.content if m.content is string else ''", "m.content.strip()")
"""The first version, which looks into contents that may be missing."""
SMOLLM_3 = _chatml(
    r"{{- '\n' + (m.content or '') }}" + _TAGGED, r"{%- if not think %}{{- '<think>\n\n</think>\n' }}{% endif %}"
)
FALCON_H1 = _chatml(
    r"{{- '\n' }}{%- if m.content is not none %}{{- m.content }}{%- endif %}" + _TAGGED.replace(r"'\n<tool", "'<tool")
)
HERMES_2 = _chatml(
    r"""{%- if m.tool_calls is defined %}{%- for call in m.tool_calls %}
            {{- '\n<tool_call>\n' }}{{- '{"name": "' }}{{- call.function.name }}{{- '"' }}
            {{- ', "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}' }}{{- '\n</tool_call>' }}
        {%- endfor %}{%- else %}{{- '\n' + m.content }}{%- endif %}"""
)
QWEN_3_CODER = _chatml(
    r"""{{- '\n' + (m.content or '') }}
        {%- for call in m.tool_calls or [] %}{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\n' }}
                {{- value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}{{- '</function>\n</tool_call>' }}
        {%- endfor %}"""
)
LLAMA_3 = r"""{{- bos_token }}
{%- set date = strftime_now("%d %b %Y") if strftime_now is defined else '' %}
{%- for m in messages %}
    {%- if not (m.role == 'tool' or 'tool_calls' in m) %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if not m.tool_calls | length == 1 %}{{- raise_exception("one tool call at once") }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}{{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if tools is not none %}{{- '' }}{%- endif %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
{#- {"name": function name, "parameters": ...} -#}"""
MISTRAL_V3 = r"""{{- bos_token }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{{- '[INST] ' + m['content'] + '[/INST]' }}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif m['role'] == 'assistant' %}{{- ' ' + m['content'] | trim + eos_token }}
    {%- else %}{{- '[TOOL_RESULTS] {"content": ' + m.content | string + '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
MISTRAL_V11 = r"""{{- bos_token }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{{- '[INST]' + m['content'] + '[/INST]' }}
    {%- elif m['role'] == 'assistant' %}
        {{- m['content'] or '' }}
        {%- for call in m.tool_calls or [] %}
            {%- set arguments = call.function.arguments %}
            {%- if arguments is not string %}{%- set arguments = arguments | tojson %}{%- endif %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + arguments }}
        {%- endfor %}
        {{- eos_token }}
    {%- else %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
MINISTRAL_3 = MISTRAL_V11.replace(
    "{{- m['content'] or '' }}",
    r"""{%- if (m['content'] is none or m['content'] | length == 0) and not m.tool_calls %}{{- '' }}{%- endif %}
        {%- if m['content'] is string and m['content'] != '' %}{{- m['content'] }}
        {%- elif m['content'] | length > 0 %}{%- for part in m['content'] %}{{- part['text'] }}{%- endfor %}
        {%- endif %}""",
)
_DEEPSEEK = r"""{%- set ns = namespace(is_first=false) %}{{- bos_token }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{{- '<｜User｜>' + m['content'] }}
    {%- elif m['role'] == 'assistant' and m['content'] is none %}
        {%- set ns.is_first = false %}
        {%- for call in m['tool_calls'] %}
            {{- '\n' if ns.is_first else '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{%- set ns.is_first = true %}
            {{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\n' + '```json' }}
            {{- '\n' + call['function']['arguments'] + '\n' + '```' + '<｜tool▁call▁end｜>' }}
        {%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif m['role'] == 'assistant' %}
        {%- set content = m['content'] %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
    {%- else %}{{- '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜><｜tool▁outputs▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>ASK' }}{%- endif %}"""
DEEPSEEK_V3 = _DEEPSEEK.replace("ASK", "")
DEEPSEEK_R1 = _DEEPSEEK.replace("ASK", r"<think>\n")
DEEPSEEK_V3_1 = r"""{{- bos_token }}{%- if not thinking is defined %}{%- set thinking = false %}{%- endif %}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{{- '<｜User｜>' + m['content'] }}
    {%- elif m['role'] == 'assistant' and m['tool_calls'] is defined and m['tool_calls'] is not none %}
        {{- '<｜Assistant｜></think>' + (m['content'] or '') + '<｜tool▁calls▁begin｜>' }}
        {%- for call in m['tool_calls'] %}
            {{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' + call['function']['arguments'] }}
            {{- '<｜tool▁call▁end｜>' }}
        {%- endfor %}{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif m['role'] == 'assistant' %}{{- '<｜Assistant｜></think>' + m['content'] + '<｜end▁of▁sentence｜>' }}
    {%- else %}{{- '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{%- endif %}"""
KIMI_K2 = r"""
{%- for m in messages %}
    {%- if m['role'] == 'tool' %}{{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\n' }}
    {%- else %}{{- '<|im_' + m['role'] + '|>' + m['role'] + '<|im_middle|>' }}{%- endif %}
    {%- if m['content'] is not none %}{{- m['content'] }}{%- endif %}
    {%- if m.tool_calls %}
        {{- '<|tool_calls_section_begin|>' }}
        {%- for call in m['tool_calls'] %}
            {{- '<|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' }}
            {%- if call['function']['arguments'] is string %}{{- call['function']['arguments'] }}
            {%- else %}{{- call['function']['arguments'] + '' }}{%- endif %}{{- '<|tool_call_end|>' }}
        {%- endfor %}{{- '<|tool_calls_section_end|>' }}
    {%- endif %}{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""
GLM_4_5 = r"""{{- '[gMASK]<sop>' }}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{- '<|observation|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- else %}
        {{- '<|' + m.role + '|>' }}
        {%- if m.role == 'assistant' %}{{- '\n<think></think>' }}{%- endif %}
        {%- if m.content and m.content.strip() %}{{- '\n' + m.content.strip() }}{%- endif %}
        {%- for call in m.tool_calls or [] %}{%- set call = call.function %}
            {{- '\n<tool_call>' + call.name }}
            {%- set arguments = call.arguments %}
            {%- for key, value in arguments.items() %}
                {{- '\n<arg_key>' + key + '</arg_key>\n<arg_value>' }}
                {{- value | tojson if value is not string else value }}{{- '</arg_value>' }}
            {%- endfor %}{{- '\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{{- '\n<think></think>' if enable_thinking is defined and not enable_thinking }}{%- endif %}"""
GPT_OSS = r"""
{%- for m in messages %}
    {%- if m.role == 'assistant' and 'tool_calls' in m %}
        {%- if "content" in m and m.content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}
        {%- elif m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}{{- '<|call|>' }}
    {%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}{{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
    {%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
_LISTED = r"""
{%- for m in messages %}
    {{- '<|start_of_role|>' + m.role + '<|end_of_role|>' }}
    {%- if m.content is string %}{{- m.content }}{%- endif %}
    {%- if m.tool_calls %}{{- 'OPEN' + m['tool_calls'] | map(attribute='function') | list | tojson + 'CLOSE' }}{%- endif %}
    {{- '<|end_of_text|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""
GRANITE_3 = _LISTED.replace("OPEN", "<|tool_call|>").replace("CLOSE", "")
PHI_4_MINI = _LISTED.replace("OPEN", "<|tool_call|>").replace("CLOSE", "<|/tool_call|>")
NEMOTRON = _LISTED.replace("OPEN", "<TOOLCALL>").replace("CLOSE", "</TOOLCALL>")
GRANITE_4 = _LISTED.replace(
    "{{- 'OPEN' + m['tool_calls'] | map(attribute='function') | list | tojson + 'CLOSE' }}",
    "".join(_TAGGED.split("\n")),
)
COMMAND_R7B = r"""{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}
        {%- if m.tool_calls %}
            {{- '<|START_ACTION|>[' }}
            {%- for call in m.tool_calls %}
                {{- '\n    {"tool_call_id": "' + loop.index0 | string + '", "tool_name": "' + call.function.name }}
                {{- '", "parameters": ' + call.function.arguments | tojson + '}' }}{{- ',' if not loop.last }}
            {%- endfor %}{{- '\n]<|END_ACTION|>' }}
        {%- else %}{{- '<|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' }}{%- endif %}
        {{- '<|END_OF_TURN_TOKEN|>' }}
    {%- else %}{{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m.content + '<|END_OF_TURN_TOKEN|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}"""
LFM_2 = _chatml(
    r"""{{- '\n' }}{%- if m.content is string %}{{- m.content }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '<|tool_call_start|>[' if loop.first else ', ' }}{{- call.function.name + '(' }}
            {%- for key, value in call.function.arguments.items() %}{{- key + '=' + value | tojson }}{{- ', ' if not loop.last }}{% endfor %}
            {{- ')' + (']<|tool_call_end|>' if loop.last else '') }}
        {%- endfor %}"""
)
GEMMA_3 = r"""{{- bos_token }}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception("roles must alternate") }}{%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
    {%- if m.content is string %}{{- m.content | trim }}
    {%- elif m.content is iterable %}{%- for item in m.content %}{{- item.text | trim }}{%- endfor %}{%- endif %}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

TEMPLATES: dict[str, str] = {
    "qwen-2.5": QWEN_2_5,
    "qwen-3": QWEN_3,
    "qwen-3-first": QWEN_3_FIRST,
    "qwen-3-coder": QWEN_3_CODER,
    "smollm-3": SMOLLM_3,
    "falcon-h1": FALCON_H1,
    "hermes-2": HERMES_2,
    "llama-3": LLAMA_3,
    "nemotron": NEMOTRON,
    "mistral-v3": MISTRAL_V3,
    "mistral-v11": MISTRAL_V11,
    "ministral-3": MINISTRAL_3,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-r1": DEEPSEEK_R1,
    "deepseek-v3.1": DEEPSEEK_V3_1,
    "kimi-k2": KIMI_K2,
    "glm-4.5": GLM_4_5,
    "gpt-oss": GPT_OSS,
    "granite-3": GRANITE_3,
    "granite-4": GRANITE_4,
    "phi-4-mini": PHI_4_MINI,
    "command-r7b": COMMAND_R7B,
    "lfm-2": LFM_2,
    "gemma-3": GEMMA_3,
}

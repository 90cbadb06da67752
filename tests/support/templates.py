"""Chat templates as checkpoints have them, shortened, and one that no checkpoint should have."""

from __future__ import annotations

LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
# Marks the last message, so that each further message changes the text of the one before.
UNSTABLE = (
    "{% for m in messages %}<{{ m.role }}{% if loop.last and not add_generation_prompt %}*"
    "{% endif %}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant?>{% endif %}"
)

# Templates with tools, one for each family's manner.
HERMES_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\nFunctions: <tools>' }}{% for tool in tools %}"
    "{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools>, called in <tool_call></tool_call>"
    "<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}"
    "{% endif %}{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
LLAMA3_TOOLS = (
    "{{ bos_token }}{% set builtin = 'Environment: ipython' %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{{ m.content }}{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    '{{ \'{"name": "\' + call.name + \'", "parameters": \' }}{{ call.arguments | tojson }}'
    "{{ '}' }}{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if tools and loop.first %}{{ tools | tojson }}{{ '\n\n' }}{% endif %}{{ m.content }}"
    "{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)
MISTRAL_TOOLS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}"
    "{{ '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls is defined %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids of nine characters') }}{% endif %}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ ', \"id\": \"' + call.id + '\"}' }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' + eos_token }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
# Takes arguments as text and a content of none, and opens the reasoning itself.
R1_TOOLS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% elif m.content is none %}{% for call in m.tool_calls %}{{ '<|Assistant|>call '"
    " + call.function.name + '\n' + call.function.arguments }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'tool' %}{{ '<|Tool|>' + m.content }}"
    "{% else %}{{ '<|Assistant|>' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
# The embedded model's role delimiters, without tools.
TINY_PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# The embedded model's role delimiters, with tools as in Hermes and a switch for reasoning.
TINY_TOOLS = (
    "{{ bos_token }}{% if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool | tojson }}"
    "{% endfor %}{{ eos_token }}{% endif %}"
    "{% for m in messages %}{{ '<|' + ('user' if m.role == 'tool' else m.role) + '|>' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>\n\n' }}{% endif %}"
    "{% if m.content %}{{ m.content }}{% endif %}{% for call in m.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking %}{{ '<think>\n' }}{% endif %}{% endif %}"
)

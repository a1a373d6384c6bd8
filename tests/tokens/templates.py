"""Chat templates of our own, each with one of the manners that real ones have."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Knows no tools."""

DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    + CHATML
)

BOS = "<|endoftext|>" + CHATML

ALTERNATING = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)

_THINKING = """\
{%- set ns = namespace(query=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- for t in tools or [] %}{% if loop.first %}{{ '<|im_start|>system\n' }}{% endif %}{{ t | tojson + '\n' }}
{%- if loop.last %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content and KEPT %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""

STRIPS_BEFORE_USER = _THINKING.replace("KEPT", "loop.index0 > ns.query")
"""Drops reasoning once another question comes, as Qwen3 does; its prompt can open or close the block."""

STRIPS_ALWAYS = _THINKING.replace("KEPT", "loop.last")

COUNTS = "{{ messages | length }} messages\n" + CHATML
"""Writes what comes first anew with each message, so no prompt begins with the one before."""

DROPS = CHATML.replace("{{ m.content }}", "{{ '' if m.role == 'assistant' else m.content }}")

NO_CLOSE = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
"""Ends a turn with text alone."""

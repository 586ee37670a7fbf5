"""Chat templates of the shapes that models have, for tests of what is rendered in parts."""

from typing import Final

FIRST_TURN: Final = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A system message of its own if there is none."""

TOOLS: Final = """
{%- if tools %}
<|im_start|>system
{{ messages[0].content if messages[0].role == 'system' else 'Use tools.' }}
{%- for tool in tools %}{{ loop.index }}. {{ tool | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n[' + message.content + ']' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content }}
        {%- for call in message.tool_calls %}{% set call = call.function %}
            {{- loop.index0 ~ ':' ~ call.name ~ call.arguments | tojson }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""Answers of tools one after another share a turn, which the message behind it ends."""

SYSTEM_APART: Final = """
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{%- macro named(role) %}{{ '<|im_start|>' ~ role | upper ~ ': ' }}{% endmacro %}
{{- bos_token ~ '[' ~ system ~ ']' }}
{%- for message in turns %}
    {%- set said = message.content | upper if shout is defined else message.content %}
    {%- if loop.index % 3 == 0 %}{{ '#' ~ loop.index0 }}{% endif %}
    {{- named(message.role) ~ said.split('</think>')[-1].strip() }}
    {%- if message.role == 'assistant' %}{{ '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'assistant' %}{{ named('assistant') }}{% endif %}
"""
"""The system message stands before the turns, which are numbered without it."""

GIVEN_ON: Final = (
    "{% set ns = namespace(before='') %}{% for message in messages %}"
    "{{ '<|im_start|>' ~ ns.before ~ message.content }}{% set ns.before = message.role %}{% endfor %}"
)
"""A turn leaves something for the next."""

LAST_QUESTION: Final = (
    "{% set ns = namespace(last=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}"
    "{{ '<|im_start|>' ~ (message.content if loop.index0 >= ns.last else '…') }}{% endfor %}"
)
"""What stands before the last question is shown otherwise."""

SPLIT: Final = (FIRST_TURN, TOOLS, SYSTEM_APART)
"""Those whose turns can be rendered by themselves."""

WHOLE: Final = (
    GIVEN_ON,
    LAST_QUESTION,
    "{% for message in messages %}{{ loop.cycle('a', 'b') ~ message.content }}{% endfor %}",
    "{% for message in messages %}{{ loop.revindex ~ message.content }}{% endfor %}",
    "{% for message in messages %}{{ loop.changed(message.role) ~ message.content }}{% endfor %}",
    "{% for message in messages %}{{ loop ~ message.content }}{% endfor %}",
    "{% for message in messages %}{{ messages | length ~ message.content }}{% endfor %}",
    "{% set last = messages[-1] %}{% for message in messages %}{{ last.role ~ message.content }}{% endfor %}",
    "{% set many = messages | length %}{% for message in messages %}{{ many ~ message.content }}{% endfor %}",
    "{% for message in messages %}{{ messages[loop.index0 + 2].role ~ message.content }}{% endfor %}",
    "{% for message in messages if message.content %}{{ message.content }}{% endfor %}",
    "{% for one in messages %}{% if one.role == 'tool' %}{% break %}{% endif %}{{ one.content }}{% endfor %}",
    "{% for message in messages %}{{ message.content }}{% else %}nothing{% endfor %}",
    "{% for message in messages[1:] %}{{ message.content }}{% endfor %}",
    "{% for message in messages | reverse %}{{ message.content }}{% endfor %}",
    "{% if messages %}{% for message in messages %}{{ message.content }}{% endfor %}{% endif %}",
    "{% set order = cycler('a', 'b') %}{% for message in messages %}{{ order.next() ~ message.content }}{% endfor %}",
    "{% set comma = joiner() %}{% for message in messages %}{{ comma() ~ message.content }}{% endfor %}",
    "{% for message in messages %}{{ ['a', 'b'] | random ~ message.content }}{% endfor %}",
    "{% for message in messages %}{{ lipsum(n=1) ~ message.content }}{% endfor %}",
    "{% for one in messages %}{% for part in [1] %}{{ messages[loop.index0 - 1].role }}{% endfor %}{% endfor %}",
    "{% for one in messages %}{% set messages = [] %}{{ one.content }}{% endfor %}",
    "{% macro n() %}{{ messages | length }}{% endmacro %}{% for one in messages %}{{ n() ~ one.content }}{% endfor %}",
    (
        "{% set ns = namespace(n=0) %}{% macro count() %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endmacro %}"
        "{% for one in messages %}{{ count() ~ one.content }}{% endfor %}"
    ),
    "{{ messages[0].content }}",
)
"""Those that are not split, each for a reason of its own."""

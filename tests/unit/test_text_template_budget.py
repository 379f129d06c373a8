# SPDX-License-Identifier: Apache-2.0
"""Single operations of a chat template: paid for before it runs, and where it is usual, as it was."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from blink.errors import BadRequestError, BlinkError, ConfigError
from blink.text.template import ChatTemplate
from cpu_seconds import least_seconds
from model_mutations import memory_limit

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": "  One\ntwo\r\nthree é 😀 "},
]
# A list that holds its predecessor twice, and so on: small in memory, and endless as a text.
TWICE = "{% set n = namespace(t=[7]) %}{% for a in range(30) %}{% set n.t = [n.t, n.t] %}{% endfor %}"
TWICE_NAMED = "{% set n = namespace(t={}) %}{% for a in range(30) %}{% set n.t = {'l': n.t, 'r': n.t} %}{% endfor %}"
DEEP = "{% set n = namespace(t=(1,)) %}{% for a in range(9999) %}{% set n.t = (n.t,) %}{% endfor %}"
ENDS = [
    "{{ n.t|tojson }}", "{{ n.t == n.t }}", "{{ n.t ~ '' }}", "{{ n.t in [n.t, 0] }}", "{{ '{}'.format(n.t) }}",
    "{{ {'k': n.t}|dictsort(by='value') }}", "{{ n.t }}", "{{ n.t|string }}", "{{ n.t != n.t }}", "{{ '%s' % n.t }}",
    "{{ [n.t, n.t]|join }}", "{{ n.t|trim }}", "{{ [n.t]|map('string')|list }}", "{{ n.t is eq n.t }}",
    "{{ [[0]]|select('eq', n.t)|list }}", "{{ [n.t].index(n.t) }}", "{{ raise_exception(n.t) }}", "{{ {}[n.t] }}",
    "{{ [[n.t, 1]]|sort }}", "{{ 'a'|replace(n.t, '') }}", "{{ n.t|e }}",
    "{% for a in [1, 2] %}{{ loop.changed(n.t) }}{% endfor %}",
]  # fmt: skip
KEYS = ["{{ n.t in {} }}", "{{ {n.t: 1} }}", "{{ {}[n.t] }}", "{{ {}.get(n.t) }}", "{{ [n.t]|unique|list }}"]

HOSTILE = [
    "{{ (11**90000000) % 5 }}",
    "{{ 2**65 }}",
    "{{ 3 * 9223372036854775807 * 9223372036854775807 }}",
    "{% set n = namespace(k=3) %}{% for a in range(999) %}{% set n.k = n.k - (0 - n.k) %}{% endfor %}",
    "{{ 'ab'|indent(4*10**8)|length }}",
    "{{ ('\\n'*3000000)|indent('x'*50)|length }}",
    "{{ {'a': [1]}|tojson(indent=2*10**8) }}",
    "{{ {'a': [1]}|tojson(separators=('x'*9000000, 'y')) }}",
    "{{ '%800000000s' % 'a' }}",
    "{{ '%.800000000f' % 2 }}",
    "{{ '%*d' % (800000000, 1) }}",
    "{{ '%(k)s'*2000 % {'k': 'x'*90000} }}",
    "{{ '%900000000d'|format(1) }}",
    "{{ '%900000000d' is even }}",
    "{{ ['%900000000d']|reject('divisibleby', 2)|list }}",
    "{{ '{:^900000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 900000000) }}",
    "{{ ('{0}'*90000).format('x'*9000) }}",
    "{{ '{k:>900000000}'.format_map({'k': 1}) }}",
    "{{ 'x'.rjust(900000000) }}",
    "{{ 'x'.zfill(900000000) }}",
    "{{ 'x'.expandtabs(900000000) }}",
    "{{ (5).to_bytes(900000000, 'little') }}",
    "{{ ('ab'*90000).replace('a', 'y'*90000)|length }}",
    "{{ ('ab'*90000)|replace('', 'y'*90000)|length }}",
    "{{ ('y'*90000).join('x'*90000)|length }}",
    "{{ ('x'*90000)|list|join('y'*90000)|length }}",
    "{{ ('x '*9000000).split()|length }}",
    "{{ ('x\\n'*9000000).splitlines()|length }}",
    "{{ ('xy'*9000000).split('x')|length }}",
    "{{ ('ab '*9000000)|title|length }}",
    "{{ ('é'*9000000)|upper|length }}",
    "{{ ('x'*9000000).rfind('y' ~ 'x'*90000) }}",
    "{{ ('x'*9000000).strip('y' ~ 'z'*90000 ~ 'x') }}",
    "{{ [[1]*9999]|sum(start=[]) }}",
    "{{ range(90000)|select('in', range(90000)|list)|list|length }}",
    "{{ range(90000)|map('string')|map('indent', 60000, true)|join|length }}",
    "{{ ([0]*9000000)|sort|length }}",
    "{{ range(90000)|map(attribute='a.'*90000)|list }}",
    "{% set x = 'x'*9000000 %}{% set y = x ~ '' %}{% for a in range(90000) %}{% if x == y %}{% endif %}{% endfor %}",
    "{% set x = 'x'*9000000 %}{% for a in range(90000) %}{% if 'yz' in x %}{% endif %}{% endfor %}",
    "{% set l = [1]*1000000 %}{% set n = namespace(k=[]) %}"
    "{% for a in range(9999) %}{% set n.k = [n.k, l[1:]] %}{% endfor %}",
    "{% set n = namespace(k=[]) %}{% for a in range(99999) %}{% set n.k = [n.k, [" + "0," * 5000 + "]] %}{% endfor %}",
    "{% for a in range(99999) %}" + ("{% if a %}" + "y" * 50 + "{% endif %}") * 400 + "{% endfor %}",
    "{% macro f() %}{{ varargs|length }}{% endmacro %}{{ f(*([1]*9000000)) }}",
    "{{ raise_exception('x'*9000000 ~ 'y'*90000000) }}",
    "{{ strftime_now('%Y'*9000000) }}",
    "{{ ('7'*5000)|int }}",
    "{{ ('f'*9000000)|int(0, 16) }}",
    "{{ 7|round(10**8) }}",
    "{{ (('<'|safe) ~ '<')|e|length * ('<'*20000000)|e|length }}",
    "{{ ((0-10**15)|blink_charge) }}{{ 'x'*90000000 }}",
    "{{ ((1e308*10)-(1e308*10))|blink_charge }}{{ 'x'*90000000 }}",
    *(TWICE + end for end in ENDS[:6]),
    *(TWICE_NAMED + end for end in ENDS[:2]),
    *(DEEP + end for end in KEYS[:2]),
]  # fmt: skip
# More places where such values are walked through: a third of a second each.
MORE_HOSTILE = [
    *(TWICE + end for end in ENDS[6:]),
    *(TWICE_NAMED + end for end in ENDS[2:6]),
    *(DEEP + end for end in KEYS[2:]),
]


@pytest.mark.parametrize(
    "source", [*HOSTILE, *(pytest.param(source, marks=pytest.mark.long) for source in MORE_HOSTILE)]
)
def test_an_operation_that_takes_too_much_is_refused_before_it_runs(source: str) -> None:
    template = ChatTemplate(source, {})

    def render() -> None:
        with pytest.raises(BadRequestError), memory_limit(1 << 29):
            template.render(MESSAGES)

    assert least_seconds(render, enough=2) < 2


@pytest.mark.parametrize(
    "source",
    [
        "{{ [1]|batch(10**8, 0)|list }}",
        "{{ [1]|slice(10**8)|list }}",
        "{{ 'x'|center(10**8) }}",
        "{{ 'x'|wordwrap(1) }}",
        "{{ [1]|pprint }}",
        "{{ 'x'|urlize }}",
        "{{ 'x' is filter }}",
        "{% autoescape true %}{{ '<' }}{% endautoescape %}",
        "{# " + "x" * (1 << 20) + " #}",
    ],
)
def test_what_no_model_uses_is_refused_at_the_start(source: str) -> None:
    with pytest.raises(ConfigError):
        ChatTemplate(source, {})


@pytest.mark.parametrize("source", ["{{ lipsum(5) }}", "{{ cycler(1).next() }}", "{{ 'x'.encode() }}", "{{ 5() }}"])
def test_functions_that_no_model_uses_are_refused(source: str) -> None:
    with pytest.raises(BlinkError):
        ChatTemplate(source, {}).render(MESSAGES)


USUAL = [
    "{{ messages[1].content|trim|upper }}|{{ messages[1]['content'].split('\\n')[0].strip() }}",
    "{{ messages[1:]|tojson(indent=2) }}{{ messages[::-1]|map(attribute='role')|join(', ') }}",
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}"
    "{{ messages|rejectattr('tools', 'defined')|list }}",
    "{{ '%s is %05.1f' % ('x', 2.5) }}{{ '{:>5}|{k}'.format(1, k=2) }}{{ '%d'|format(7) }}",
    "{{ messages[0]|dictsort }}{{ messages[0]|items|list }}{{ messages[0].items()|list }}{{ messages[0].get('x', 1) }}",
    "{{ [3, 1, 2]|sort|join }}{{ [1, 2, 1]|unique|list }}{{ ['b', 'A']|sort(reverse=true) }}{{ [1, 2]|sum }}",
    "{{ 'a-b-c'.rsplit('-', 1) }}{{ 'a-b'.partition('-') }}"
    "{{ 'abc'.startswith('a') }}{{ 'aXbX'.replace('X', 'y', 1) }}",
    "{{ 'x\\ny'|indent(4) }}{{ 'x\\ny'|indent('> ', true) }}{{ 'aab'|replace('a', 'b') }}{{ 'ab cd'|title }}",
    "{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 7 / 2 }}{{ -3 + 1 }}{{ 3.7|int }}{{ '12'|int + 1 }}{{ 2.345|round(2) }}",
    "{{ [1] + [2] }}{{ 'ab' * 3 }}{{ (1, 2) + (3,) }}{{ [0] * 2 }}"
    "{{ 'a' in 'cab' }}{{ 1 in [1, 2] }}{{ 'k' in {'k': 1} }}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}{{ loop.last }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for k, v in messages[0].items() recursive %}{{ k }}{% endfor %}{{ range(3)|list }}"
    "{{ 'abc'|list|reverse|join }}",
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}{% call f(3) %}!{% endcall %}",
    "{% set n = namespace(a=1, b='') %}{% set n.a = n.a + 1 %}{{ n.a }}{% set x %}block{% endset %}{{ x|length }}",
    "{{ '<b>'|e }}{{ '<'|safe ~ '>' }}{{ ('<'|safe) + '>' }}{{ none is none }}{{ 5 is odd }}{{ 'a' is string }}",
    "{{ missing|default('d') }}{{ missing is defined }}"
    "{{ missing }}{{ [missing]|length }}{{ {}|tojson }}{{ 1 < 2 < 3 }}",
    "{{ ['a']|first }}{{ ['a', 'b']|last }}{{ dict(messages[0], content='x') }}"
    "{{ {'a': {'b': [1]}} == {'a': {'b': [1]}} }}",
    "{% filter upper %}abc{% endfilter %}{{ 'ß é İ'.upper() }}"
    "{{ '  x '.lstrip() }}{{ 'x'.center(5, '*') }}{{ '7'.zfill(3) }}",
]  # fmt: skip


@pytest.mark.parametrize("source", USUAL)
def test_usual_operations_equal_transformers(source: str) -> None:
    rendered, _ = render_jinja_template([MESSAGES], chat_template=source)
    assert ChatTemplate(source, {}).render(MESSAGES, add_generation_prompt=False) == rendered[0]


def test_what_is_long_in_the_request_may_be_long_in_the_template() -> None:
    source = "{% for m in messages %}{{ (m.content|trim|replace('a', 'bc')).split(' ')|join('-')|upper }}{% endfor %}"
    text = ChatTemplate(source, {}).render([{"role": "user", "content": "a word " * 30_000}] * 4)
    assert text.count("BC-WORD") == 120_000

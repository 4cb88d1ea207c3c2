from __future__ import annotations

import json
from datetime import datetime

import pytest

from gateway.errors import BadRequest
from gateway.templates import ChatTemplate, Message, parsed_arguments
from tests.gateway.vocabularies import PLAIN_TEMPLATE

USER: Message = {"role": "user", "content": "hi"}


def render(
    template: str | ChatTemplate,
    *messages: Message,
    tools: tuple[dict[str, object], ...] = (),
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    variables: dict[str, object] | None = None,
) -> str:
    if isinstance(template, str):
        template = ChatTemplate({"chat_template.jinja": template}, {}, {"bos_token": "<s>"})
    return template.render(
        messages or (USER,),
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        variables=variables or {},
    )


def test_templates_see_messages_special_tokens_and_variables() -> None:
    template = (
        "{{ bos_token }}{{ messages[0].role }}:{{ messages[0]['content'] }}|{{ mood }}|{{ documents }}|{{ tools }}"
    )
    assert render(template, variables={"mood": "calm"}) == "<s>user:hi|calm|None|None"


def test_variables_do_not_replace_messages() -> None:
    assert render("{{ messages|length }}", variables={"messages": [1, 2, 3]}) == "1"


def test_blocks_are_trimmed_and_loops_can_be_left() -> None:
    leave = "  {% if loop.index == 2 %}\n    {% break %}\n  {% endif %}\n"
    template = "{% for m in messages %}\n" + leave + "{{ m.content }}\n{% endfor %}\n"
    assert render(template, USER, USER, USER) == "hi\n"


def test_tojson_leaves_html_and_letters_alone() -> None:
    assert (
        render("{{ messages[0]|tojson }}", {"role": "user", "content": "<é>'"})
        == '{"role": "user", "content": "<é>\'"}'
    )
    assert render("{{ messages[0]|tojson(indent=2) }}", {"a": 1}) == '{\n  "a": 1\n}'


def test_generation_blocks_are_their_content() -> None:
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"


def test_strftime_now_is_today() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_the_sandbox_keeps_templates_from_python() -> None:
    with pytest.raises(BadRequest, match="access to attribute '__class__'"):
        render("{{ messages.__class__.__mro__ }}")
    with pytest.raises(BadRequest, match="append"):
        render("{{ messages.append(1) }}")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ raise_exception('') }}", "TemplateError"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ messages[0].content + 1 }}", "TypeError: can only concatenate str"),
        ("{% for a in range(10000000) %}{% endfor %}", "OverflowError: Range too big"),
    ],
)
def test_whatever_a_template_raises_is_told(template: str, reason: str) -> None:
    with pytest.raises(BadRequest) as caught:
        render(template)
    assert reason in str(caught.value)
    assert caught.value.param == "messages"


def test_continuing_cuts_after_the_final_message() -> None:
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    final: Message = {"role": "assistant", "content": "The answer "}
    assert render(turns, USER, final, continue_final_message=True) == "<user>hi</user><assistant>The answer "
    trimming = turns.replace("m.content", "m.content|trim")
    assert render(trimming, USER, final, continue_final_message=True) == "<user>hi</user><assistant>The answer"
    assert final["content"] == "The answer "


def test_continuing_what_the_template_does_not_print_is_refused() -> None:
    with pytest.raises(BadRequest, match="does not print the final message") as caught:
        render("{{ messages|length }}", continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_the_jinja_file_wins_over_the_key_and_lists_have_names() -> None:
    config = {"chat_template": "key"}
    assert render(ChatTemplate({"chat_template.jinja": "file"}, config, {})) == "file"
    assert render(ChatTemplate({}, config, {})) == "key"
    named = {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}
    template = ChatTemplate({}, named, {})
    assert render(template) == "a"
    assert render(template, tools=({"type": "function"},)) == "b"


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(BadRequest, match="no chat template; use /v1/completions"):
        render(ChatTemplate({}, {}, {}))


def test_a_template_that_is_no_jinja_says_so() -> None:
    with pytest.raises(BadRequest, match="Expected an expression"):
        render("\n{% if %}")


def test_a_template_knows_the_developer_role_when_it_names_it() -> None:
    assert not ChatTemplate({"chat_template.jinja": PLAIN_TEMPLATE}, {}, {}).knows_developer
    assert ChatTemplate(
        {"chat_template.jinja": "{% if messages[0].role == 'developer' %}{% endif %}"}, {}, {}
    ).knows_developer


@pytest.mark.parametrize(
    ("arguments", "value"),
    [('{"a": [1]}', {"a": [1]}), ("", ""), ("{", "{"), ("[1]", "[1]"), ('"a"', '"a"'), ("NaN", "NaN")],
)
def test_arguments_become_a_mapping_where_they_are_one(arguments: str, value: object) -> None:
    assert parsed_arguments(arguments) == value
    json.dumps(value)

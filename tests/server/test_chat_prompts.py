# SPDX-License-Identifier: Apache-2.0
"""Chat templates on messages of strangers: what they get, and how much they may write."""

import pytest
from tiny_checkpoint import byte_tokenizer

from jax_paged.models.checkpoint.tokenizer import Tokenizer
from jax_paged.models.server.errors import ApiError
from jax_paged.models.server.limits import Limits
from jax_paged.models.server.prompts import chat_prompt

ENDLESS = "{% for i in range(9999) %}{% for j in range(9999) %}ab{% endfor %}{% endfor %}"


def tokenizer(template):
    return Tokenizer(byte_tokenizer(), chat_template=template)


@pytest.mark.parametrize(
    ("bound", "part"),
    [
        ({"max_characters": 1000}, "expected at most 1000 characters of text, got more"),
        ({"max_seconds": 0.05}, "expected an end within 0.05 s"),
    ],
)
def test_a_template_that_writes_without_end_is_stopped(bound, part):
    with pytest.raises(ValueError, match=part):
        tokenizer(ENDLESS).apply_chat([], **bound)


def test_tools_go_to_the_template_and_arguments_are_objects():
    template = "{{ tools is defined }}{{ messages[0].tool_calls[0].function.arguments.x }}"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    values = {
        "messages": [{"role": "assistant", "tool_calls": [call]}],
        "tools": None, "tool_choice": None,
    }  # fmt: skip
    made = tokenizer(template)
    assert made.decode(chat_prompt(values, made, Limits())) == "False5"
    values["tools"] = [{"type": "function", "function": {"name": "f"}}]
    assert made.decode(chat_prompt(values, made, Limits())) == "True5"


def test_what_a_template_refuses_is_an_error_of_the_client():
    made = tokenizer("{{ raise_exception('no system message') }}")
    values = {"messages": [{"role": "user", "content": "a"}], "tools": None, "tool_choice": None}
    with pytest.raises(ApiError, match="messages: chat template: no system message") as error:
        chat_prompt(values, made, Limits())
    assert error.value.status == 400

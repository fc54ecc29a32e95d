# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client against a server on loopback (extra test-serve)."""

import pytest
from running_server import Running, byte_engine

openai = pytest.importorskip("openai", reason="openai is not installed: extra test-serve")

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client():
    server = Running(byte_engine(), api_key="s3cret")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="s3cret", max_retries=0) as made:
        yield made
    server.end()


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_completions_whole_and_streamed(client):
    given = {"model": "tiny", "prompt": ["Hello", "you"], "max_tokens": 6, "n": 2, "seed": 5}
    given |= {"extra_body": {"ignore_eos": True, "top_k": 40}}
    whole = client.completions.create(**given)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage.completion_tokens == 24
    texts = [""] * 4
    for event in client.completions.create(**given, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_chat_whole_and_streamed_with_usage_and_log_probabilities(client):
    given = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 6, "seed": 5}
    given |= {"logprobs": True, "top_logprobs": 3, "extra_body": {"ignore_eos": True}}
    client.chat.completions.create(**given)  # what follows finds the prompt in the cache, twice
    whole = client.chat.completions.create(**given)
    choice = whole.choices[0]
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [3] * 6
    text, usage, told = "", None, []
    stream = client.chat.completions.create(
        **given, stream=True, stream_options={"include_usage": True}
    )
    for event in stream:
        usage = event.usage or usage
        for piece in event.choices:
            text += piece.delta.content or ""
            told += piece.logprobs.content if piece.logprobs else []
    assert text == choice.message.content
    assert told == choice.logprobs.content
    assert usage.completion_tokens == whole.usage.completion_tokens == 6


def test_a_stop_string_and_a_tool(client):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    given = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "seed": 5, "tools": [tool]}
    given |= {"extra_body": {"ignore_eos": True}}
    text = client.chat.completions.create(**given).choices[0].message.content
    stop = text[10:12]
    cut = client.chat.completions.create(**given, stop=stop).choices[0]
    assert (cut.message.content, cut.finish_reason) == (text[: text.index(stop)], "stop")


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert (error.value.param, error.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_a_stream_that_is_closed_early_ends_its_request(client):
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    next(iter(stream))
    stream.close()
    given = {"model": "tiny", "prompt": "a", "max_tokens": 1, "extra_body": {"ignore_eos": True}}
    assert client.completions.create(**given).usage.total_tokens == 2

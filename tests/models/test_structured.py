# SPDX-License-Identifier: Apache-2.0
"""Output of a form: it validates whenever it is finished, and costs nobody else a bit."""

import json
import random
import re

import numpy as np
import pytest
from tiers import first_of
from tiny_checkpoint import byte_tokenizer, write_checkpoint

from jax_paged.models import Decoder, generate, load_checkpoint
from jax_paged.models.checkpoint.tokenizer import Tokenizer
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.serving.engine import Engine
from jax_paged.models.testing import small_config

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

from jax_paged.models.serving.structured import json_object, json_schema, regex  # noqa: E402

SIZES = {"num_pages": 200, "max_seqs": 8, "page_size": 16, "max_tokens": 64}


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes and an end; the models below have more logits than it has tokens."""
    return Tokenizer(byte_tokenizer(), eos_ids=[256])


@pytest.fixture(scope="module")
def model():
    config = small_config("llama", vocab_size=300, max_position_embeddings=512)
    return Decoder(config, random_source(config, seed=1))


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, **SIZES, max_drafts=0)


def random_schema(rng, depth=2):
    """Objects, arrays, texts, numbers and choices, so small that random tokens come to an end."""
    kinds = ["integer", "boolean", "enum", "string", "null", "pattern"]
    kind = rng.choice(kinds + (["object", "array", "anyOf"] if depth else []))
    match kind:
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
        case "enum":
            return {
                "enum": rng.sample(["red", "green", 1, 2.5, None, True, "ünï"], rng.randint(1, 4))
            }
        case "string":
            return {"type": "string", "maxLength": rng.randint(0, 6)}
        case "pattern":
            return {
                "type": "string",
                "pattern": rng.choice(["^[a-c]{1,3}$", "^(x|yz)$", "^\\d{2}$"]),
            }
        case "object":
            names = rng.sample(["a", "b", "long name", 'c"d'], rng.randint(1, 3))
            return {
                "type": "object", "additionalProperties": False,
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": names[: rng.randint(0, len(names))],
            }  # fmt: skip
        case "array":
            return {"type": "array", "items": random_schema(rng, depth - 1), "maxItems": 3}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
    return {"type": kind}


@pytest.mark.parametrize("part", first_of(range(20), 1))
def test_every_finished_output_validates(engine, tokenizer, part):
    """50 random schemas and seeds a part: 1,000 in the deep tier."""
    rng = random.Random(part)
    made = []
    for seed in range(50):
        schema = random_schema(rng)
        constraint = json_schema(schema, tokenizer)
        options = {"temperature": rng.choice([0.0, 0.7, 1.5]), "seed": seed}
        if seed % 3 == 0:
            options |= {"repetition_penalty": 1.3, "logit_bias": {ord("}"): 3.0}}
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 40))]
        made.append(
            (schema, engine.submit(prompt, max_new_tokens=120, constraint=constraint, **options))
        )
    engine.run()
    finished = 0
    for schema, request in made:
        if request.reason == "length":
            continue
        assert request.reason in ("complete", "stop_token"), request.detail
        jsonschema.validate(json.loads(tokenizer.decode(request.tokens)), schema)
        finished += 1
    assert finished > 35


def test_unfinished_output_is_the_start_of_one(engine, tokenizer):
    schema = {"type": "string", "minLength": 200}
    request = engine.submit([1], max_new_tokens=30, constraint=json_schema(schema, tokenizer))
    engine.run()
    assert (request.reason, len(request.tokens)) == ("length", 30)
    assert tokenizer.decode(request.tokens)[0] == '"'


def test_a_regular_expression_is_matched_whole(engine, tokenizer):
    pattern = r"(yes|no), [0-9]{3}(\.[0-9]+)?"
    made = [
        engine.submit([5, i], max_new_tokens=40, temperature=1.5, seed=i,
                      constraint=regex(pattern, tokenizer))
        for i in range(12)
    ]  # fmt: skip
    engine.run()
    done = [request for request in made if request.reason != "length"]
    assert len(done) > 6
    assert all(re.fullmatch(pattern, tokenizer.decode(request.tokens)) for request in done)
    assert len({tuple(request.tokens) for request in done}) > 3


def test_requests_without_a_constraint_keep_their_bits(model, tokenizer):
    """Log-probabilities and tokens beside a constrained request, and beside a plain one."""
    prompts = [[1, 2, 3], list(range(40)), [9]]
    options = {"max_new_tokens": 12, "temperature": 0.9, "seed": 2}
    expected = generate(model, prompts, **options).tokens
    engine, made = Engine(model, **SIZES, logprobs=0), []
    for constraint in (None, json_object(tokenizer)):
        beside = engine.submit([7], max_new_tokens=30, temperature=1.0, constraint=constraint)
        made.append([request for (request,) in engine.generate(prompts, **options)])
        assert beside.is_done
        engine.clear_cache()
    assert [request.tokens for request in made[0]] == expected
    for one, other in zip(*made, strict=True):
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)


def test_what_a_constraint_allows_is_drawn_as_without_it(model, tokenizer):
    """The same noise chooses among the same tokens, whoever took the others away."""
    engine = Engine(model, **SIZES)
    allowed = [tokenizer.backend.token_to_id(c) for c in ("a", "b", "c")]
    others = [i for i in range(300) if i not in allowed]
    options = {"max_new_tokens": 9, "temperature": 1.0, "seed": 4}
    free = engine.submit([1, 2], banned_tokens=others, **options)
    bound = engine.submit([1, 2], constraint=regex("[abc]{20}", tokenizer), **options)
    engine.run()
    assert free.tokens == bound.tokens
    assert len(set(free.tokens)) > 1


def test_a_constraint_goes_on_from_a_snapshot(model, tokenizer):
    engine = Engine(model, **SIZES)
    options = {
        "max_new_tokens": 12,
        "temperature": 1.0,
        "constraint": regex("[abc]{20}", tokenizer),
    }
    request = engine.submit([1, 2], **options)
    for _ in range(6):
        engine.step()
    assert not request.is_done
    had = list(request.tokens)
    assert had
    text = json.dumps(engine.snapshot())
    engine.run()
    with pytest.raises(ValueError, match="tokenizer: expected the tokenizer of the requests"):
        engine.restore(json.loads(text))
    (again,) = engine.restore(json.loads(text), tokenizer=tokenizer)
    assert again.tokens == had
    engine.run()
    assert (again.tokens, again.reason) == (request.tokens, request.reason)


@pytest.mark.parametrize(
    "drafts", first_of([{"max_drafts": 3}, {}], 1), ids=["look-up", "no drafts"]
)
@pytest.mark.parametrize("preemption", first_of(["swap", "recompute"], 1))
def test_constraints_hold_with_drafts_and_preemption(model, tokenizer, drafts, preemption):
    few = SIZES | {"num_pages": 9, "max_seqs": 4, "preemption": preemption}
    engine = Engine(model, **few, **drafts)
    pattern = "[ab]{60}"
    made = [
        engine.submit([3] * 20, max_new_tokens=40, temperature=1.0, seed=i,
                      constraint=regex(pattern, tokenizer) if i % 2 else None)
        for i in range(6)
    ]  # fmt: skip
    engine.run()
    assert engine.num_preemptions > 0
    for i, request in enumerate(made):
        assert len(request.tokens) == 40
        if i % 2:
            assert set(tokenizer.decode(request.tokens)) <= {"a", "b"}
        else:
            expected = generate(
                model, [[3] * 20], max_new_tokens=40, temperature=1.0, seed=i
            ).tokens
            assert request.tokens == expected[0]
    engine.clear_cache()
    assert engine.num_free_pages == engine.num_pages


@pytest.mark.deep
def test_a_published_checkpoint_is_held_to_a_schema(tmp_path):
    model, _, tokenizer = load_checkpoint(write_checkpoint(tmp_path))
    number = {"type": "integer", "maximum": 99, "minimum": 0}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"]}
    schema["additionalProperties"] = False
    engine = Engine(model, num_pages=20, max_seqs=2)
    request = engine.submit(
        tokenizer.encode("a"), max_new_tokens=40, constraint=json_schema(schema, tokenizer)
    )
    engine.run()
    assert 0 <= json.loads(tokenizer.decode(request.tokens))["n"] <= 99


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: json_schema("{", t), r"^schema: expected a JSON schema, got"),
        (lambda t: json_schema({"type": "foo"}, t), r"^schema: expected one that llguidance takes"),
        (
            lambda t: json_schema({"$ref": "http://x/y"}, t),
            r"^schema: expected one that llguidance",
        ),
        (lambda t: json_schema({1, 2}, t), r"^schema: expected a JSON schema, got"),
        (lambda t: regex("(?=a)b", t), r"^pattern: expected one that llguidance takes"),
        (lambda t: regex(7, t), r"^pattern: expected a text, got int"),
        (lambda t: regex("a", None), r"^tokenizer: expected a Tokenizer, got NoneType"),
        (
            lambda t: regex("a", Tokenizer(byte_tokenizer())),
            r"^tokenizer: expected one with a token",
        ),
        (lambda t: regex("a", t).start(200), r"^tokenizer: expected at most vocab_size=200 tokens"),
    ],
)
def test_wrong_constraints_are_named(tokenizer, make, message):
    with pytest.raises(ValueError, match=message):
        make(tokenizer)


def test_masks_leave_out_what_is_no_token(tokenizer):
    mask = np.zeros(10, np.uint32)
    regex("(?s:.*)", tokenizer).start(300).allow(mask)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert allowed.max() == 256, "the end, and no logit beyond it"
    assert len(allowed) > 150, "what may begin a character"

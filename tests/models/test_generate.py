# SPDX-License-Identifier: Apache-2.0
"""Generation through paged attention: right tokens, reasons and pages, whatever the batch."""

import dataclasses
import re
import signal
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import first_of

from jax_paged import KVState
from jax_paged.models import Decoder, generate, split_model, token_logits
from jax_paged.models.decoder import generation
from jax_paged.models.decoder.generation import compile_ahead, create_state, state_for
from jax_paged.models.decoder.parameters import random_source
from jax_paged.models.decoder.sample import Sampler
from jax_paged.models.decoder.steps import Progress, decode, plan_chunks, prefill
from jax_paged.models.testing import small_config
from jax_paged.testing import pool_sized_ops

CONFIG = small_config("qwen3", vocab_size=64, head_dim=8, max_position_embeddings=64)
PROMPTS = [[1, 2, 3], [5], list(range(20)), [7] * 9]
NEW = 12  # tokens asked for
# One shape of state and of batch for most tests, so that they share compiled programs.
PAGE_SIZE, NUM_PAGES, PAGES_PER_SEQ, ROWS = 4, 36, 8, 8


@pytest.fixture(scope="module")
def model():
    return Decoder(CONFIG, random_source(CONFIG, seed=1))


def make_state(model, **reserved: int):
    """A fresh state; row6=20 makes row 6 live with 20 tokens."""
    state = create_state(
        model, num_pages=NUM_PAGES, max_seqs=ROWS, pages_per_seq=PAGES_PER_SEQ, page_size=PAGE_SIZE
    )
    for name, tokens in reserved.items():
        row = int(name.removeprefix("row"))
        table, status = state.table.reserve([row], np.array([tokens]))
        table, _, _ = table.step([row], tokens, num_tokens=32)
        assert status.tolist() == [0]
        state = state.replace(table=table)
    return state


def run(model, prompts=PROMPTS, *, state=None, max_new_tokens=NEW, chunk=4, **options):
    state = make_state(model) if state is None else state
    return generate(
        model, prompts, max_new_tokens=max_new_tokens, state=state, chunk=chunk, **options
    )


@pytest.fixture(scope="module")
def expected(model):
    """The greedy continuation of PROMPTS."""
    return run(model).tokens


def assert_all_free(state):
    assert bool(state.table.is_empty)
    assert int(state.table.free_pages) == state.table.num_pages


def test_greedy_tokens_are_the_argmax_of_a_full_prefill(model, expected):
    for prompt, new in zip(PROMPTS, expected, strict=True):
        logits = token_logits(model, prompt + new)
        assert new == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert len(new) == NEW


@pytest.mark.parametrize(
    "options", first_of([{"use_sliding_window": True, "sliding_window": 5}, {}], 1)
)
def test_a_mixture_of_experts_generates_the_argmax_of_its_full_prefill(options):
    config = small_config("qwen3_moe", max_position_embeddings=64, **options)
    model = Decoder(config, random_source(config, seed=2))
    result = run(model, PROMPTS[:2])
    for prompt, new in zip(PROMPTS, result.tokens, strict=False):
        logits = token_logits(model, prompt + new)
        assert new == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_each_prompt_of_a_batch_continues_as_if_alone(model, expected):
    for prompt, new in zip(PROMPTS, expected, strict=True):
        assert run(model, [prompt]).tokens == [new]


def test_every_row_and_page_is_free_at_the_end(model):
    result = run(model)
    assert result.stop_reasons == ["length"] * 4
    assert_all_free(result.state)
    assert run(model, state=result.state).tokens == result.tokens  # and the state works again


def test_streamed_pieces_add_up_whatever_the_chunk(model, expected):
    for chunk in (1, 4):
        pieces, reasons = [], []

        def take(new, why, pieces=pieces, reasons=reasons):
            pieces.append(new)
            reasons.append(why)

        result = run(model, chunk=chunk, on_tokens=take)
        assert result.tokens == expected
        assert [list(chain(*parts)) for parts in zip(*pieces, strict=True)] == expected
        assert len(pieces) >= NEW // chunk
        assert reasons[0] == [None] * 4
        assert reasons[-1] == ["length"] * 4


def test_prompts_longer_than_a_prefill_chunk_give_the_same(model, expected, monkeypatch):
    monkeypatch.setattr(generation, "PREFILL_CHUNK", 8)
    result = run(model)
    assert result.tokens == expected
    assert result.prefill_tokens == sum(len(prompt) - 1 for prompt in PROMPTS)


def letters(ids) -> str:
    """A text with a letter for each id."""
    return "".join(chr(0x100 + i) for i in ids)


@pytest.mark.parametrize("chunk", [1, 4, 32])
def test_a_stop_string_over_several_tokens_ends_its_row_alone(model, expected, chunk):
    stop = letters(expected[1][3:6])
    end = letters(expected[1]).index(stop) + 3
    assert all(stop not in letters(new) for i, new in enumerate(expected) if i != 1)
    pieces = []
    result = run(
        model, chunk=chunk, stop_strings=["no such text", stop], decode=letters,
        on_tokens=lambda new, _: pieces.extend(new[1]),
    )  # fmt: skip
    assert result.tokens == [expected[0], expected[1][:end], *expected[2:]]
    assert result.stop_reasons == ["length", "stop_string", "length", "length"]
    assert pieces == result.tokens[1]
    assert_all_free(result.state)


def test_stop_strings_are_not_looked_for_in_the_prompt(model, expected):
    stop = letters([*PROMPTS[0][-1:], expected[0][0]])
    result = run(model, PROMPTS[:1], stop_strings=[stop], decode=letters)
    assert result.tokens == [expected[0]]


def test_chunks_hold_every_token_once_in_row_order():
    texts = [np.arange(n, dtype=np.int32) + 100 * i for i, n in enumerate((5, 0, 21, 1, 3))]
    for size in (1, 4, 7, 16, 64):
        back = [[] for _ in texts]
        for chunk in plan_chunks(texts, size):
            assert chunk.num_tokens == chunk.counts.sum() <= size
            assert chunk.tokens.size in (8, 16, 32, 64)
            ends = np.cumsum(chunk.counts)
            for part, begin, end in zip(back, ends - chunk.counts, ends, strict=True):
                part.extend(chunk.tokens[begin:end].tolist())
        assert back == [text.tolist() for text in texts]


def test_a_stop_token_ends_its_row_and_is_not_kept(model, expected):
    stop = expected[0][5]
    result = run(model, stop_tokens=[stop])
    for new, full, reason in zip(result.tokens, expected, result.stop_reasons, strict=True):
        end = full.index(stop) if stop in full else NEW
        assert new == full[:end]
        assert reason == ("stop_token" if stop in full else "length")
    assert result.stop_reasons[0] == "stop_token"
    assert "length" in result.stop_reasons
    assert_all_free(result.state)


def test_a_full_pool_stops_rows_one_by_one_and_keeps_their_tokens(model, expected):
    # 12 of 36 pages are free and the prompts take 10. Rows 2 and 0 get the last two pages in steps
    # 2 and 3. In step 5 rows 1 and 3 need one: row 1 stops and its page serves row 3. In step 6 row
    # 2 stops, and frees enough for the others.
    result = run(model, state=make_state(model, row4=32, row5=32, row6=32))
    assert result.stop_reasons == ["length", "pool_full", "pool_full", "length"]
    assert [len(new) for new in result.tokens] == [12, 4, 5, 12]
    for new, full in zip(result.tokens, expected, strict=True):
        assert new == full[: len(new)]
    assert int(result.state.table.free_pages) == 12


def test_a_prompt_that_finds_no_pages_stops_without_tokens_and_the_others_go_on(model, expected):
    # 4 pages are free. The first prompt needs 5, the two short ones 1 each, the last one 3.
    prompts = [PROMPTS[2], PROMPTS[0], PROMPTS[1], PROMPTS[3]]
    state = make_state(model, row4=32, row5=32, row6=32, row7=32)
    result = run(model, prompts, state=state, max_new_tokens=5)
    assert result.stop_reasons == ["pool_full", "length", "length", "pool_full"]
    assert result.tokens == [[], expected[0][:5], expected[1][:5], []]
    assert result.prefill_tokens == 2
    assert int(result.state.table.free_pages) == 4


def test_a_full_row_stops_with_its_tokens(model, expected):
    # A row holds 32 tokens. The last new token is never fed back, so it needs no place.
    result = run(model, [PROMPTS[2], [4] * 33, [3] * 32, PROMPTS[0]], max_new_tokens=20)
    assert result.stop_reasons == ["row_full", "row_full", "row_full", "length"]
    assert [len(new) for new in result.tokens] == [13, 0, 1, 20]
    assert result.tokens[0][:NEW] == expected[2]
    assert_all_free(result.state)


def test_live_rows_of_the_callers_state_are_left_alone(model, expected):
    state = make_state(model, row0=7, row5=20)
    mine = np.concatenate([np.asarray(state.table.page_table)[[0, 5]].ravel(), [-1]])
    mine = np.unique(mine[mine >= 0])
    state = state.replace(k_pages=state.k_pages.at[:, mine].set(jnp.float32(7)))
    before = jax.tree.map(np.asarray, state.table)
    result = run(model, state=state)
    assert result.tokens == expected
    after = result.state.table
    for name in ("page_table", "seq_lens", "pages_held", "is_live"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name), name)
    assert int(after.num_free) == int(before.num_free)
    assert (np.asarray(result.state.k_pages)[:, mine] == 7).all()


def test_the_context_ends_a_row(model):
    prompts = [[1] * 60, [2] * 64, [3] * 2]
    result = generate(model, prompts, max_new_tokens=10)  # in a state made to measure
    assert [len(new) for new in result.tokens] == [4, 0, 10]
    assert result.stop_reasons == ["length"] * 3
    assert_all_free(result.state)


def test_no_tokens_asked_for_is_no_work(model):
    result = run(model, max_new_tokens=0)
    assert (result.tokens, result.stop_reasons) == ([[]] * 4, ["length"] * 4)
    assert result.prefill_tokens == 0
    assert_all_free(result.state)


def test_draws_repeat_and_do_not_depend_on_chunks_or_neighbours(model):
    options = {"temperature": 1.5, "top_k": 40, "seed": 11}
    result = run(model, **options)
    assert run(model, **options).tokens == result.tokens
    others = [[9, 9], PROMPTS[1], [8] * 12, PROMPTS[3]]
    changed = run(model, others, chunk=1, **options)
    assert changed.tokens[1] == result.tokens[1]
    assert changed.tokens[3] == result.tokens[3]
    assert run(model, **(options | {"seed": 12})).tokens != result.tokens
    same = run(model, [PROMPTS[0]] * 4, **options).tokens
    assert len({tuple(new) for new in same}) == 4  # each prompt has draws of its own


def test_ctrl_c_in_a_callback_keeps_what_there_is(model, expected):
    calls = []

    def stop_at_second(new, reasons):
        calls.append(new)
        if len(calls) == 2:
            raise KeyboardInterrupt

    result = run(model, state=make_state(model, row2=9), on_tokens=stop_at_second)
    assert result.stop_reasons == ["interrupted"] * 4
    for i, (new, full) in enumerate(zip(result.tokens, expected, strict=True)):
        assert new == calls[0][i] + calls[1][i] == full[: len(new)]
        assert 2 <= len(new) < NEW
    assert int(result.state.table.free_pages) == NUM_PAGES - 3
    table, _ = result.state.table.release([2])
    again = run(model, state=result.state.replace(table=table))
    assert again.tokens == expected


@pytest.mark.parametrize("program", ["prefill", "decode_steps"])
def test_ctrl_c_during_a_device_call_never_loses_the_state(model, expected, monkeypatch, program):
    real, compiled = getattr(generation, program), generation.compiled

    def pressed(compiling, *args, **static):
        executable = compiled(compiling, *args, **static)

        def call(*args):
            if compiling is real:
                signal.raise_signal(signal.SIGINT)
            return executable(*args)

        return call

    monkeypatch.setattr(generation, "compiled", pressed)
    result = run(model, state=make_state(model, row2=9))
    assert result.stop_reasons == ["interrupted"] * 4
    kept = 0 if program == "prefill" else 1  # the tokens of the call that it came in
    assert result.tokens == [full[:kept] for full in expected]
    assert int(result.state.table.free_pages) == NUM_PAGES - 3
    assert int(result.state.table.seq_lens[2]) == 9
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_programs_make_no_pool_sized_array_and_never_call_the_host(model):
    graph, params = split_model(model)
    state = create_state(model, num_pages=2048, max_seqs=4, pages_per_seq=64)
    rows, tokens = np.arange(4, dtype=np.int32), np.zeros(64, np.int32)
    progress = Progress(*(jnp.zeros(4, jnp.int32),) * 3)
    sampler = Sampler.create(temperature=1.0, top_p=0.9)
    loop = decode.lower(
        graph, params, state, progress, rows, rows, rows, sampler, jnp.int32(3), chunk=4
    ).compile()
    chunk = prefill.lower(graph, params, state, rows, rows, tokens).compile()
    for program in (loop, chunk):
        assert pool_sized_ops(program, state.k_pages) == []
        assert "callback" not in program.as_text()
    assert " while(" in loop.as_text()
    assert state.k_pages.size > 10 * max(x.size for x in jax.tree.leaves(params))


def test_no_program_widens_the_embedding():
    config = small_config("qwen3", vocab_size=2048, hidden_size=64, tie_word_embeddings=True)
    model = Decoder(config, random_source(config, dtype=jnp.bfloat16))
    graph, params = split_model(model)
    state = create_state(model, num_pages=8, max_seqs=4, pages_per_seq=2)
    rows, tokens = np.arange(4, dtype=np.int32), np.zeros(8, np.int32)
    progress = Progress(*(jnp.zeros(4, jnp.int32),) * 3)
    loop = decode.lower(
        graph, params, state, progress, rows, rows, rows, Sampler.create(), jnp.int32(3), chunk=4
    ).compile()
    chunk = prefill.lower(graph, params, state, rows, rows, tokens).compile()
    for program in (loop, chunk):
        assert pool_sized_ops(program, model.embedding[...]) == []


def test_similar_sizes_share_a_state_shape(model):
    small, large = state_for(model, [500, 30]), state_for(model, [510, 20])
    assert small.k_pages.shape == large.k_pages.shape
    for needs in ([1], [16, 17], [1000], [33] * 9):
        table = state_for(model, needs).table
        need = sum(-(-n // 16) for n in needs)
        assert need <= table.num_pages <= 1.25 * need
        assert max(-(-n // 16) for n in needs) <= table.pages_per_seq
        assert table.max_seqs == len(needs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": []}, "prompts: expected at least one list of token ids, got []"),
        ({"prompts": "text"}, "prompts: expected at least one list of token ids, got 'text'"),
        (
            {"prompts": [[1], []]},
            "prompts[1]: expected a non-empty list of token ids, got shape [0]",
        ),
        (
            {"prompts": [[[1], [2]]]},
            "prompts[0]: expected a non-empty list of token ids, got shape",
        ),
        ({"prompts": [[[1], 2]]}, "prompts[0]: expected a non-empty list of token ids, got nested"),
        ({"prompts": [3, 4]}, "prompts[0]: expected a non-empty list of token ids, got 3"),
        ({"prompts": ["a b"]}, "prompts[0]: expected a non-empty list of token ids, got 'a b'"),
        ({"prompts": [[0.5]]}, "prompts[0]: expected a non-empty list of token ids, got dtype"),
        (
            {"prompts": [[1, 64]]},
            "prompts[0][1]: expected a token id in [0, vocab_size=64), got 64",
        ),
        ({"prompts": [[-1]]}, "prompts[0][0]: expected a token id in [0, vocab_size=64), got -1"),
        ({"prompts": [[1] * 65]}, "prompts[0]: expected at most context_length=64 tokens, got 65"),
        ({"max_new_tokens": -1}, "max_new_tokens: expected an integer >= 0, got -1"),
        ({"max_new_tokens": 2.0}, "max_new_tokens: expected an integer >= 0, got 2.0"),
        ({"chunk": 0}, "chunk: expected an integer >= 1, got 0"),
        ({"temperature": -1}, "temperature: expected a finite number >= 0, got -1.0"),
        ({"top_p": 0}, "top_p: expected None or a number in (0, 1], got 0.0"),
        (
            {"stop_tokens": [99]},
            "stop_tokens[0]: expected a token id in [0, vocab_size=64), got 99",
        ),
        ({"prompts": [[1]] * 9}, "state: expected at least 9 free rows, one per prompt, got 8"),
    ],
)
def test_bad_calls_are_refused_and_leave_the_state_alone(model, options, message):
    state = make_state(model)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        run(model, state=state, **options)
    assert not state.k_pages.is_deleted()


def test_a_state_of_another_model_is_refused(model):
    other = dataclasses.replace(CONFIG, head_dim=16)
    state = make_state(Decoder(other, random_source(other)))
    text = (
        "state.k_pages: expected float32[2, 36, 2, 4, 8], as the model has them, got float32[2, 36"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        run(model, state=state)
    groups = KVState.create(
        layer_kinds=["full", 8], num_pages=4, page_size=4, max_seqs=4, pages_per_seq=4,
        num_kv_heads=2, head_dim=8, dtype="float32",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^state: expected one whose layers are all 'full', got "):
        run(model, state=groups)


def test_ctrl_c_while_compiling_waits_for_the_end():
    done = []

    class Program:
        def lower(self, *_):
            signal.raise_signal(signal.SIGINT)
            return self

        def compile(self):
            done.append("compiled")

    seconds = {"compile": 0.0}
    with pytest.raises(KeyboardInterrupt):
        compile_ahead(seconds, Program())
    assert done == ["compiled"]

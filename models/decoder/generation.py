# SPDX-License-Identifier: Apache-2.0
"""Text from a model: batches of prompts in, new tokens out, through paged attention."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_paged import kv_dtype as page_dtype
from jax_paged._start.interrupt import uninterrupted
from jax_paged.cache.state import KVState, LayerKind
from jax_paged.checks import EIGHT_BIT_DTYPES, expect
from jax_paged.layout import Layout
from jax_paged.ops.batch import pages_for

from .adapters import Adapter, with_adapter
from .executables import compiled
from .partition import PP, TP, Partition, shapes_on
from .protocol import Graph, Model, ModelConfig, check_model, is_shapes, split_model
from .ring import decode as decode_around
from .ring import fewest_steps
from .sample import Sampler
from .steps import (
    Chunk,
    Progress,
    Reason,
    admit,
    chunk_size,
    plan_chunks,
    prefill,
    prefill_within,
    release,
)
from .steps import decode as decode_steps
from .stream import Decode, TextStream, as_searches

PAGE_SIZE = 16
PREFILL_CHUNK = 512

# The step limit of a decode call grows and shrinks to keep its duration in this range: long enough
# to hide the cost of a call, short enough for streaming and Ctrl-C.
_SHORT_SECONDS, _LONG_SECONDS = 0.05, 0.2

OnTokens = Callable[[list[list[int]], list[str | None]], None]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns.

    tokens: the new ids of each prompt, without the stop token. A stop string is in the last ones.
    stop_reasons: for each prompt "stop_token", "stop_string", "length" (max_new_tokens reached, or
      the model's context used up), "pool_full" or "row_full" (no page left in the pool or in the
      row; what was generated until then is kept) or "interrupted" (Ctrl-C).
    state: the KV state to go on with; every row and page that the call took is free again.
    seconds: time spent in "compile", "prefill" and "decode".
    prefill_tokens: prompt tokens that "prefill" covers: all but the last of each prompt, which the
      first decode step takes.
    busy: of a model in pipeline stages, for each the part of the ticks of the decode loop in which
      it worked on a row; () of any other.
    """

    tokens: list[list[int]]
    stop_reasons: list[str]
    state: KVState
    seconds: dict[str, float]
    prefill_tokens: int
    busy: tuple[float, ...] = ()


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    stop_tokens: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    decode: Decode | None = None,
    adapter: Adapter | None = None,
    state: KVState | None = None,
    kv_dtype: str = "auto",
    on_tokens: OnTokens | None = None,
    chunk: int = 32,
) -> Generation:
    """Continues each prompt by up to max_new_tokens tokens.

    All decode steps run inside one compiled loop (reserve pages, forward, sample, stop), which is
    called for up to `chunk` steps at a time. Results do not depend on how many steps a call runs,
    nor does a row's text depend on the other rows, unless pages run out. (Matrix products of
    another batch size may round differently; that matters only where two tokens are as good as
    equal.)

    Args:
      model: a `Decoder`, e.g. from `load_checkpoint`, or any other `Model`.
      prompts: token ids, one non-empty list per prompt, at most the model's context_length long.
      max_new_tokens: per prompt, ≥ 0. A row also stops when prompt and new tokens together fill
        context_length.
      temperature: 0 = greedy, the first of the largest logits; else logits are divided by it.
      top_k: draw from the k largest logits; None = all.
      top_p: of those, draw from the fewest tokens whose probability reaches top_p; None = all.
      min_p: before top_k and top_p, drop tokens less than min_p times as likely as the likeliest
        one; None = none.
      seed: of the draws, in [0, 2**32). Each prompt has draws of its own, by its place in
        `prompts`.
      stop_tokens: ids that end a row.
      stop_strings: texts that end a row, wherever their tokens begin and end. The row ends with
        the token that completes one; `TextStream` gives the text before it.
      decode: token ids to text, such as `tokenizer.decode`; needed for stop strings.
      adapter: a LoRA that all prompts run with (`load_adapter`); the model is then a `Decoder`,
        whose weights stay as they are. None = none.
      state: pages to use; donated, so go on with `Generation.state`. Only free rows and pages are
        taken; live rows are left alone. None = a pool that is just large enough. One made with
        `create_state(…, groups=True)` frees the pages that layers with windows no longer see.
      kv_dtype: of that pool: "auto" (the model's dtype), "bfloat16" (attention then computes in
        it), or 8-bit with a scale per token and head: "fp8" or "fp8_e4m3", "fp8_e5m2", "int8". Half
        or a quarter of the memory, at some loss.
      on_tokens: called between calls of the loop, at least once, with the new ids of each prompt
        since the last time and the stop reason of each prompt (None = it goes on).
      chunk: most decode steps per call of the loop, ≥ 1. Fewer run when steps are slow, so that
        on_tokens and Ctrl-C come through about every tenth of a second.

    Returns:
      A `Generation`. On Ctrl-C (KeyboardInterrupt, also one that on_tokens raises) it holds what
      there is, with the reason "interrupted" for rows that had not stopped.

    Raises:
      ValueError: an option, a prompt or a token id is out of range, the model lacks something
        (`Model`), or the state does not fit it or has fewer free rows than there are prompts. The
        state is untouched then.
    """
    if adapter is not None:
        model = with_adapter(model, adapter)
    if state is not None:
        expect(kv_dtype == "auto", "kv_dtype", "'auto' with a state, which has its own", kv_dtype)
    options = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed,
    }  # fmt: skip
    run = _begin(model, prompts, max_new_tokens, options, stop_tokens, state, kv_dtype, chunk)
    run.searches = as_searches(run.texts, stop_strings, decode)
    try:
        run.prefill()
        run.decode(on_tokens)
    except KeyboardInterrupt:
        run.interrupt()
    return run.result()


def compile_for(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
    adapter: Adapter | None = None,
    create: Callable[[], KVState] | None = None,
    kv_dtype: str = "auto",
    chunk: int = 32,
    **sampling: Any,
) -> float:
    """Compiles what `generate` with these arguments calls; returns the seconds that it took.

    Args:
      model: its weights may be shapes (`Checkpoint.shapes`).
      create: gives the state that `generate` gets, if it gets one.
      others: as there.
    """
    if adapter is not None:
        model = with_adapter(model, adapter)
    state = None if create is None else make_state(split_model(model), create)
    run = _begin(model, prompts, max_new_tokens, sampling, stop_tokens, state, kv_dtype, chunk)
    run.compile()
    return run.seconds["compile"]


def _begin(
    model: Model,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    stop_tokens: Sequence[int],
    state: KVState | None,
    kv_dtype: str,
    chunk: int,
) -> "Run":
    """Checks the arguments of `generate`; with shapes for weights, a new state is shapes, too."""
    parts, config = split_model(model), model.config
    texts = as_texts(prompts, config)
    check_count("max_new_tokens", max_new_tokens, 0)
    check_count("chunk", chunk, 1)
    sampler = Sampler.create(**sampling)
    stops = as_stops(stop_tokens, config)
    room = config.context_length - np.array([len(text) for text in texts])
    limits = np.minimum(max_new_tokens, room).astype(np.int32)
    if state is None:
        needs = [len(text) + max(limit - 1, 0) for text, limit in zip(texts, limits, strict=True)]
        state = make_state(parts, functools.partial(state_for, model, needs, kv_dtype))
    check_state(model, state)
    rows = _free_rows(state, len(texts))
    pp = getattr(getattr(model, "partition", None), "pp", 1)
    return Run(parts, state, texts, rows, limits, stops, sampler, chunk, pp=pp)


def make_state(parts: tuple[Graph, Any], create: Callable[[], KVState]) -> KVState:
    """create(), or only its shapes for a model that is shapes (`Checkpoint.shapes`)."""
    if not is_shapes(parts[1]):
        return create()
    state, sharding = jax.eval_shape(create), jax.tree.leaves(parts[1])[0].sharding
    if sharding is None:
        return state
    layers = PP if PP in sharding.mesh.shape else None
    return shapes_on(sharding.mesh, state, state.specs(heads=TP, layers=layers))


def as_texts(prompts: Any, config: ModelConfig) -> list[np.ndarray]:
    """The prompts as i32 arrays, checked against the model's vocabulary and context."""
    ok = not isinstance(prompts, str) and len(prompts) > 0
    expect(ok, "prompts", "at least one list of token ids", repr(prompts))
    texts = [as_tokens(f"prompts[{i}]", p, config.vocab_size) for i, p in enumerate(prompts)]
    for i, text in enumerate(texts):
        length = f"at most context_length={config.context_length} tokens"
        expect(len(text) <= config.context_length, f"prompts[{i}]", length, len(text))
    return texts


def as_tokens(name: str, tokens: Any, vocab_size: int, least: int = 1) -> np.ndarray:
    """Token ids as i32[n], n ≥ least; raises ValueError for anything that is not an id."""
    expected = f"{'a non-empty' if least else 'a'} list of token ids"
    try:
        ids = np.asarray(tokens)
    except ValueError:  # lists of different lengths within
        raise ValueError(f"{name}: expected {expected}, got nested lists") from None
    if ids.ndim == 1 and ids.size == 0 and least == 0:
        return np.zeros(0, np.int32)
    got = repr(tokens) if ids.ndim == 0 else f"shape {list(ids.shape)}"
    expect(ids.ndim == 1 and ids.size >= least, name, expected, got)
    expect(np.issubdtype(ids.dtype, np.integer), name, expected, f"dtype {ids.dtype}")
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if bad.size:
        where, value = f"{name}[{bad[0]}]", int(ids[bad[0]])
        expect(False, where, f"a token id in [0, vocab_size={vocab_size})", value)
    return ids.astype(np.int32)


def as_stops(stop_tokens: Sequence[int], config: ModelConfig) -> np.ndarray:
    """Stop tokens as `steps.decode` takes them: few sizes, few compiled programs."""
    stops = as_tokens("stop_tokens", stop_tokens, config.vocab_size, least=0)
    return np.append(stops, np.full(4 - len(stops) % 4, -1, np.int32))


def check_count(name: str, value: Any, least: int) -> None:
    """Checks for an integer ≥ least."""
    ok = isinstance(value, int | np.integer) and not isinstance(value, bool)
    expect(ok and bool(value >= least), name, f"an integer >= {least}", repr(value))


def check_window(window: Any, num_pinned: Any, name: str = "num_pinned") -> None:
    """Checks the window of a text and its pinned tokens, fewer than the window."""
    check_count(name, num_pinned, 0)
    if window is None:
        expect(num_pinned == 0, name, "0 without a window", num_pinned)
    else:
        check_count("window", window, num_pinned + 1)


def state_for(
    model: Model, lengths: Sequence[int], kv_dtype: str = "auto", *, windows: bool = False
) -> KVState:
    """A state with a row and enough pages for each of `lengths` tokens.

    Sizes are rounded up to three leading bits (at most a quarter more), so that similar calls share
    compiled programs.
    """
    needs = [max(1, pages_for(int(n), PAGE_SIZE)) for n in lengths]
    return create_state(
        model,
        num_pages=_round_up(sum(needs)),
        max_seqs=len(needs),
        pages_per_seq=_round_up(max(needs)),
        kv_dtype=kv_dtype,
        windows=windows,
    )


def _round_up(size: int) -> int:
    step = 1 << max(size.bit_length() - 3, 0)
    return -(-size // step) * step


def create_state(model: Model, **sizes: Any) -> KVState:
    """An empty `KVState` of the model's sizes, and its dtype, bfloat16 or an 8-bit one.

    Over several devices (`make_mesh`) it has each KV head where the model has it.

    Args:
      sizes: as for `state_creator`.
    """
    create = state_creator(model, **sizes)
    partition: Partition | None = getattr(model, "partition", None)
    return create() if partition is None else partition.create_state(create)


def state_creator(
    model: Model, *, num_pages: int | Mapping[LayerKind, int], max_seqs: int,
    pages_per_seq: int | Mapping[LayerKind, int],
    page_size: int = PAGE_SIZE, kv_dtype: str = "auto", max_tree: int = 256,
    windows: bool = False, groups: bool = False, layout: Layout = "HND",
) -> Callable[[], KVState]:  # fmt: skip
    """What creates an empty state with the layers and KV heads that one device has.

    Args:
      num_pages, pages_per_seq: one number, or with groups a mapping of each kind of layer to one.
      groups: layers with windows have pools of their own, which free what they no longer see; their
        kinds are "full" and the sizes of the windows. So `generate` takes it; a row of a layer with
        a window holds up to pages_for(window + 512, page_size) + 1 pages of a long prompt.
        False = the pages of all layers keep all tokens.
      others: as for `KVState.create`; kv_dtype as for `generate`.
    """
    check_model(model)
    config = model.config
    dtype = page_dtype(kv_dtype, model.dtype)
    ok = dtype == model.dtype or _is_smaller(dtype)
    expect(ok, "kv_dtype", "'auto', 'bfloat16' or the name of an 8-bit dtype", repr(kv_dtype))
    own = getattr(model, "partition", None) or config
    layers: dict[str, Any] = {"num_layers": own.num_layers}
    latent = getattr(config, "latent", None)
    if latent is not None:
        text = "'auto' or 'bfloat16' for a model of latent rows"
        expect(dtype not in EIGHT_BIT_DTYPES, "kv_dtype", text, repr(kv_dtype))
        layers = {"layer_kinds": ("mla",) * own.num_layers, "latent_dim": latent.row_dim}
    elif groups:
        ok = getattr(own, "pp", 1) == 1
        expect(ok, "groups", "False for a model in pipeline stages", groups)
        layers = {"layer_kinds": model_kinds(config)}
    return functools.partial(
        KVState.create, num_pages=num_pages, page_size=page_size,
        num_kv_heads=own.num_kv_heads, head_dim=config.head_dim, max_seqs=max_seqs,
        pages_per_seq=pages_per_seq, dtype=dtype, max_tree=max_tree, windows=windows,
        layout=layout,
        **layers,
    )  # fmt: skip


def model_kinds(config: Any) -> tuple[LayerKind, ...]:
    """The kind of each layer: its window, "mla" or "full". A foreign model's are all "full"."""
    kind = getattr(config, "kind", lambda layer: "full")
    return tuple(kind(layer) for layer in range(config.num_layers))


def _is_smaller(dtype: np.dtype) -> bool:
    """Whether pages may have this dtype under weights of any dtype."""
    return dtype in (jnp.dtype(jnp.bfloat16), *EIGHT_BIT_DTYPES)


def check_state(model: Model, state: KVState) -> None:
    """Checks that the state's pages are the model's, in its dtype, bfloat16 or 8-bit."""
    expect(isinstance(state, KVState), "state", "a KVState", type(state).__name__)
    own = model_kinds(model.config)
    one = "mla" if "mla" in own else "full"
    text = f"one whose layers are all {one!r}"
    if set(own) != {one}:
        text += f", or of the kinds {tuple(dict.fromkeys(own))} as the model has them"
    by_window = state.layer_kinds == own and state.kinds != (one,)
    expect(by_window or state.kinds == (one,), "state", text, state.kinds)
    tables = dict(zip(state.kinds, (group.table for group in state.groups), strict=True))
    dtype = state.groups[0].k_pages.dtype
    expected = jax.eval_shape(
        lambda: create_state(
            model, num_pages={kind: table.num_pages for kind, table in tables.items()}, max_seqs=1,
            pages_per_seq=1, page_size=state.groups[0].table.page_size, groups=by_window,
            layout=state.groups[0].layout,
            kv_dtype=dtype.name if _is_smaller(dtype) else "auto",
        )
    )  # fmt: skip
    for number, (wanted, group) in enumerate(zip(expected.groups, state.groups, strict=True)):
        where = "state" if len(tables) == 1 else f"state.groups[{number}]"
        for name in ("k_pages",) if wanted.is_latent else ("k_pages", "v_pages"):
            want, have = getattr(wanted, name), getattr(group, name)
            if want is None or have is None:  # k_pages hold both
                expect(want is have, f"{where}.{name}", "as the model has them", have)
                continue
            text = f"{want.dtype.name}{list(want.shape)}, as the model has them"
            ok = (want.shape, want.dtype) == (have.shape, have.dtype)
            got = f"{have.dtype.name}{list(have.shape)} in {group.layout}"
            expect(ok and group.layout == wanted.layout, f"{where}.{name}", text, got)


def _free_rows(state: KVState, count: int) -> np.ndarray:
    if is_shapes(state.groups[0].table.seq_lens):
        return np.arange(count, dtype=np.int32)
    free = np.flatnonzero(np.asarray(state.free_rows)).astype(np.int32)
    expect(len(free) >= count, "state", f"at least {count} free rows, one per prompt", len(free))
    return free[:count]


def compile_ahead(
    seconds: dict[str, float], program: Any, *args: Any, **static: Any
) -> Callable[..., Any]:
    """Compiles what a call needs, if it is not compiled yet, and books the time apart."""
    start = time.perf_counter()
    executable = compiled(program, *args, **static)
    seconds["compile"] += time.perf_counter() - start
    return executable


class Run:
    """One call of `generate`: the state, and what has been generated so far.

    Args:
      parts: of the model (`split_model`).
      state, texts, limits, stop_tokens, sampler, chunk: of the call, checked.
      rows: i32[texts], a row for each text.
      held: how many tokens of each text its row holds already; less than all.
      keep: rows that stop keep their pages.
      chunk_size: the padded size of a prefill chunk.
      pp: stages of the model.
    """

    def __init__(
        self, parts, state, texts, rows, limits, stop_tokens, sampler, chunk=32, *, held=0,
        keep=False, chunk_size=chunk_size, pp=1,
    ):  # fmt: skip
        self.held, self.options = held, {"chunk": chunk, "keep": keep}
        self.chunk_size, self._prefill_chunk = chunk_size, PREFILL_CHUNK
        self._program, self._fewest_steps = decode_steps, 1
        self._ticks = np.zeros(1 + pp, np.int64)  # of all loops, and those that each stage worked
        if pp > 1:  # as few micro-batches as may be: the weights are read for each
            self._program, self.options = decode_around, {"chunk": chunk, "micro_batches": pp}
            self._fewest_steps = min(fewest_steps(pp, pp), chunk)
            self.chunk_size, self._prefill_chunk = _several_chunks, 4 * pp * PREFILL_CHUNK
        self.graph, self.params = parts
        self.state = state
        self.texts, self.rows, self.limits = texts, rows, limits
        self.sampler = sampler
        # Layers with windows reserve chunk by chunk: in between they free what they no longer see.
        self._reserves_ahead = not any(isinstance(kind, int) for kind in state.kinds)
        self._prefill = prefill if self._reserves_ahead else prefill_within
        self._fixed = [jnp.asarray(x) for x in (rows, limits, stop_tokens)]
        self.reasons = np.where(limits > 0, Reason.RUNNING, Reason.LENGTH).astype(np.int32)
        self.tokens: list[list[int]] = [[] for _ in texts]
        self.searches: list[TextStream | None] = [None] * len(texts)  # for stop strings
        self.seconds = {"compile": 0.0, "prefill": 0.0, "decode": 0.0}
        self.prefill_tokens = 0

    def compile(self) -> None:
        """Compiles what the run calls if all prompts fit; weights and state may be shapes."""
        compile_ahead(self.seconds, admit, self.state.bare, *self._admitted())
        for part in {part.tokens.size: part for part in self._chunks()}.values():
            compile_ahead(self.seconds, self._prefill, self.graph, *self._prefill_call(part))
        if (self.reasons == Reason.RUNNING).any():
            call = self._decode_call(self._progress(), 1)
            compile_ahead(self.seconds, self._program, self.graph, *call, **self.options)

    def _admitted(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows that want pages, and for how many tokens."""
        wanted = np.where(self.reasons == Reason.RUNNING, self.rows, -1)
        new = np.array([len(text) - self.held for text in self.texts], np.int32)
        return wanted, new if self._reserves_ahead else np.zeros_like(new)

    def _chunks(self) -> list[Chunk]:
        """The prompts of the rows that run, all but the last token of each."""
        running = self.reasons == Reason.RUNNING
        ends = np.where(running, -1, self.held)
        parts = [t[self.held : end] for t, end in zip(self.texts, ends, strict=True)]
        return list(plan_chunks(parts, self._prefill_chunk, self.chunk_size))

    def _prefill_call(self, part: Chunk) -> tuple:
        rows = np.where((part.counts > 0) & (self.reasons == Reason.RUNNING), self.rows, -1)
        return self.params, self.state, rows, part.counts, part.tokens

    def _progress(self) -> Progress:
        return Progress(
            last=jnp.asarray(np.array([text[-1] for text in self.texts], np.int32)),
            made=jnp.asarray(np.zeros(len(self.texts), np.int32)),
            reasons=jnp.asarray(self.reasons),
        )

    def _decode_call(self, progress: Progress, num_steps: int) -> tuple:
        counted = np.int32(num_steps)
        return self.params, self.state, progress, *self._fixed, self.sampler, counted

    def prefill(self) -> None:
        """Reserves the prompts' pages and fills them, in chunks; prompts that do not fit stop."""
        with uninterrupted():
            call = self.state.bare, *self._admitted()
            bare, reasons = compile_ahead(self.seconds, admit, *call)(*call)
            self.state = self.state.with_tables(bare)
            self.reasons = np.maximum(self.reasons, np.asarray(reasons))
        programs = {}
        for part in self._chunks():
            call, size = self._prefill_call(part), part.tokens.size
            if size not in programs:
                programs[size] = compile_ahead(self.seconds, self._prefill, self.graph, *call)
            start = time.perf_counter()
            with uninterrupted():
                result = programs[size](*call)
                if self._reserves_ahead:
                    self.state = result
                else:
                    self.state, reasons = result
                    self.reasons = np.maximum(self.reasons, np.asarray(reasons))
                jax.block_until_ready(self.state.bare)
            self.seconds["prefill"] += time.perf_counter() - start
            self.prefill_tokens += part.num_tokens

    def decode(self, on_tokens: OnTokens | None) -> None:
        """Runs the decode loop until every row has stopped."""
        progress = self._progress()
        num_steps, program = self._fewest_steps, None
        while True:
            new: list[list[int]] = [[] for _ in self.texts]
            if (self.reasons == Reason.RUNNING).any():
                call = self._decode_call(progress, num_steps)
                if program is None:
                    program = compile_ahead(
                        self.seconds, self._program, self.graph, *call, **self.options
                    )
                start = time.perf_counter()
                with uninterrupted():
                    self.state, progress, out, *busy = program(*call)
                    self.reasons = np.asarray(progress.reasons)
                    new = [[int(t) for t in row if t >= 0] for row in np.asarray(out)]
                    if self._cut_at_stop_strings(new):
                        progress = dataclasses.replace(progress, reasons=jnp.asarray(self.reasons))
                    for tokens, more in zip(self.tokens, new, strict=True):
                        tokens.extend(more)
                    for one in busy:
                        self._ticks += [int(one.ticks), *np.asarray(one.worked)]
                seconds = time.perf_counter() - start
                self.seconds["decode"] += seconds
                if seconds < _SHORT_SECONDS or jax.process_count() > 1:  # whose clocks differ
                    num_steps = min(2 * num_steps, self.options["chunk"])
                elif seconds > _LONG_SECONDS:
                    num_steps = max(num_steps // 2, self._fewest_steps)
            if on_tokens is not None:
                on_tokens(new, [None if r == Reason.RUNNING else _name(r) for r in self.reasons])
            if not (self.reasons == Reason.RUNNING).any():
                return

    def _cut_at_stop_strings(self, new: list[list[int]]) -> bool:
        """Cuts the new tokens behind stop strings and stops those rows; False without any."""
        ended = np.zeros(len(new), np.bool_)
        for i, search in enumerate(self.searches):
            for count, token in enumerate(new[i], 1):
                if search is not None and search.is_stopped_by(token):
                    del new[i][count:]
                    ended[i] = True
                    break
        if ended.any():
            self._stop(ended, Reason.STOP_STRING)
        return bool(ended.any())

    def _stop(self, which: np.ndarray, reason: Reason) -> None:
        """Stops rows for a reason and gives back what they have."""
        live = ~np.asarray(self.state.free_rows)[self.rows]
        bare, _ = release(self.state.bare, np.where(which & live, self.rows, -1))
        self.state = self.state.with_tables(bare)
        self.reasons = np.where(which, np.int32(reason), self.reasons)

    def interrupt(self) -> None:
        """Gives back what the rows that still run have taken."""
        self._stop(self.reasons == Reason.RUNNING, Reason.INTERRUPTED)

    def result(self) -> Generation:
        """What there is now."""
        return Generation(
            tokens=self.tokens,
            stop_reasons=[_name(reason) for reason in self.reasons],
            state=self.state,
            seconds=self.seconds,
            prefill_tokens=self.prefill_tokens,
            busy=tuple((self._ticks[1:] / self._ticks[0]).tolist()) if self._ticks[0] else (),
        )


def _several_chunks(num_tokens: int) -> int:
    """The compiled size of a step that passes stages in parts (`stages.micro_batches`)."""
    if num_tokens <= PREFILL_CHUNK:
        return chunk_size(num_tokens)
    return -(-num_tokens // PREFILL_CHUNK) * PREFILL_CHUNK


def _name(reason: int) -> str:
    return Reason(reason).name.lower()

# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: many requests at once, each getting what it gets alone.

    engine = Engine(model, num_pages=512, max_seqs=16)
    requests = [engine.submit(prompt, max_new_tokens=64) for prompt in prompts]
    engine.run()
    requests[0].tokens, requests[0].reason

One program serves every step: decode rows and chunks of prompts side by side, in one of a few
compiled sizes. The host plans a step (`scheduler`), the device runs it (`step`), and the
host reads back the tokens that were drawn, nothing else, one step behind: while it plans and reads,
the device works. docs/serving.md tells what is guaranteed.
"""

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from jax_paged.checks import check_choice, expect
from jax_paged.layout import LAYOUTS, Layout
from jax_paged.ops.batch import pages_for

from ..checkpoint.tokenizer import Tokenizer
from ..decoder.generation import PAGE_SIZE, as_tokens, check_count, check_window
from ..decoder.protocol import Model, check_model, row_limit
from ..decoder.sample import Sampler
from ..decoder.stream import Decode, as_searches
from ..distributed.processes import Processes
from .adapters import AdapterSlots
from .between import BetweenEngines
from .groups import check_groups
from .logit_edits import EditOptions
from .plan import step_sizes
from .prefix_cache import PrefixCache
from .request import LogProbability, OnTokens, Request, Sampling
from .runner import ModelRunner, check_processes
from .scheduler import Feed, Scheduler, window_pages
from .snapshot import SNAPSHOT_VERSION, as_json, resubmitted
from .speculate import RULES, draft_tree
from .step import Drawn
from .structured import Constraint
from .swap import chunk_pages

__all__ = ["Engine", "Request"]


class Engine(BetweenEngines):
    """Serves requests on a model, from a pool of pages of its own.

    Args:
      model: a `Decoder` or any other `Model`.
      num_pages: pages in the pool.
      max_seqs: most requests that run at once.
      pages_per_seq: most pages of a request; None = what the model's context needs, or num_pages.
      page_size: tokens in a page.
      max_tokens: most tokens of a step, at least max_seqs · (1 + max_drafts): prompts are fed in
        chunks that fill a step up.
      prefix_cache: whether full pages are kept and found again by requests that start alike. None =
        if there are not several groups.
      groups: whether layers with windows have pools of their own, which free what they no longer
        see. num_pages and pages_per_seq are then those of the layers that see most; the other pools
        have what max_seqs requests need at once. Models without such layers are served as without
        it. Several groups have no prefix cache, swapping or draft model, and requests no windows.
      max_drafts: guesses per row and step (`speculate`), looked up in the request's own text unless
        there is a draft model; the engine then waits for each step, because it guesses from the
        tokens that came out of it.
      draft_branches: how many earlier places a look-up takes its guesses from, or how many first
        tokens a draft model goes on from; with more than 1 the guesses make a token tree.
      draft_model: a smaller `Model` with the same vocabulary, which makes the guesses. Its K and
        V have pages of their own, under the same page ids.
      draft_rule: which of a draft model's guesses are kept: "same_noise" (tokens are those without
        drafts) or "rejection" (keeps more; drawn tokens have the same distribution).
      ahead: steps that are dispatched before the oldest is read back; None = 1, without drafts.
      kv_dtype: of K and V, as for `generate`.
      layout: of the pages (`jax_paged.layout`); swapping takes "HND".
      preemption: what becomes of a request that has to make room: "recompute" (it computes its K
        and V anew) or "swap" (they are copied to host memory and back).
      swap_pages: most pages in host memory, with "swap"; taken 8 at a time; None = num_pages. A
        request that finds no room there is recomputed.
      window: most tokens that a token sees, itself and the pinned ones included. Those that no
        later one sees are dropped, so a request's pages stop growing. With a `Decoder` and a window
        within its context a request may go on for ever (`jax_paged.pinned_apart`), else to the end
        of the context. None = all tokens.
      num_pinned: with a window, the first tokens of each request, which all later ones see (the
        attention sinks of StreamingLLM, Xiao et al., 2023); below the window.
      cascade: whether pages that at least 4 running requests share are read once for all of them,
        where they hold 512 tokens or more. It saves reading where many requests have one long
        beginning; on a CPU it takes longer (docs/kernels.md, Ops made of others), on a GPU it is
        not timed. How logits are rounded then depends on the others, which it does not without.
      logprobs: how many of the likeliest tokens to tell beside the log-probabilities of each new
        one, in `Request.logprobs`; 0 = those of the new token alone; None = no log-probabilities.
      prompt_logprobs: whether requests may ask for the log-probabilities of their prompts. Steps
        that tell them compute the logits of max_tokens tokens, by a program of their own.
      max_adapters: most LoRA adapters at once, one for each request (`add_adapter`); the model is
        then a `Decoder`. None = none.
      max_rank: the largest rank of an adapter, at most 64; a multiple of 8, or rounded up to one.
      processes: those that the model's mesh lies on (`start_processes`), where there are several.
        The first one has the engine, and the others `follow`. A later engine takes its place.
      progress: whether to show a bar on stderr while compiling, if it is a terminal.

    Raises:
      ValueError: a size is no integer or out of range, or a model lacks something (`Model`).
    """

    def __init__(
        self,
        model: Model,
        *,
        num_pages: int,
        max_seqs: int = 8,
        pages_per_seq: int | None = None,
        page_size: int = PAGE_SIZE,
        max_tokens: int = 256,
        prefix_cache: bool | None = None,
        groups: bool = False,
        max_drafts: int = 0,
        draft_branches: int = 1,
        draft_model: Model | None = None,
        draft_rule: str = "same_noise",
        ahead: int | None = None,
        kv_dtype: str = "auto",
        layout: Layout = "HND",
        preemption: str = "recompute",
        swap_pages: int | None = None,
        window: int | None = None,
        num_pinned: int = 0,
        cascade: bool = False,
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
        max_adapters: int | None = None,
        max_rank: int = 16,
        processes: Processes | None = None,
        progress: bool = True,
    ):
        check_model(model)
        check_processes(model, processes)
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            check_count(name, value, 1)
        check_count("max_seqs", max_seqs, 1)
        check_count("max_drafts", max_drafts, 0)
        check_count("max_tokens", max_tokens, max_seqs * (1 + max_drafts))
        ahead = int(max_drafts == 0) if ahead is None else ahead
        check_count("ahead", ahead, 0)
        expect(not (ahead and max_drafts), "ahead", "0 with max_drafts", ahead)
        check_count("draft_branches", draft_branches, 1)
        has_drafts = draft_branches == 1 or max_drafts > 0
        expect(has_drafts, "draft_branches", "1 without drafts", draft_branches)
        check_choice("draft_rule", draft_rule, RULES)
        if draft_model is not None:
            check_model(draft_model, "draft_model")
            expect(max_drafts > 0, "max_drafts", "at least 1 with a draft model", max_drafts)
            have, want = draft_model.config.vocab_size, model.config.vocab_size
            expect(have == want, "draft_model", f"a vocab_size of {want}", have)
            few = draft_branches <= max_drafts
            expect(few, "draft_branches", f"at most max_drafts={max_drafts}", draft_branches)
        check_choice("preemption", preemption, ("recompute", "swap"))
        swaps = preemption == "swap"
        check_choice("layout", layout, LAYOUTS)
        expect(not swaps or layout == "HND", "layout", "'HND' with swapping", repr(layout))
        expect(swaps or swap_pages is None, "swap_pages", "None without swapping", swap_pages)
        if swap_pages is None:
            swap_pages = num_pages if swaps else 0
        check_count("swap_pages", swap_pages, int(swaps))
        self.swap_pages = swap_pages
        check_window(window, num_pinned)
        asked = None if window is None else (int(window), int(num_pinned))
        self._window, has_cache = asked, prefix_cache is None or bool(prefix_cache)
        if groups:
            self._window, has_cache = check_groups(
                model, window=asked, draft_model=draft_model, prefix_cache=prefix_cache,
                preemption=preemption,
            )  # fmt: skip
        if logprobs is not None:
            check_count("logprobs", logprobs, 0)
            few = logprobs <= model.config.vocab_size
            expect(few, "logprobs", f"at most vocab_size={model.config.vocab_size}", logprobs)
        self.logprobs, self.prompt_logprobs = logprobs, bool(prompt_logprobs)
        self._row_limit = row_limit(model, window)
        if pages_per_seq is None:
            most = pages_for(model.config.context_length, page_size)
            if self._window is not None:
                most = window_pages(self._window, max_tokens, page_size)
            pages_per_seq = min(num_pages, most)
        self.config, self.max_drafts, self.ahead = model.config, max_drafts, ahead
        sizes = {
            "num_pages": num_pages, "max_seqs": max_seqs, "pages_per_seq": pages_per_seq,
            "page_size": page_size, "kv_dtype": kv_dtype, "max_tree": max_drafts + 1,
            "windows": window is not None, "layout": layout, "groups": bool(groups),
            "max_tokens": max_tokens,
        }  # fmt: skip
        self._branches, self._has_drafter = draft_branches, draft_model is not None
        self._draft_parents: list[int] = []  # of a draft model's trees
        if draft_model is not None and draft_branches > 1:
            _, self._draft_parents = draft_tree(max_drafts, draft_branches)
        num_holds = max_seqs + -(-max_tokens // page_size)
        slots = None if max_adapters is None else (max_adapters, max_rank)
        self._processes = processes
        self._runner = ModelRunner(model, draft_model, sizes, num_holds, slots, processes)
        pages = self._runner.device.state.groups[0]
        dtypes = (np.dtype(model.dtype).name, pages.k_pages.dtype.name)
        self._salt = repr((model.config, *dtypes, pages.layout, asked))
        self.page_size = page_size
        self.weight_version = 0  # how often `update_weights` was called
        self._adapters: AdapterSlots | None = None
        if max_adapters is not None:
            self._adapters = AdapterSlots(self._runner, model.config)
        sizes_of_steps = step_sizes(max_seqs * (1 + max_drafts), max_tokens)
        self._schedulers = [
            Scheduler(
                num_pages=num_pages, max_seqs=max_seqs, pages_per_seq=pages_per_seq,
                page_size=page_size, step_sizes=sizes_of_steps, swap_pages=swap_pages,
                cache=PrefixCache(num_pages, page_size, self._salt) if has_cache else None,
                chunk_pages=chunk_pages(pages_per_seq), window=self._window,
            )
            for _ in range(self._runner.num_replicas)
        ]  # fmt: skip
        self._flying: deque[tuple[Drawn, list[list[Feed]]]] = deque()
        self._untold: deque[Request] = deque()
        self._num_requests = self.num_steps = self.num_fed = 0
        self.num_drafted = self.num_accepted = 0
        self.compile_seconds = self._runner.compile(
            sizes_of_steps,
            window=self._window, swaps=swaps, scores=self.prompt_logprobs, progress=progress,
            max_drafts=max_drafts, rule=draft_rule, branches=draft_branches, logprobs=logprobs,
            cascade=bool(cascade),
        )  # fmt: skip

    # Requests

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int = 0,
        draw_index: int = 0,
        logit_bias: Mapping[int, float] | None = None,
        banned_tokens: Sequence[int] = (),
        repetition_penalty: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        constraint: Constraint | None = None,
        stop_tokens: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        decode: Decode | None = None,
        prompt_logprobs: bool = False,
        adapter: str | None = None,
        hand_out: bool = False,
        priority: int = 0,
        on_tokens: OnTokens | None = None,
        begun: tuple[Sequence[int], Sequence[LogProbability]] = ((), ()),
    ) -> Request:
        """Adds a request; `step`, `run` and `stream` serve it.

        Args:
          prompt: token ids, at least one.
          max_new_tokens, temperature, top_k, top_p, min_p, seed, stop_tokens, stop_strings, decode:
            as for `generate`, which gives the same tokens to its prompt number `draw_index`.
          logit_bias: what is added to the logits of these tokens; −inf bans one.
          banned_tokens: tokens that never come.
          repetition_penalty: r in [0.01, 100]. Logits of tokens that prompt or new tokens hold are
            divided by r where they are positive, else multiplied; None or 1 = none.
          presence_penalty, frequency_penalty: subtracted from the logit of a token once if it is
            among the new tokens, and for each time that it is; None or 0 = none.
          constraint: what form the new text must have (`json_schema`, `regex`). The text ends with
            "complete" where nothing can follow it, or with the tokenizer's token for the end. A
            request with one has no drafts, and while it runs the engine waits for each step.
          prompt_logprobs: tells the log-probabilities of the prompt's own tokens, too, in
            `Request.prompt_logprobs`; max_new_tokens may be 0. The prompt is then computed whole,
            whatever the prefix cache has.
          adapter: the name of an adapter (`add_adapter`), whose present version the request has to
            its end; None = none.
          hand_out: whether K and V of its tokens lie in host memory at its end, until `hand_out`
            takes them; max_new_tokens may be 0. Of an engine that swaps.
          priority: higher goes first, and may preempt lower.
          on_tokens: called as on_tokens(new_tokens, reason) when there are new ones, and once with
            a reason (None before) at the end.
          begun: new tokens that it has from another engine, and what was told of them; it goes on
            behind them, and on_tokens is called for later ones only.

        Returns:
          A `Request`. One that can never fit the context or the pool is refused: it is done,
          `reason` is "refused" and `detail` says why.

        Raises:
          ValueError: an option or a token id is out of range.
        """
        vocab_size = self.config.vocab_size
        text = as_tokens("prompt", prompt, vocab_size)
        check_count("max_new_tokens", max_new_tokens, 0)
        sampling = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        Sampler.create(temperature=temperature, seed=seed, **sampling)
        check_count("draw_index", draw_index, 0)
        edits = EditOptions.create(
            vocab_size, logit_bias=logit_bias, banned_tokens=banned_tokens,
            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
        )  # fmt: skip
        can = self.prompt_logprobs or not prompt_logprobs
        expect(can, "prompt_logprobs", "False, or an engine with prompt_logprobs=True", True)
        if hand_out:
            self._check_swaps("hand_out")
        matcher = None if constraint is None else constraint.start(vocab_size)
        version = None if adapter is None else self._slots().find(adapter)
        ids = as_tokens("stop_tokens", stop_tokens, vocab_size, least=0)
        (search,) = as_searches([text.tolist()], stop_strings, decode)
        most = self._row_limit
        request = Request(
            prompt=text,
            limit=max_new_tokens if most is None else min(max_new_tokens, max(most - len(text), 0)),
            stop_tokens=frozenset(ids.tolist()) | (matcher.eos_tokens if matcher else frozenset()),
            search=search,
            sampling=Sampling(
                float(temperature), **sampling, seed=int(seed), draw_index=draw_index
            ),
            edits=edits,
            matcher=matcher,
            tells_prompt=bool(prompt_logprobs),
            prompt_logprobs=[None] * len(text) if prompt_logprobs else [],
            hands_out=bool(hand_out),
            priority=int(priority),
            number=self._num_requests,
            on_tokens=on_tokens,
            adapter=version,
        )
        self._num_requests += 1
        scheduler = self._schedulers[0]
        need = scheduler.pages_needed(len(text) + max(request.limit - 1, 0))
        if most is not None and len(text) > most:
            have = f"the model's context has {most}"
            self._end(request, "refused", f"{len(text)} prompt tokens, {have}")
        elif need > scheduler.most_pages:
            what = f"{len(text)} prompt and {request.limit} new tokens need {need} pages"
            self._end(request, "refused", f"{what}, a request can have {scheduler.most_pages}")
        elif request.limit == 0 and not (request.tells_prompt or request.hands_out):
            self._end(request, "length")
        elif begun[0] and self._has_ended(request, *begun):
            request.tell()
        else:
            request.replica = self._replica_for(request)
            self._scheduler(request).add(request)
        return request

    def _has_ended(
        self, request: Request, tokens: Sequence[int], logprobs: Sequence[LogProbability]
    ) -> bool:
        """Gives a request the new tokens that it has already; whether they have ended it."""
        had = as_tokens("begun", tokens, self.config.vocab_size).tolist()
        expect(len(had) <= request.limit, "begun", f"at most {request.limit} tokens", len(had))
        told = len(had) * (self.logprobs is not None)
        expect(len(logprobs) == told, "begun", f"{told} log-probabilities", len(logprobs))
        request.take(had, logprobs)
        request.num_told = len(request.tokens)
        return request.is_done

    def _replica_for(self, request: Request) -> int:
        """The replica that has most of the request's pages in its cache, or the least to do."""

        def rank(replica: int) -> tuple[int, int]:
            scheduler = self._schedulers[replica]
            return -scheduler.num_cached(request), scheduler.load

        return min(range(self.num_replicas), key=rank) if self.num_replicas > 1 else 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        on_tokens: Callable[[int, int, list[int], str | None], None] | None = None,
        **options: Any,
    ) -> list[list[Request]]:
        """Serves n samples of each prompt, and whatever else the engine has, to the end.

        The samples of a prompt share its full pages where the engine has a prefix cache: the first
        one computes them, and the others start when it has.

        Args:
          n: samples of a prompt. Sample j of prompt i draws with draw_index i · n + j, so as
            `generate` would for prompt i · n + j.
          on_tokens: called as on_tokens(prompt, sample, new_tokens, reason), by their numbers.
          options: as for `submit`.

        Returns:
          The requests, all done: [len(prompts)][n].

        Raises:
          ValueError: as `submit`; then nothing of this call goes on.
        """
        check_count("n", n, 1)
        made: list[list[Request]] = [[] for _ in prompts]

        def add(i: int) -> None:
            sample = len(made[i])
            tell = None
            if on_tokens is not None:
                tell = functools.partial(on_tokens, i, sample)
            made[i].append(
                self.submit(prompts[i], draw_index=i * n + sample, on_tokens=tell, **options)
            )

        try:
            for i in range(len(prompts)):
                add(i)
            begun = [False] * len(prompts)
            while not all(begun):
                for i, (first, *_) in enumerate(made):
                    if not begun[i] and (first.is_done or first.fed >= len(first.prompt)):
                        begun[i] = True
                        for _ in range(n - 1):
                            add(i)
                if not all(begun):
                    self.step()
            self.run()
        except BaseException:
            for request in chain.from_iterable(made):
                self.cancel(request)
            raise
        return made

    def cancel(self, request: Request) -> None:
        """Ends a request; its pages are free before the next step. A done one stays as it is."""
        if not request.is_done:
            self._scheduler(request).remove(request)
            self._end(request, "cancelled")

    def _end(self, request: Request, reason: str, detail: str = "") -> None:
        request.reason, request.detail = reason, detail
        request.tell()

    # Snapshots

    def snapshot(self, requests: Sequence[Request] | None = None) -> dict[str, Any]:
        """Requests with the tokens that they have, as values that JSON has, for `restore`.

        `SnapshotFile` keeps one in a file.

        Args:
          requests: which ones, done ones too. None = all that wait or run, in the order of arrival.
        """
        if requests is None:
            lists = ((*one.waiting, *one.running) for one in self._schedulers)
            requests = sorted(chain.from_iterable(lists), key=lambda request: request.number)
        return {
            "jax_paged": SNAPSHOT_VERSION,
            "model": self._salt,
            "requests": [*map(as_json, requests)],
        }

    def restore(
        self,
        snapshot_of: Mapping[str, Any],
        *,
        decode: Decode | None = None,
        tokenizer: Tokenizer | None = None,
        on_tokens: Callable[[int, list[int], str | None], None] | None = None,
    ) -> list[Request]:
        """Goes on with the requests of a snapshot, of this engine or another one.

        K and V of the tokens are computed anew. The weights must be those of then, and adapters
        have the names of then; both are up to the caller.

        Args:
          snapshot_of: from `snapshot`, perhaps through JSON.
          decode: of the requests that have stop strings, as for `submit`.
          tokenizer: of those that have a constraint.
          on_tokens: called as on_tokens(i, new_tokens, reason), with the place in the list.

        Returns:
          The requests in the order of the snapshot; those that were done are done.

        Raises:
          ValueError: this is no snapshot, it is of another model, or as `submit`.
        """
        version = snapshot_of.get("jax_paged")
        expect(version == SNAPSHOT_VERSION, "snapshot_of", "a snapshot of this version", version)
        model = snapshot_of["model"]
        expect(model == self._salt, "snapshot_of", f"one of {self._salt}", model)
        return [
            resubmitted(
                self, known, decode, tokenizer,
                None if on_tokens is None else functools.partial(on_tokens, i),
            )
            for i, known in enumerate(snapshot_of["requests"])
        ]  # fmt: skip

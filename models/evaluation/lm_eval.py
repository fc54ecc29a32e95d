# SPDX-License-Identifier: Apache-2.0
"""A model for lm-eval, EleutherAI's harness of evaluation tasks: `jax-paged` in its registry.

    from jax_paged.models.evaluation.lm_eval import JaxPagedLM

    results = lm_eval.simple_evaluate(JaxPagedLM(), tasks=["arc_easy"])

It needs the extra `lm-eval`, and no torch. Log-likelihoods are those of `loglikelihoods`, new text
comes from an `Engine`.
"""

# ruff: noqa: E402
from .._packages import check_installed

check_installed("lm_eval", extra="lm-eval")

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval.models  # noqa: F401  (the harness's own models: a registry with ours has them not)
from lm_eval._cli import HarnessCLI
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import setup_logging

from jax_paged.checks import expect
from jax_paged.ops.batch import pages_for

from ..checkpoint.tokenizer import MissingTokenizer, Tokenizer
from ..checkpoint.weights import default_checkpoint, load_checkpoint
from ..decoder.generation import PAGE_SIZE, check_count
from ..decoder.protocol import Model
from ..decoder.stream import TextStream
from ..progress import progress_bar
from ..serving.engine import Engine, Request
from .likelihoods import loglikelihoods, rolling_loglikelihoods, round_up

_POOL_PAGES = 2048
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@register_model("jax-paged")
class JaxPagedLM(TemplateLM):
    """A checkpoint as the harness takes it.

    Args:
      pretrained: a Hugging Face folder or GGUF file; None = `default_checkpoint`.
      model, tokenizer: a model that is loaded already, and its tokenizer; pretrained is then its
        name.
      base, dtype, weight_dtype, context_length, mesh, pack: as for `load_checkpoint`; over a mesh
        nothing is packed.
      kv_dtype: of K and V, as for `generate`.
      max_length: most tokens that a prediction sees; None = the model's context_length.
      max_gen_toks: new tokens of a request that does not say how many.
      max_seqs: requests that generate at once.
      chunk: tokens per forward step of log-likelihoods, ≥ 1.
      seed: of the draws of requests that sample.
      add_bos_token: whether texts begin with the start token; None = as the checkpoint says.
      prefix_token_id: what an empty context is replaced by; None = the start token, or without one
        the end token.
      batch_size, max_batch_size, device: what the harness gives to every model. They do nothing
        here: steps are packed to a number of tokens, and JAX chooses the device.

    Raises:
      ValueError: an option is out of range, or the checkpoint has no tokenizer or no end token.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        model: Model | None = None,
        tokenizer: Tokenizer | MissingTokenizer | None = None,
        base: str | None = None,
        dtype: Any = None,
        weight_dtype: Any = None,
        context_length: int | None = None,
        mesh: Any = None,
        pack: bool = True,
        kv_dtype: str = "auto",
        max_length: int | None = None,
        max_gen_toks: int = 256,
        max_seqs: int = 64,
        chunk: int = 512,
        seed: int = 0,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
    ):
        super().__init__()
        check_count("max_gen_toks", max_gen_toks, 1)
        check_count("max_seqs", max_seqs, 1)
        check_count("chunk", chunk, 1)
        if model is None:
            path = Path(pretrained) if pretrained else default_checkpoint()
            model, _, tokenizer = load_checkpoint(
                path, dtype, base=base, weight_dtype=weight_dtype, context_length=context_length,
                mesh=mesh, pack=pack and mesh is None,
            )  # fmt: skip
            pretrained = str(path)
        if isinstance(tokenizer, MissingTokenizer):
            raise ValueError(tokenizer.reason)
        have = type(tokenizer).__name__
        expect(isinstance(tokenizer, Tokenizer), "tokenizer", "that of the model", have)
        assert isinstance(tokenizer, Tokenizer)
        config = model.config
        most = config.context_length
        check_count("max_length", most if max_length is None else max_length, 1)
        fits = max_length is None or max_length <= most
        expect(fits, "max_length", f"at most context_length={most}", max_length)
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.max_length = most if max_length is None else max_length
        self.max_gen_toks, self.max_seqs, self.chunk, self.seed = (
            max_gen_toks,
            max_seqs,
            chunk,
            seed,
        )
        self.kv_dtype = kv_dtype
        self._name = pretrained or type(model).__name__
        ends = (*tokenizer.eos_ids, *getattr(config, "eos_token_ids", ()))
        expect(len(ends) > 0, "tokenizer", "one with a token that ends a text", "none")
        self._end_ids = tuple(dict.fromkeys(ends))
        start = tokenizer.named_tokens.get("bos_token")
        self._start_id = None if start is None else tokenizer.backend.token_to_id(start)
        self._prefix_id, self._add_start = prefix_token_id, add_bos_token
        if add_bos_token is not None:
            has = self._start_id is not None
            expect(
                has, "add_bos_token", "None for a checkpoint without a start token", add_bos_token
            )

    # Tokens

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._end_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands for an empty context."""
        if self._prefix_id is not None:
            return self._prefix_id
        return self.eot_token_id if self._start_id is None else self._start_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The ids of a text; None = with a start token where the checkpoint adds one.

        A text that begins with the start token itself, as one under a chat template may, gets no
        second one.
        """
        tokenizer = self.tokenizer
        if add_special_tokens is None:
            prefix = self.tok_decode([self.prefix_token_id], skip_special_tokens=False)
            has = prefix and string.startswith(prefix)
            add_special_tokens = False if has else self._add_start
        if add_special_tokens is None:
            return tokenizer.encode(string)
        plain = tokenizer.backend.encode(string, add_special_tokens=False).ids
        has_start = add_special_tokens and self._start_id is not None
        start: list[Any] = [self._start_id] if has_start else []
        return [*start, *plain]

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    # Chat

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the harness's cache of requests."""
        return self._name.replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation; without a generation prompt its last message goes on."""
        text = self.tokenizer.render_chat(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]

    # Requests

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        found = loglikelihoods(self.model, pairs, progress=not disable_tqdm, **self._options)
        answers = [(one.log_p, one.is_greedy) for one in found]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], answer)
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """log p of whole texts, in the windows of the harness."""
        texts = [request.args for request in requests]
        found = rolling_loglikelihoods(
            self.model, [self.tok_encode(text) for (text,) in texts],
            prefix_token=self.prefix_token_id, progress=not disable_tqdm, **self._options,
        )  # fmt: skip
        for text, answer in zip(texts, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", text, answer)
        return found

    @property
    def _options(self) -> dict[str, Any]:
        return {"context": self.max_length, "chunk": self.chunk, "kv_dtype": self.kv_dtype}

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continues each text up to a stop string, the end token or max_gen_toks.

        A context that leaves no room for max_gen_toks is cut on the left.

        Raises:
          ValueError: a request asks for what the engine has not, or for too many tokens.
        """
        if not requests:
            return []
        prompts, plans = [], []
        for text, asked in (request.args for request in requests):
            plan = self._generation(asked)
            room = self.max_length - plan["max_new_tokens"]
            few = f"below max_length={self.max_length}"
            expect(room > 0, "max_gen_toks", few, plan["max_new_tokens"])
            prompts.append(self.tok_encode(text)[-room:] or [self.prefix_token_id])
            plans.append(plan)
        needs = sorted(
            pages_for(len(prompt) + plan["max_new_tokens"], PAGE_SIZE)
            for prompt, plan in zip(prompts, plans, strict=True)
        )
        max_seqs = min(self.max_seqs, round_up(len(requests)))  # few programs
        most = max(_POOL_PAGES, 2 * needs[-1])  # with fewer than all need, requests wait
        engine = Engine(
            self.model, num_pages=round_up(min(sum(needs[-max_seqs:]), most)), max_seqs=max_seqs,
            pages_per_seq=round_up(needs[-1]), max_tokens=max(512, max_seqs),
            kv_dtype=self.kv_dtype, progress=not disable_tqdm,
        )  # fmt: skip
        made: dict[int, Request] = {}
        with progress_bar(len(requests), "generate", "texts", shown=not disable_tqdm) as update:
            # Neighbours in this order share pages; what all share is computed before they start.
            order = sorted(range(len(prompts)), key=lambda i: prompts[i])
            ends = prompts[order[0]], prompts[order[-1]]
            for number, i in enumerate(order):
                made[i] = engine.submit(
                    prompts[i], draw_index=i, decode=self.tokenizer.decode, **plans[i],
                    on_tokens=lambda _, reason: None if reason is None else update(),
                )  # fmt: skip
                if number == 0 and len(order) > 1 and ends[0][:PAGE_SIZE] == ends[1][:PAGE_SIZE]:
                    while not made[i].is_done and made[i].fed < len(prompts[i]):
                        engine.step()
            engine.run()
        texts = []
        for i, (request, prompt, plan) in enumerate(zip(requests, prompts, plans, strict=True)):
            if made[i].reason == "refused":
                raise RuntimeError(f"generate_until: {made[i].detail}")
            stream = TextStream(self.tokenizer.decode, prompt, plan["stop_strings"])
            texts.append(stream.push(made[i].tokens) + stream.finish())
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _generation(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The options of a request as those of `Engine.submit`."""
        options: dict[str, Any] = {**normalize_gen_kwargs(asked, self.max_gen_toks)}
        stop_ids, stop_strings = set(self._end_ids), []
        until = options.pop("until", None) or []
        for text in [until] if isinstance(until, str) else until:
            ids = self.tokenizer.backend.encode(text, add_special_tokens=False).ids
            if len(ids) == 1 and not self.tokenizer.decode(
                ids
            ):  # a special token: no text shows it
                stop_ids.add(ids[0])
            elif text:
                stop_strings.append(text)
        plan: dict[str, Any] = {
            "max_new_tokens": options.pop("max_gen_toks"),
            "stop_tokens": sorted(stop_ids), "stop_strings": stop_strings, "seed": self.seed,
        }  # fmt: skip
        samples = options.pop("do_sample")
        for name in _SAMPLING:
            value = options.pop(name, None)
            if samples and value is not None:
                plan[name] = value
        if samples:
            plan.setdefault("temperature", 1.0)
        known = f"until, max_gen_toks, do_sample, {', '.join(_SAMPLING)}"
        expect(not options, "generation_kwargs", known, f"also {options}")
        return plan


def run_harness(arguments: Sequence[str], model_args: Mapping[str, Any]) -> None:
    """`lm-eval run` with these arguments, on a `JaxPagedLM` with these options and --model_args.

    Raises:
      SystemExit: an argument is wrong, as the harness says on stderr.
    """
    before = sys.argv
    # The harness reads its arguments there.
    sys.argv = ["jax-paged lm-eval", "run", *arguments, "--model", "jax-paged"]
    try:
        setup_logging()
        command = HarnessCLI()
        options = command.parse_args()
        given = options.model_args or {}
        twice = sorted(given.keys() & model_args.keys())
        expect(not twice, "model_args", "none of the command's own options", twice)
        options.model_args = {**given, **model_args}
        command.execute(options)
    finally:
        sys.argv = before

# SPDX-License-Identifier: Apache-2.0
"""The command line: `jax-paged generate`, `chat`, `eval`, `lm-eval`, `serve`, `prefill` and
`bench-serve`.

stdout holds the result and nothing else; progress, rates and errors go to stderr. Bad input is one
line on stderr and exit code 2, Ctrl-C is exit code 130.

A start is mostly imports, weights and programs. Compiled programs are kept between starts
(`program_cache`), and while the weights are read, the programs are made for their shapes.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from jax_paged._start.command_line import model_options, parser
from jax_paged._start.interrupt import EXIT_CODE, before_leaving, note_ctrl_c, uninterrupted
from jax_paged.checks import expect

from .checkpoint.peft import load_adapter
from .checkpoint.weights import Checkpoint, load_checkpoint, open_checkpoint
from .decoder.adapters import with_adapter
from .decoder.generation import (
    Generation,
    check_count,
    check_window,
    compile_for,
    generate,
)
from .decoder.model import Decoder
from .decoder.program_cache import kept_programs
from .decoder.sample import Sampler
from .decoder.stream import TextStream
from .distributed.processes import EXIT_LOST, Processes, leave_failed, start_processes
from .evaluation.perplexity import evaluate
from .progress import progress_bar
from .serving import bench_serve, chat
from .serving.batch import generate_many
from .serving.prefiller import opened_prefiller
from .serving.runner import follow
from .serving.snapshot import SnapshotFile
from .serving.together import generate_together, state_of
from .status import Status

_BROKEN_PIPE = 141  # as a shell counts: 128 + SIGPIPE

_WHY = {
    "pool_full": "pool_full (no free page left in the pool)",
    "row_full": "row_full (no free page left in the row)",
    "interrupted": "interrupted",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the arguments and runs the command line; returns the exit code."""
    try:
        options = parser().parse_args(arguments)
    except KeyboardInterrupt:
        return EXIT_CODE
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Runs the command that the options name; returns the exit code."""
    logging.getLogger("jax").setLevel(logging.ERROR)  # e.g. about a GPU that is not used
    code = _run(options)
    if options.processes is not None and options.processes.has_failed:
        leave_failed(code)  # JAX would wait for the others, which have ended
    return code


def _run(options: argparse.Namespace) -> int:
    status = Status()
    status.clear()
    try:
        options.status = status
        status.say("loading …")
        with contextlib.ExitStack() as stack:
            if options.program_cache:
                stack.enter_context(kept_programs())
            if _is_of_a_job(options):
                options.processes = stack.enter_context(_started(options))
                if not options.processes.is_first and options.command != "eval":
                    return _follow(options)
            return _COMMANDS[options.command](options)
    except KeyboardInterrupt:
        return EXIT_CODE
    except BrokenPipeError:
        # Nobody reads on; keep the interpreter from complaining when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except ConnectionError as error:  # of a job that does not come together
        status.clear()
        _fail(error)
        return EXIT_LOST
    except OSError as error:
        status.clear()
        what = f"{error.filename}: {error.strerror}" if error.filename else error
        return _fail(what)
    except (ValueError, NotImplementedError, ImportError) as error:
        status.clear()
        return _fail(error)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        status.clear()
        return _fail(f"out of memory: {error}")
    finally:
        status.clear()


def _fail(message: object) -> int:
    print("jax-paged: error:", " ".join(str(message).split()), file=sys.stderr)
    return 2


def _is_of_a_job(options: argparse.Namespace) -> bool:
    """Whether this process is one of several; checks what says so."""
    names = "coordinator", "num_processes", "process_id"
    given = [getattr(options, name, None) for name in names]
    coordinator, *numbers = given
    expect(coordinator is not None or given == [None] * 3, "coordinator", "HOST:PORT", None)
    if coordinator not in (None, "auto"):
        for name, number in zip(("num-processes", "process-id"), numbers, strict=True):
            check_count(name, number, 0)
    return coordinator is not None


def _started(options: argparse.Namespace) -> Processes:
    """The processes of the job. What libraries write to stdout, as gloo does, goes to stderr."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding)
    os.dup2(2, 1)
    coordinator = None if options.coordinator == "auto" else options.coordinator
    return start_processes(coordinator, options.num_processes, options.process_id)


def _follow(options: argparse.Namespace) -> int:
    """What all processes but the first one do; Ctrl-C is for that one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    given = model_options(options)
    checkpoint = open_checkpoint(**given)
    options.status.tell(checkpoint.title)
    model: Any = checkpoint.load()
    if options.command == "generate" and options.pp is not None:
        options.status.clear()
        generate_together(options.processes, model, checkpoint.tokenizer.decode)
        return 0
    if options.command == "generate" and options.adapter is not None:
        model = with_adapter(model, load_adapter(options.adapter, model.config))
    drafter = None
    if getattr(options, "draft_model", None) is not None:
        drafter, _, _ = load_checkpoint(**given | {"path": options.draft_model, "base": None})
    options.status.clear()
    follow(options.processes, model, draft_model=drafter)
    return 0


def _generate(options: argparse.Namespace) -> int:
    prompts = list(options.prompts)
    if options.file is not None:
        lines = _read_text(options.file).splitlines()
        prompts += [line for line in lines if line.strip()]
    elif not prompts and sys.stdin is not None and not sys.stdin.isatty():
        text = _read_text("-").removesuffix("\n").removesuffix("\r")
        prompts += [text] if text else []
    if not prompts:
        source = "no prompt given" if options.file is None else f"no prompt in {options.file}"
        expected = "PROMPT, a text on stdin or a --file with one prompt per line"
        raise ValueError(f"{source}: expected {expected}")
    for number, prompt in enumerate(prompts, 1):
        _check_unicode(f"prompt {number}", prompt)
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    sampling = {name: getattr(options, name) for name in names}
    Sampler.create(**sampling)  # bad options should not wait for the weights
    check_count("max-new-tokens", options.max_new_tokens, 0)
    expect(not (options.pp and options.prefill), "prefill", "none with --pp", options.prefill)
    if options.pages is not None:
        check_count("pages", options.pages, 1)
    has_place = options.snapshot is None or options.output is not None
    expect(has_place, "snapshot", "--output FILE, too: what is printed cannot be taken back", None)
    with opened_prefiller(options.prefill) as prefill, _open_output(options.output) as out:
        checkpoint = open_checkpoint(**model_options(options))
        config, tokenizer = checkpoint.config, checkpoint.tokenizer
        adapter = None if options.adapter is None else load_adapter(options.adapter, config)
        stops = {*config.eos_token_ids, *tokenizer.eos_ids, *options.stop_id}
        stop_ids, stop_strings = _stops(tokenizer, options.stop)
        stops |= stop_ids
        if options.chat:
            texts = [tokenizer.apply_chat([{"role": "user", "content": p}]) for p in prompts]
        else:
            texts = [tokenizer.encode(prompt) for prompt in prompts]
        streams = [TextStream(tokenizer.decode, text, stop_strings) for text in texts]
        printer = _Printer(out, prompts, streams, options.json, options.status)
        sampling |= {"max_new_tokens": options.max_new_tokens, "stop_tokens": sorted(stops)}
        sampling |= {} if adapter is None else {"adapter": adapter}
        searched = {"stop_strings": stop_strings, "decode": tokenizer.decode}
        options.status.tell(checkpoint.title)
        snapshots = None if options.snapshot is None else _snapshots(options, texts)
        in_stages = options.pp is not None  # an engine's steps would let them run dry
        uses_engine = any((options.processes, prefill, snapshots)) or len(texts) > 1
        if in_stages and options.processes is not None:
            result = generate_together(
                options.processes, checkpoint.load(), tokenizer.decode, texts,
                num_pages=options.pages, kv_dtype=options.kv_dtype, on_tokens=printer.take,
                stop_strings=stop_strings, **sampling,
            )  # fmt: skip
        elif uses_engine and not in_stages:
            model = checkpoint.load()
            options.status.say("compiling …")
            result = generate_many(
                model, texts, num_pages=options.pages, kv_dtype=options.kv_dtype,
                processes=options.processes, prefill=prefill, snapshots=snapshots,
                on_tokens=printer.take, **searched, **sampling,
            )  # fmt: skip
        else:  # one program for the whole loop, without trips to the host
            result = _generate_at_once(options, checkpoint, texts, sampling, searched, printer)
        with uninterrupted():
            printer.finish(result)
    _report(result)
    interrupted = printer.is_interrupted() or "interrupted" in result.stop_reasons
    if interrupted and in_stages and options.processes is not None:
        raise KeyboardInterrupt  # it ends the other processes, which wait for this one
    if interrupted:
        return EXIT_CODE
    if snapshots is not None:  # the output is written
        snapshots.remove()
    return 0


def _snapshots(options: argparse.Namespace, texts: list[list[int]]) -> SnapshotFile:
    """The file of --snapshot, for these prompts and all options that the tokens depend on."""
    aside = ("snapshot", "output", "json", "pages", "program_cache", "prompts", "file", "prefill")
    aside += ("status", "processes", "coordinator", "num_processes", "process_id", "tp", "dp", "pp")
    job = {name: value for name, value in vars(options).items() if name not in aside}
    digest = hashlib.sha256(json.dumps([texts, job], sort_keys=True).encode())
    return SnapshotFile(options.snapshot, job=digest.hexdigest())


def _generate_at_once(
    options: argparse.Namespace,
    checkpoint: Checkpoint,
    texts: list[list[int]],
    sampling: dict[str, Any],
    searched: dict[str, Any],
    printer: "_Printer",
) -> Generation:
    """Compiles for the prompts while the weights are loaded, then generates."""
    seconds, sizes = [], (len(texts), options.pages, options.kv_dtype)

    def compile_programs(shapes: Decoder) -> None:
        create = None if options.pages is None else lambda: state_of(shapes, *sizes)
        kv_dtype = options.kv_dtype if options.pages is None else "auto"
        arguments = dict(sampling, create=create, kv_dtype=kv_dtype)
        seconds.append(compile_for(shapes, texts, **arguments))

    model = checkpoint.load_and(compile_programs, lambda: options.status.say("compiling …"))
    options.status.clear()
    if options.pages is None:
        where: dict[str, Any] = {"kv_dtype": options.kv_dtype}
    else:
        where = {"state": state_of(model, *sizes)}
    result = generate(model, texts, on_tokens=printer.take, **where, **searched, **sampling)
    result.seconds["compile"] += seconds[0]
    return result


def _eval(options: argparse.Namespace) -> int:
    is_first = options.processes is None or options.processes.is_first
    text = _read_text(options.text) if is_first else None
    for name in ("chunk", "context", "stride"):
        if getattr(options, name) is not None:
            check_count(name, getattr(options, name), 1)
    check_window(options.window, options.pinned, name="pinned")
    result = _evaluated(options, text, options.weight_dtype)
    lines = [f"perplexity: {result['perplexity']:.4f}", f"tokens: {result['tokens']}"]
    if options.weight_dtype is not None:
        before = _evaluated(options, text, None)["perplexity"]
        result["unquantized_perplexity"] = before
        cost = 100 * (result["perplexity"] / before - 1)
        lines.append(f"perplexity of the unquantized weights: {before:.4f} ({cost:+.2f} %)")
    if is_first:
        print(json.dumps(result) if options.json else "\n".join(lines), flush=True)
    return 0


def _evaluated(options: argparse.Namespace, text: str | None, weight_dtype: Any) -> dict[str, Any]:
    """The model is loaded here, so that there is one in memory at a time.

    Args:
      text: None = the first process has it.
    """
    given = model_options(options) | {"weight_dtype": weight_dtype}
    tokens: Any = []
    names = ("chunk", "context", "stride", "window", "kv_dtype")
    asked = {name: getattr(options, name) for name in names} | {"num_pinned": options.pinned}
    checkpoint = open_checkpoint(**given)
    if text is not None:
        tokens = checkpoint.tokenizer.encode(text)
        if len(tokens) < 2:
            raise ValueError(
                f"{options.text}: expected at least 2 tokens of text, got {len(tokens)}"
            )
    options.status.tell(checkpoint.title)
    model = checkpoint.load()
    if options.processes is not None:  # all compute the same, whatever options they have
        (asked,), (tokens,) = options.processes.share([asked], [np.asarray(tokens, np.int32)])
    with progress_bar(len(tokens) - 1, "eval", "tokens") as update:
        return evaluate(model, tokens, **asked, on_progress=update)


def _lm_eval(options: argparse.Namespace) -> int:
    from .evaluation import lm_eval  # the harness takes seconds to import

    options.status.clear()
    given = model_options(options) | {"kv_dtype": options.kv_dtype}
    named = {"pretrained": given.pop("path")} | given
    known = {name: value for name, value in named.items() if value is not None}
    lm_eval.run_harness(options.harness, known)
    return 0


def _read_text(path: str) -> str:
    name = "stdin" if path == "-" else path
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}: expected UTF-8 text, got the byte 0x{data[error.start]:02x} at offset "
            f"{error.start}"
        ) from None


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name}: expected UTF-8 text, got {text!r}") from None


def _stops(tokenizer: Any, texts: list[str]) -> tuple[set[int], list[str]]:
    """The --stop texts as special tokens, which no text shows, and as stop strings."""
    ids, strings = set(), []
    for text in texts:
        if not text:
            raise ValueError("--stop: expected a text that is not empty")
        alone = tokenizer.encode(text)[len(tokenizer.encode("")) :]  # without a start token
        if tokenizer.decode(alone) == tokenizer.decode(alone, skip_special_tokens=False):
            strings.append(text)
        elif len(alone) == 1:
            ids.add(alone[0])
        else:
            raise ValueError(
                f"--stop: expected a text without special tokens, or one of them, got {text!r}"
            )
    return ids, strings


@contextlib.contextmanager
def _open_output(path: str | None) -> Iterator[IO[str]]:
    """stdout, or a file that appears under its name when the block has ended well."""
    if path is None:
        yield sys.stdout
        return
    target = Path(path)
    if target.is_dir():
        raise ValueError(f"{target}: expected a file to write to, got a folder")
    if target.exists() and not os.access(target, os.W_OK):
        raise ValueError(f"{target}: expected a file to write to, got one that is not writable")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        out = part.open("x", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{target}: cannot be written: {error.strerror}") from None
    remove = functools.partial(part.unlink, missing_ok=True)
    try:
        with before_leaving(remove), out:
            yield out
        part.replace(target)
    finally:
        remove()


class _Printer:
    """Writes the new text of all prompts in their order, and of the first unfinished one live."""

    def __init__(
        self, out: IO[str], prompts: list[str], streams: list[TextStream], as_json: bool,
        status: Status,
    ):  # fmt: skip
        self.status = status
        self.out, self.prompts, self.streams, self.as_json = out, prompts, streams, as_json
        self.texts = [""] * len(prompts)  # not yet written
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.reasons: list[str | None] = [None] * len(prompts)
        self.current, self.started = 0, False
        self.is_interrupted = lambda: False

    def take(self, new: list[list[int]], reasons: Sequence[str | None]) -> None:
        """Takes the new tokens of each prompt, and why it stopped; then Ctrl-C has its turn."""
        if any(new) and not any(self.tokens):  # until now there was nothing to keep
            self.is_interrupted = note_ctrl_c()
        self._take(new, reasons)
        if self.is_interrupted():
            raise KeyboardInterrupt

    def _take(self, new: list[list[int]], reasons: Sequence[str | None]) -> None:
        self.status.clear()
        with uninterrupted():
            for i, ids in enumerate(new):
                self.texts[i] += self.streams[i].push(ids)
                self.tokens[i].extend(ids)
                if self.reasons[i] is None and reasons[i] is not None:
                    self.texts[i] += self.streams[i].finish()
                    self.reasons[i] = reasons[i]
            self._write()
            self.out.flush()

    def finish(self, result: Generation) -> None:
        """Writes what `take` has not been told, after an interruption."""
        pairs = zip(result.tokens, self.tokens, strict=True)
        self._take([ids[len(known) :] for ids, known in pairs], result.stop_reasons)

    def _write(self) -> None:
        while self.current < len(self.prompts):
            done = self.reasons[self.current] is not None
            if self.as_json:
                if not done:
                    return
                self._write_json()
            else:
                self._write_text()
                if not done:
                    return
                self.out.write("\n")
            self.current, self.started = self.current + 1, False

    def _write_text(self) -> None:
        if not self.started and len(self.prompts) > 1:
            line = " ".join(self.prompts[self.current].split())
            number = f"{self.current + 1} of {len(self.prompts)}"
            self.out.flush()  # a terminal shows both in this order
            print(f"--- {number}: {line}", file=sys.stderr, flush=True)
        self.started = True
        self.out.write(self.texts[self.current])
        self.texts[self.current] = ""

    def _write_json(self) -> None:
        i = self.current
        entry = {
            "prompt": self.prompts[i],
            "text": self.texts[i],
            "tokens": self.tokens[i],
            "stop_reason": self.reasons[i],
        }
        self.out.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _report(result: Generation) -> None:
    """Why prompts stopped early, and how fast it went, on stderr."""
    for number, reason in enumerate(result.stop_reasons, 1):
        if reason in _WHY:
            where = f"prompt {number} of {len(result.stop_reasons)}"
            print(f"{where} stopped early: {_WHY[reason]}", file=sys.stderr)
    new_tokens = sum(map(len, result.tokens))
    rates = []
    counts = {"prefill": result.prefill_tokens, "decode": new_tokens}
    if "serve" in result.seconds:
        counts = {"serve": result.prefill_tokens + new_tokens}
    for name, count in counts.items():
        seconds = result.seconds[name]
        rate = f" ({count / seconds:.1f} tokens/s)" if seconds > 0 else ""
        rates.append(f"{name}: {count} tokens in {seconds:.2f} s{rate}")
    rates.append(f"compile: {result.seconds['compile']:.1f} s")
    if result.busy:
        rates.append("stages busy: " + ", ".join(f"{share:.0%}" for share in result.busy))
    print("; ".join(rates), file=sys.stderr)


def _serve(options: argparse.Namespace) -> int:
    from .server import command

    return command.run(options)


def _prefill(options: argparse.Namespace) -> int:
    from .server import prefill

    return prefill.run(options)


def _route(options: argparse.Namespace) -> int:
    from .server import command

    return command.route(options)


def _bench_serve(options: argparse.Namespace) -> int:
    if options.http is None:
        return bench_serve.run(options)
    expect(options.processes is None, "http", "none with --coordinator", repr(options.http))
    from .server import load

    return load.run(options)


_COMMANDS = {
    "generate": _generate, "chat": chat.run, "eval": _eval, "lm-eval": _lm_eval, "serve": _serve,
    "bench-serve": _bench_serve, "prefill": _prefill, "route": _route,
}  # fmt: skip

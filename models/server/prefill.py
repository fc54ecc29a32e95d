# SPDX-License-Identifier: Apache-2.0
"""`jax-paged prefill`: loads a model, and prefills for other processes until a signal ends it."""

import argparse
import signal
import sys

from jax_paged._start.command_line import PREFILL_COUNTS, model_options
from jax_paged._start.interrupt import EXIT_CODE

from ..checkpoint.weights import open_checkpoint
from ..distributed.link import joined, read_key
from ..distributed.transfer import listen
from ..serving.engine import Engine
from ..serving.prefill import PrefillService
from .command import check_counts, estimate_for, memory_errors, start_log


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code: 0 after SIGTERM, 130 after SIGINT."""
    check_counts(options, PREFILL_COUNTS)
    start_log(options.log_level)
    key = read_key()
    with listen(options.listen) as listener:
        service = PrefillService(listener, key, payloads=options.payloads)
        with memory_errors(options):
            engine = _engine(options)
        signals: list[int] = []

        def end(number: int, _: object) -> None:
            signals.append(number)
            service.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        host, port, *_ = listener.getsockname()
        options.status.clear()
        print(f"prefilling at {joined(host, port)}", file=sys.stderr, flush=True)
        service.run(engine)
    return EXIT_CODE if signals[0] == signal.SIGINT else 0


def _engine(options: argparse.Namespace) -> Engine:
    checkpoint = open_checkpoint(**model_options(options))
    options.status.tell(checkpoint.title)
    sizes = estimate_for(options, checkpoint, {})
    options.status.tell(str(sizes))
    model = checkpoint.load()
    return Engine(
        model, num_pages=sizes.num_pages, max_seqs=options.max_seqs,
        max_tokens=max(options.max_tokens, options.max_seqs), preemption="swap",
        prefix_cache=not options.no_prefix_cache, kv_dtype=options.kv_dtype,
        processes=options.processes,
    )  # fmt: skip

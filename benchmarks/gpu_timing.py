# SPDX-License-Identifier: Apache-2.0
"""Times device work so that launching it does not count; measures what a device can do.

A call is timed as the difference of two chains of such calls, a long and a short one, over the
difference of their lengths: what it costs to start a chain and to wait for its end cancels. In a
chain each call needs the one before, so they do not overlap.
"""

import argparse
import functools
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from harness import Timing

WARM_UPS = 3  # XLA records a command buffer in the first runs of a program
WARM_UP_S = 2.0


def seconds_of(call: Callable[[], object]) -> float:
    """Wall seconds of a call that returns when its work is done."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def per_call(
    chain_seconds: Callable[[int], float], short: int, long: int, *, budget_s: float,
    min_rounds: int = 3,
) -> Timing:  # fmt: skip
    """Seconds per call, from chains of `short` and of `long` calls that take turns.

    chain_seconds(n) runs a chain of n calls and says how long it took. A chain that takes no longer
    with more calls gives a time ≤ 0: the caller must not make a rate of it.
    """
    for length in (short, long):
        began = time.perf_counter()
        for _ in range(WARM_UPS):
            chain_seconds(length)
            if time.perf_counter() - began > WARM_UP_S:
                break
    taken, began = [], time.perf_counter()
    while len(taken) < min_rounds or time.perf_counter() - began < budget_s:
        short_s, long_s = chain_seconds(short), chain_seconds(long)
        taken.append((long_s - short_s) / (long - short))
    return Timing(*(float(np.percentile(taken, p)) for p in (50, 10, 90)))


def of_chains(run: Callable[[int], object], dry: bool, *, most: int = 64) -> Timing:
    """Seconds per call, where run(n) runs a chain of n calls and returns when it is done."""
    once = min(seconds_of(lambda: run(1)) for _ in range(2))
    long = 3 if dry else int(np.clip(0.25 / once, 4, most))
    return per_call(
        lambda calls: seconds_of(lambda: run(calls)), max(long // 4, 1), long,
        budget_s=0.02 if dry else 0.6,
    )  # fmt: skip


def rate(amount: float, seconds: float) -> float | None:
    """amount per second, or None where the time was lost in noise."""
    return amount / seconds if seconds > 0 else None


# ---- ceilings ----


@jax.jit
def _copy(x):
    return x + jnp.uint32(1)


@jax.jit
def _read(x):
    return jnp.sum(x)


@jax.jit
def _multiply(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32).astype(a.dtype)


def chained(step: Callable, first) -> Callable[[int], float]:
    """chain_seconds for first → step(first) → step(step(first)) …"""

    def run(calls: int) -> float:
        def chain():
            x = first
            for _ in range(calls):
                x = step(x)
            jax.block_until_ready(x)

        return seconds_of(chain)

    return run


def ceilings(dry: bool) -> dict[str, float | None]:
    """What this device does at best, measured here: the figures' denominators.

    copy_gb_per_s counts bytes read and bytes written; read_gb_per_s is a sum over an array;
    bf16_tflop_per_s a square matrix product. Random data, arrays far larger than any cache.
    """
    size, side, budget_s = (1 << 12, 64, 0.05) if dry else (1 << 28, 8192, 0.6)
    key = jax.random.key(0)
    words = jax.random.bits(key, (size,), jnp.uint32)
    others = words + jnp.uint32(7)

    def read(calls: int) -> float:  # nothing to chain on: the stream orders them
        return seconds_of(
            lambda: jax.block_until_ready([_read(words if i % 2 else others) for i in range(calls)])
        )

    copy_s = per_call(chained(_copy, words), 2, 12, budget_s=budget_s).median
    copies = [rate(2 * words.nbytes / 1e9, copy_s)]
    copies.append(_torch_copy_gb_per_s(words, budget_s))
    read_s = per_call(read, 2, 12, budget_s=budget_s).median
    a = jax.random.normal(key, (side, side), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16)
    b = b * jnp.bfloat16(side**-0.5)  # so that a chain of products neither grows nor fades
    product_s = per_call(
        chained(functools.partial(_multiply, b=b), a), 2, 12, budget_s=budget_s
    ).median
    return {
        "copy_gb_per_s": max((c for c in copies if c is not None), default=None),
        "read_gb_per_s": rate(words.nbytes / 1e9, read_s),
        "bf16_tflop_per_s": rate(2 * side**3 / 1e12, product_s),
    }


def _torch_copy_gb_per_s(words: jax.Array, budget_s: float) -> float | None:
    """The driver's own copy, through torch where it is installed and sees the device."""
    try:
        import torch
    except ImportError:
        return None
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        return None
    source = torch.from_dlpack(words.view(jnp.int32))
    target = torch.empty_like(source)

    def copy(calls: int) -> float:
        def chain():
            for _ in range(calls):
                target.copy_(source)
            if source.is_cuda:
                torch.cuda.synchronize()

        return seconds_of(chain)

    return rate(2 * words.nbytes / 1e9, per_call(copy, 2, 12, budget_s=budget_s).median)


# ---- what a stage hands back ----


class Report:
    """The rows of a stage, on disk as they come: what was measured survives a crash or a limit.

    What begins and ends is said there, too, for `gpu_run.py`. The first `skip` attempts are left
    out: an earlier process made them.
    """

    def __init__(self, path: Path, dry: bool, seconds: float, skip: int = 0):
        self.dry = dry
        self.failed = False
        self._path = path
        self._end = time.monotonic() + seconds
        self._skip = skip
        self._depth = 0

    @classmethod
    def from_args(cls, description: str, **extra: dict) -> tuple["Report", argparse.Namespace]:
        """The report and the arguments of a stage's program."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--rows", type=Path, required=True, help="JSON lines are added here")
        parser.add_argument("--seconds", type=float, default=60.0, help="begin nothing after this")
        parser.add_argument("--skip", type=int, default=0, help="attempts that were made before")
        parser.add_argument("--dry", action="store_true", help="tiny shapes, on any backend")
        for name, options in extra.items():
            parser.add_argument(name, **options)
        args = parser.parse_args()
        if not args.dry and jax.default_backend() != "gpu":
            raise SystemExit(f"no GPU: jax runs on {jax.default_backend()}; --dry needs none")
        return cls(args.rows, args.dry, args.seconds, args.skip), args

    def add(self, **row) -> None:
        """Hands a row over."""
        self.failed |= "error" in row
        self._write(row)
        print({k: v for k, v in row.items() if k != "percentiles"}, flush=True)

    def _write(self, line: dict) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def ceilings(self) -> dict[str, float | None]:
        """`ceilings`, handed over as a row; all None where measuring them failed."""
        best: dict[str, float | None] = dict.fromkeys(
            ("copy_gb_per_s", "read_gb_per_s", "bf16_tflop_per_s")
        )

        def measure():
            best.update(ceilings(self.dry))
            self.add(kind="ceilings", device=jax.devices()[0].device_kind, **best)

        self.prepare(measure, kind="ceilings")
        return best

    def check_time(self, timing: Timing) -> None:
        """Raises when the time was lost in noise; in a dry run it does not matter."""
        if not (self.dry or timing.median > 0):
            raise ArithmeticError("a long chain took no longer than a short one")

    def attempt(self, block: Callable[[], object], **what) -> None:
        """Runs a block; what goes wrong becomes a row with an error, and the next one may go on."""
        if self._depth == 0 and self._skip > 0:
            self._skip -= 1
        else:
            self._run(block, what, counted=self._depth == 0)

    def prepare(self, block: Callable[[], object], **what) -> None:
        """As `attempt`, for what later attempts need: it is never left out."""
        self._run(block, what, counted=False)

    def _run(self, block: Callable[[], object], what: dict, *, counted: bool) -> None:
        self._write({"began": what, "counted": counted})
        self._depth += 1
        try:
            if time.monotonic() > self._end:
                raise TimeoutError("no time was left in the stage's budget")
            block()
        except Exception as error:
            traceback.print_exc()
            text = " ".join(f"{type(error).__name__}: {error}".split())
            self.add(**what, error=text[:400])
        self._depth -= 1
        self._write({"ended": what})


def percent(figure: float | None, limit: float | None) -> float | None:
    """A figure in percent of its limit, None where either was lost."""
    return None if figure is None or limit is None else 100 * figure / limit


def median_ratio(a: Timing, b: Timing) -> float | None:
    """How many times slower a is than b."""
    return a.median / b.median if min(a.median, b.median) > 0 else None


def worst_error(got, expected) -> float:
    """The largest relative error over the last axis: per token and head."""
    got, expected = (np.asarray(x).astype(np.float64) for x in (got, expected))
    if not np.isfinite(got).all():
        return float("inf")
    norm = np.linalg.norm(expected, axis=-1)
    return float(np.max(np.linalg.norm(got - expected, axis=-1) / np.maximum(norm, 1e-30)))

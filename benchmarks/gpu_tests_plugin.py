# SPDX-License-Identifier: Apache-2.0
"""What gpu_tests.py loads into its children: pytest that runs the tests it is told to, one by one.

A child talks with gpu_tests.py over a socket, a JSON line at a time. It says which tests there are,
asks for some, and says which one begins and how it ended, until it is given none.
"""

import json
import os
import socket
import sys

import pytest

SOCKET = "JAX_PAGED_TESTS_SOCKET"  # its file descriptor
NOT_OF_THE_DEVICE = ("reference", "emulated")  # implementations
TEXT_LIMIT = 3000  # characters kept of what a failed test says


class Child:
    """The hooks; `reports` are those of the test that runs."""

    def __init__(self, file):
        self.file = file
        self.reports: list[pytest.TestReport] = []

    def say(self, event: str, **what) -> None:
        self.file.write(json.dumps({"event": event, **what}) + "\n")
        self.file.flush()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say("broken", test=report.nodeid, text=report.longreprtext[-TEXT_LIMIT:])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list) -> None:
        dropped = [item for item in items if not runs_on_the_device(item)]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if runs_on_the_device(item)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        by_id = {item.nodeid: item for item in session.items}
        device_error()  # jax and CUDA come up before the first test's time begins
        self.say("ready", tests=list(by_id))
        while names := json.loads(self.file.readline() or "[]"):
            batch = [by_id[name] for name in names]
            for item, following in zip(batch, [*batch[1:], None], strict=True):
                self.reports = []
                self.say("began", test=item.nodeid)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                result = outcome(self.reports)
                lost = device_error() if result["outcome"] == "failed" else None
                if lost:
                    result["text"] += f"\nthe device is lost: {lost}"
                self.say("ended", test=item.nodeid, lost=bool(lost), **result)
            self.say("next")
        return True


def runs_on_the_device(item: pytest.Item) -> bool:
    """Whether a test is of the kernels themselves, not of the reference or of the emulator."""
    if not isinstance(item, pytest.Function):
        return True
    params = item.callspec.params if hasattr(item, "callspec") else {}
    names = item.function.__code__.co_names
    return params.get("implementation") not in NOT_OF_THE_DEVICE and "emulate" not in names


def outcome(reports: list[pytest.TestReport]) -> dict:
    """How a test went, of the reports of its set-up, call and tear-down."""
    texts = [f"{r.when}: {r.longreprtext}" for r in reports if r.failed]
    skipped = [r.longrepr[2] if isinstance(r.longrepr, tuple) else "" for r in reports if r.skipped]
    return {
        "outcome": "failed" if texts else "skipped" if skipped else "passed",
        "seconds": sum(r.duration for r in reports),
        "text": ("\n".join(texts) or "".join(map(str, skipped)))[-TEXT_LIMIT:],
    }


def device_error() -> str | None:
    """Why jax can run nothing any more: an illegal access leaves a process without its device."""
    if "jax" not in sys.modules:
        return None
    import jax.numpy as jnp

    try:
        (jnp.ones(8, jnp.float32) + 1).block_until_ready()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


def pytest_configure(config: pytest.Config) -> None:
    line = socket.socket(fileno=int(os.environ.pop(SOCKET)))
    config.pluginmanager.register(Child(line.makefile("rw")), "gpu_tests_child")

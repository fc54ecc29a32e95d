# SPDX-License-Identifier: Apache-2.0
"""`jax-paged serve`: the command, its memory, and its page in a browser."""

import argparse
import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import jax
import pytest
from children import child, on_devices
from jax.sharding import AbstractMesh
from running_server import CONFIG, Running, byte_engine
from tiers import first_of
from tiny_checkpoint import write_checkpoint

from jax_paged._start.command_line import parser
from jax_paged.models import Decoder, Engine, cli
from jax_paged.models.decoder.parameters import abstract_source, random_source
from jax_paged.models.server import command, memory
from jax_paged.models.status import Status
from jax_paged.models.testing import small_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_the_command_serves_until_ctrl_c(checkpoint, tmp_path):
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    arguments = ["--model", checkpoint, "--port", "0", "--no-program-cache", "--max-seqs", "2",
                 "--max-tokens", "16", "--api-key-file", key, "--log-level", "info",
                 "--served-name", "mine", "--kv-memory-share", "0.01",
                 "--context-length", "32"]  # fmt: skip
    started = [sys.executable, "-P", "-m", "jax_paged", "serve", *arguments]
    with child(started, stderr=subprocess.PIPE, text=True) as server:
        lines = []
        while not lines or not lines[-1].startswith("serving "):
            lines.append(server.stderr.readline())
            assert lines[-1], lines
        assert lines[0].startswith(f"{checkpoint.name}: 38,112 parameters in float32")
        assert "free; weights 0.00 GiB, KV 0.00 GiB (4 pages, 64 tokens)" in lines[1]
        url = lines[-1].split()[-1]
        assert lines[-1] == f"serving mine at {url}\n"
        headers = {"content-type": "application/json", "authorization": "Bearer s3cret"}
        data = json.dumps({"prompt": "Hello", "max_tokens": 3, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", data, headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 3
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=60)
    assert server.returncode == 130, err
    assert "jax_paged.server: completions: done, 5 + 3 tokens" in err


@pytest.mark.deep
def test_experts_of_a_server_move(tmp_path):
    model = write_checkpoint(tmp_path, "qwen3_moe", num_experts=8)
    arguments = ["--model", model, "--port", "0", "--no-program-cache", "--max-seqs", "2",
                 "--max-tokens", "16", "--pages", "8", "--log-level", "info", "--dp", "2",
                 "--redundant-experts", "2", "--rebalance-seconds", "0.001"]  # fmt: skip
    started = [sys.executable, "-P", "-m", "jax_paged", "serve", *arguments]
    with child(started, stderr=subprocess.PIPE, text=True, env=on_devices(2)) as server:
        url = ""
        while not url:
            line = server.stderr.readline()
            assert line
            url = line.split()[-1] if line.startswith("serving ") else ""
        asked = {"prompt": "Hello", "max_tokens": 9, "ignore_eos": True, "temperature": 0}
        data = json.dumps(asked).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", data, headers)
        answers = []
        for _ in range(2):  # before and after experts have moved
            with urllib.request.urlopen(request, timeout=60) as response:
                answers.append(json.load(response)["choices"][0]["text"])
        assert answers[0] == answers[1]
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=60)
    assert re.search(r"experts: Balance\(before=.*, after=.*, moved=[1-9]", err), err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--kv-memory-share", "0"], "kv-memory-share: expected a number above 0 and at most 1"),
        (["--max-seqs", "0"], "max-seqs: expected an integer >= 1, got 0"),
        (["--pages", "-1"], "pages: expected an integer >= 1, got -1"),
        (["--prompt-logprobs"], "prompt-logprobs: expected --logprobs, too, got none"),
        (["--rebalance-seconds", "9"], "rebalance-seconds: expected --redundant-experts, too, got"),
        (
            ["--rebalance-seconds", "0", "--redundant-experts", "0"],
            "rebalance-seconds: expected a number above 0, got 0.0",
        ),
        (["--port", "70000"], "port: expected an integer from 0 to 65535, got 70000"),
        (["--host", "a" * 70], "host: expected an address, got 'aaa"),
        (["--api-key-file", "/nowhere/key"], "/nowhere/key: No such file or directory"),
        (["--adapter", "a"], "adapter: expected NAME=FOLDER, got 'a'"),
        (
            ["--adapter", "a=b", "--adapter", "a=c"],
            "adapter: expected one folder for each name, got",
        ),
    ],
)
def test_bad_arguments_are_refused_before_the_weights_are_loaded(
    capsys, monkeypatch, arguments, part
):
    monkeypatch.setattr(cli, "kept_programs", contextlib.nullcontext)
    monkeypatch.setattr(command, "open_checkpoint", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(command, "start_log", lambda level: None)
    assert cli.main(["serve", "--port", "0", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"jax-paged: error: {part}"), err


def test_a_level_or_key_of_the_environment_is_checked(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_PAGED_LOG", "loud")
    with pytest.raises(ValueError, match="JAX_PAGED_LOG: expected one of debug, info"):
        command.start_log(None)
    monkeypatch.setenv("JAX_PAGED_API_KEY", "two words")
    with pytest.raises(ValueError, match="JAX_PAGED_API_KEY: expected a key"):
        command._api_key(argparse.Namespace(api_key_file=None))


@pytest.mark.parametrize(("host", "warns"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_server_without_a_key_warns_where_strangers_can_reach_it(capsys, host, warns):
    options = argparse.Namespace(host=host, status=Status())
    command._warn_of_strangers(options, None)
    err = capsys.readouterr().err
    assert ("anybody may ask" in err) == warns
    command._warn_of_strangers(options, "key")
    assert capsys.readouterr().err == ""


def test_an_estimate_is_what_the_engine_takes(monkeypatch):
    shapes = Decoder(CONFIG, abstract_source(CONFIG))
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(command_arrays(shapes)))
    room = 2**22 + 2**13  # as many pages as other engines here have: their programs serve
    monkeypatch.setattr(memory, "free_bytes", lambda: weights + 2 * room)
    sizes = memory.estimate(shapes, max_seqs=64, pages=None, share=0.5)
    assert sizes.weight_bytes == weights
    engine = byte_engine(num_pages=sizes.num_pages)
    pages = engine.state.k_pages, engine.state.v_pages
    assert sum(x.nbytes for x in pages) <= room
    assert sum(x.nbytes for x in pages) > room - 2 * sizes.page_bytes - 8 * sizes.num_pages
    assert memory.estimate(shapes, max_seqs=1, pages=None, share=1.0).num_pages == 32, "a context"
    assert memory.estimate(shapes, max_seqs=1, pages=7, share=1.0).num_pages == 7
    monkeypatch.setattr(memory, "free_bytes", lambda: weights)
    with pytest.raises(ValueError, match="kv-memory-share: expected room for a page"):
        memory.estimate(shapes, max_seqs=1, pages=None, share=1.0)


# A row has 4 pages of its window of 7 tokens and a chunk; all rows 16.
@pytest.mark.parametrize(
    ("room", "pages", "of_window"), first_of([(2**18, 47, 16), (2**16, 7, 7)], 1)
)
def test_an_estimate_of_groups_has_few_pages_for_windows(monkeypatch, room, pages, of_window):
    config = small_config("gpt_oss")
    shapes = Decoder(config, abstract_source(config))
    given = {"max_seqs": 4, "groups": True, "max_tokens": 32}
    weights = memory.estimate(shapes, pages=1, share=1.0, **given).weight_bytes
    monkeypatch.setattr(memory, "free_bytes", lambda: weights + 2 * room)
    sizes = memory.estimate(shapes, pages=None, share=0.5, **given)
    assert sizes.num_pages == pages
    engine = Engine(
        Decoder(config, random_source(config)), num_pages=pages, max_seqs=4, max_tokens=32,
        groups=True,
    )  # fmt: skip
    counts = [group.table.num_pages for group in engine.state.groups]
    assert counts == [of_window, pages]
    pools = sum(x.nbytes for g in engine.state.groups for x in (g.k_pages, g.v_pages))
    assert pools <= sizes.kv_bytes <= room < pools + sizes.page_bytes + 12 * sum(counts)
    assert str(sizes).endswith(f"KV 0.00 GiB ({pages} pages, {16 * pages} tokens)")


def test_an_estimate_of_a_mesh_is_that_of_a_device(monkeypatch):
    config = small_config("qwen3_moe", num_experts=8, vocab_size=96)
    mesh = AbstractMesh((2, 2), ("dp", "tp"))
    alone, split = (Decoder(config, abstract_source(config), mesh=where) for where in (None, mesh))
    monkeypatch.setattr(memory, "free_bytes", lambda: 2**20)
    one, each = (memory.estimate(x, max_seqs=64, pages=None, share=0.5) for x in (alone, split))
    of_tables = each.page_bytes * 2 - one.page_bytes  # each device has half of the KV heads
    assert 0 < of_tables < 50
    weights = command_arrays(alone)
    sizes = [
        (str(path), x.ndim, x.size * x.dtype.itemsize)
        for path, x in jax.tree_util.tree_leaves_with_path(weights)
    ]
    experts = sum(size for _, ndim, size in sizes if ndim == 3)
    everywhere = sum(size for name, ndim, size in sizes if ndim == 1 or "router" in name)
    rest = one.weight_bytes - experts - everywhere
    assert each.weight_bytes == experts // 4 + everywhere + rest // 2
    assert each.num_pages == int(0.5 * (2**20 - each.weight_bytes) // each.page_bytes)
    assert str(each).startswith("memory of each of 4 devices: 0.00 GiB free; weights ")


def command_arrays(model):
    return memory.split_model(model)[1]


def test_free_memory_is_within_the_limit_of_the_control_group():
    found = memory.free_bytes()
    assert found is not None
    assert 2**20 < found < 2**50


def test_out_of_memory_says_what_to_lower(capsys, monkeypatch, checkpoint):
    monkeypatch.setattr(cli, "kept_programs", contextlib.nullcontext)
    monkeypatch.setattr(command, "start_log", lambda level: None)

    def fails(*_, **__):
        raise MemoryError("planted")

    monkeypatch.setattr(command, "create_engine", fails)
    arguments = ["serve", "--port", "0", "--model", str(checkpoint), "--max-seqs", "3"]
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    for part in ("out of memory: lower --kv-memory-share (now 0.5)", "--max-seqs (now 3)"):
        assert part in err


def test_a_profile_has_the_names_of_layers_and_ops(tmp_path):
    engine = byte_engine()
    with command._profiled(str(tmp_path)):
        engine.submit([1, 2, 3], max_new_tokens=2)
        engine.run()
    [file] = tmp_path.rglob("*.xplane.pb")
    found = set(re.findall(rb"/layer_(\d)/[^/]+/attention/(\w+)/", file.read_bytes()))
    assert found >= {(layer, op) for layer in (b"0", b"1") for op in (b"write_qkv", b"attend")}


def test_the_options_of_the_command_have_their_defaults():
    options = parser().parse_args(["serve"])
    assert (options.host, options.port, options.allow_origin) == ("127.0.0.1", 8000, [])


class Browser:
    """Chromium, driven by WebDriver's HTTP."""

    def __init__(self, folder):
        self._driver = subprocess.Popen(
            [shutil.which("chromedriver"), "--port=0"], stdout=subprocess.PIPE, text=True
        )
        port = ""
        while not port:
            line = self._driver.stdout.readline()
            assert line, "chromedriver has ended"
            if "on port " in line and "successfully" in line:
                port = line.rstrip(".\n").rpartition(" ")[2]
        self._url = f"http://127.0.0.1:{port}/session"
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--window-size=900,700", f"--user-data-dir={folder}"]  # fmt: skip
        options = {"args": arguments, "binary": shutil.which("chromium")}
        made = self._ask("", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})
        self._url += f"/{made['sessionId']}"

    def _ask(self, path, body=None, method="POST"):
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(
            self._url + path, data, {"content-type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["value"]

    def go(self, url):
        self._ask("/url", {"url": url})

    def run(self, script):
        return self._ask("/execute/sync", {"script": script, "args": []})

    def wait(self, script, seconds=30):
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, script
            time.sleep(0.05)
        return value

    def screenshot(self):
        return base64.b64decode(self._ask("/screenshot", method="GET"))

    def close(self):
        with contextlib.suppress(OSError):
            self._ask("", method="DELETE")
        self._driver.terminate()
        try:
            self._driver.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._driver.kill()


@pytest.fixture
def browser(tmp_path):
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: apt-get install chromium chromium-driver")
    opened = Browser(tmp_path / "profile")
    yield opened
    opened.close()


SAY = """
document.getElementById("text").value = TEXT;
document.getElementById("form").requestSubmit();
"""
TURNS = 'return [...document.querySelectorAll(".turn")].map((t) => [t.className, t.textContent]);'


def test_the_page_holds_a_conversation_and_shows_text_as_text(browser, tmp_path):
    engine = byte_engine()
    server = Running(engine, name="<b>tiny</b>", stop_tokens=[])
    hostile = "<img src=x onerror=\"document.title='hacked'\"> & <script>1</script>"
    try:
        browser.go(server.url + "/")
        name = 'return document.getElementById("model").textContent'
        browser.wait(f'{name} === "<b>tiny</b>"')
        browser.run('document.getElementById("max-tokens").value = 20')
        browser.run(SAY.replace("TEXT", json.dumps(hostile)))
        browser.wait('return document.querySelectorAll(".note").length === 1')
        (kind, asked), (answers, answer) = browser.run(TURNS)
        assert (kind, asked, answers) == ("turn user", hostile, "turn assistant")
        body = {"messages": [{"role": "user", "content": hostile}], "max_tokens": 20, "seed": 1}
        assert server.post("/v1/chat/completions", body)[0] == 200
        assert 0 < len(answer) <= 20
        # A second turn: the conversation is sent whole.
        before = engine.num_fed
        browser.run(SAY.replace("TEXT", json.dumps("again")))
        browser.wait('return document.querySelectorAll(".note").length === 2')
        assert len(browser.run(TURNS)) == 4
        assert engine.num_fed > before
        assert browser.run("return document.title") == "jax_paged"
        assert browser.run('return document.querySelectorAll("main img, main script").length') == 0
        picture = browser.screenshot()
        assert picture.startswith(b"\x89PNG")
        if folder := os.environ.get("JAX_PAGED_SCREENSHOTS"):
            with open(os.path.join(folder, "chat.png"), "wb") as file:
                file.write(picture)
        # Errors are shown, and Stop and New chat work.
        browser.run('document.getElementById("max-tokens").value = 0')
        browser.run(SAY.replace("TEXT", json.dumps("wrong")))
        browser.wait('return document.querySelectorAll(".error").length === 1')
        assert "max_completion_tokens: expected" in browser.run(TURNS)[-1][1]
        browser.run('document.getElementById("reset").click()')
        assert browser.run(TURNS) == []
    finally:
        server.end()


def test_stop_in_the_page_ends_the_request(browser):
    engine = byte_engine()
    step = engine.step
    engine.step = lambda: (time.sleep(0.02), step())[1]
    server = Running(engine, stop_tokens=[])
    try:
        browser.go(server.url + "/")
        browser.run('document.getElementById("max-tokens").value = 480')
        browser.run(SAY.replace("TEXT", json.dumps("Hello")))
        browser.wait('return document.querySelector(".assistant")?.textContent.length > 0')
        steps = engine.num_steps
        browser.run('document.getElementById("stop").click()')
        server.wait_until_idle()
        assert engine.num_steps - steps < 100
        browser.wait('return !document.getElementById("send").hidden')
    finally:
        server.end()

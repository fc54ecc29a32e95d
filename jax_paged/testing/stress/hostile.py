# SPDX-License-Identifier: Apache-2.0
"""Files and messages as somebody who means harm could send them: mutations of tiny valid ones.

`hostile` makes a case, the same for the same kind, seed and number; `read` reads it as a user's
program would. It may raise a ValueError, or read all: then weights and frequencies are finite, and
a state has changed only by a message that it took. `hostile_run` reads many, within limits.
"""

import functools
import json
import math
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load, save
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jax_paged import Status, transfer
from jax_paged.cache.state import KVState
from jax_paged.cache.transfer import Inbox, Message, Sender, Ticket
from jax_paged.models.checkpoint.gguf_file import MODEL_TYPES, gguf_name
from jax_paged.models.checkpoint.hf_config import config_from_hf
from jax_paged.models.checkpoint.weights import open_checkpoint
from jax_paged.models.decoder.config import DecoderConfig
from jax_paged.models.decoder.parameters import expected_tensors, random_source
from jax_paged.models.testing import small_hf_config, stored_tensors

Files = dict[str, bytes | None]  # name → content; None: a folder stands there

_NAN, _INF = float("nan"), float("inf")
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 16, 48, 97, 255, 2**16, 2**16 + 1, 2**31 - 1, 2**31,
    2**32, 2**40, 2**63, 2**64, -(2**31), -(2**63) - 1, 10**30, 10**400, 0.0, -0.0, 0.5, 1.5, 1.0,
    1e-320, 1e-30, 1e308, _NAN, _INF, -_INF, "", "a", "0", "1e6", "é", "\0", "default", "llama3",
    "yarn", "linear", "qwen3", "x" * 5000, [], [[]], {}, {"a": 1}, [1.5, "a"], [None], [0] * 1000,
    [2**63], ["a", "b"], {"content": 3}, {"type": "BPE"}, "../model.safetensors", "/etc/passwd",
)  # fmt: skip
_NUMBERS = tuple(v for v in _VALUES if type(v) is int and 0 <= v < 2**64)


# Mutations. Each takes a generator and something valid.


def _pick(rng: np.random.Generator, options: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of all values within a JSON value; long lists by a few of their entries."""
    places = []
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in list(keys)[:400]:
        places.append((value, key))
        if isinstance(value[key], (dict, list)):
            places += _places(value[key])
    return places


def mutate_json(rng: np.random.Generator, value: dict[str, Any]) -> dict[str, Any]:
    """The value with a few of its parts changed, dropped, added, exchanged or wrapped."""
    value = json.loads(json.dumps(value))
    for _ in range(int(rng.integers(1, 4))):
        places = _places(value)
        if not places:
            break
        container, key = _pick(rng, places)
        found = container[key]
        match int(rng.integers(8)):
            case 0 | 1 | 2:
                container[key] = _pick(rng, _VALUES)
            case 3:
                del container[key]
            case 4:
                container[key] = _pick(rng, ([found], {"type": found}, [found] * 3, str(found)))
            case 5:
                other, place = _pick(rng, places)
                container[key] = json.loads(json.dumps(other.get(place) if isinstance(other, dict)
                                            else other[min(place, len(other) - 1)] if other
                                            else None))  # fmt: skip
            case 6:
                if isinstance(container, dict):
                    container[_pick(rng, ("type", "factor", "a", "é", "num_experts"))] = found
                else:
                    container.insert(0, found)
            case 7:
                is_number = isinstance(found, (int, float))
                container[key] = found * _pick(rng, (-1, 2, 1000)) if is_number else None
    return value


def mutate_bytes(rng: np.random.Generator, data: bytes, end: int | None = None) -> bytes:
    """The bytes with a few of them changed, cut out, doubled or overwritten by a number.

    Args:
      end: where what is worth changing ends; None = nowhere.
    """
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(max(min(end or len(out), len(out)), 1)))
        size = int(rng.integers(1, 40))
        match int(rng.integers(7)):
            case 0 | 1:
                if out:
                    out[min(at, len(out) - 1)] ^= 1 << int(rng.integers(8))
            case 2:
                out[at : at + 4] = (_pick(rng, _NUMBERS) % 2**32).to_bytes(4, "little")
            case 3:
                out[at : at + 8] = _pick(rng, _NUMBERS).to_bytes(8, "little")
            case 4:
                del out[at : at + size]
            case 5:
                out[at:at] = out[at : at + size]
            case 6:
                del out[at + size * 8 :]
    return bytes(out)


def _json_bytes(rng: np.random.Generator, value: dict[str, Any]) -> bytes:
    """A JSON file, mutated in its values, or in its bytes, or nested deeply."""
    match int(rng.integers(10)):
        case 0:
            return mutate_bytes(rng, json.dumps(value).encode())
        case 1:
            text = json.dumps(value)
            return text.replace(":", ":" + "[" * int(rng.integers(1, 200000)), 1).encode()
    return json.dumps(mutate_json(rng, value)).encode()


# A folder.


@functools.cache
def _vocabulary() -> tuple[list[str], list[str]]:
    """(tokens, merges) of a small byte-level BPE."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return ["<s>", "</s>", *alphabet, "ab", "abc"], ["a b", "ab c"]


def _raw(model_type: str) -> dict[str, Any]:
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4"}} if model_type == "gpt_oss" else {}
    return small_hf_config(
        model_type, vocab_size=len(_vocabulary()[0]), eos_token_id=1, bos_token_id=0,
        tie_word_embeddings=model_type == "llama", rms_norm_eps=2**-20, **mxfp4,
    )  # fmt: skip


@functools.cache
def _tensors(model_type: str) -> dict[str, np.ndarray]:
    config, tensors = config_from_hf(_raw(model_type)), {}
    source = random_source(config, 7)
    for name in expected_tensors(config):
        tensors[name] = np.asarray(source(name))
    return tensors


_ROPES: tuple[dict[str, Any] | None, ...] = (
    None,
    {"type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
     "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1, "truncate": True},
    {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6,
     "original_max_position_embeddings": 64},
)  # fmt: skip


FOLDERS = ("llama", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma3_text", "gpt_oss")


@functools.cache
def folder_files(model_type: str) -> Files:
    """A valid folder: its configuration, tokenizer and weights in two files."""
    tensors = stored_tensors(config_from_hf(_raw(model_type)), _tensors(model_type))
    shards = {f"model-{i}.safetensors": sorted(tensors)[i::2] for i in range(2)}
    tokens, merges = _vocabulary()
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs: list[Any] = [tuple(merge.split()) for merge in merges]
    backend = Backend(models.BPE(vocab=vocab, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens(["<s>", "</s>"])
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    settings["chat_template"] = [{"name": "default", "template": _TEMPLATE}]
    index = {"metadata": {}, "weight_map": {n: s for s, names in shards.items() for n in names}}
    contents: dict[str, Any] = {
        "config.json": _raw(model_type),
        "generation_config.json": {"eos_token_id": [1], "temperature": 0.6},
        "tokenizer_config.json": settings,
        "model.safetensors.index.json": index,
    }
    return {
        "chat_template.jinja": _TEMPLATE.encode(),
        "tokenizer.json": backend.to_str().encode(),
        **{name: json.dumps(value).encode() for name, value in contents.items()},
        **{s: save({n: tensors[n].copy() for n in names}) for s, names in shards.items()},
    }


_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"


def hostile_folder(rng: np.random.Generator) -> Files:
    """A folder with one or two of its text files mutated, or gone, or with a stranger."""
    files = dict(folder_files(_pick(rng, FOLDERS)))
    content = json.loads(files["config.json"] or b"")
    files["config.json"] = json.dumps(content | {"rope_scaling": _pick(rng, _ROPES)}).encode()
    for _ in range(int(rng.integers(1, 3))):
        name = _pick(rng, ("config.json",) * 5 + ("tokenizer.json",) * 3 + tuple(files))
        data = files.get(name)
        match int(rng.integers(20)):
            case 0:
                files.pop(name, None)
            case 1:
                files[name] = None
            case 2:
                files["adapter_config.json"] = b"{}"
            case 3:
                files[name] = b""
            case _ if data is not None and name.endswith(".json"):
                try:
                    files[name] = _json_bytes(rng, json.loads(data))
                except (ValueError, TypeError, RecursionError):  # mutated before
                    files[name] = mutate_bytes(rng, data)
            case _ if data is not None:
                files[name] = mutate_bytes(rng, data, 2000)
    return files


def hostile_safetensors(rng: np.random.Generator) -> Files:
    """A folder with one file of weights mutated: its header, its bytes, or its tensors."""
    files = dict(folder_files(_pick(rng, ("llama", "qwen3_moe", "gpt_oss"))))
    name = _pick(rng, ("model-0.safetensors", "model-1.safetensors"))
    data = files[name] or b""
    end = 8 + int.from_bytes(data[:8], "little")
    match int(rng.integers(10)):
        case 0 | 1:
            header = _json_bytes(rng, json.loads(data[8:end]))
            files[name] = len(header).to_bytes(8, "little") + header + data[end:]
        case 2 | 3:
            files[name] = mutate_bytes(rng, data, end)
        case 4:
            files[name] = mutate_bytes(rng, data)
        case 5 | 6:
            at = end + 4 * int(rng.integers((len(data) - end) // 4))
            wrong = struct.pack("<f", _pick(rng, (_NAN, _INF, -_INF)))
            files[name] = data[:at] + wrong + data[at + 4 :]
        case _:
            tensors = load(data)
            for _ in range(int(rng.integers(1, 3))):
                key = _pick(rng, sorted(tensors))
                found = tensors.pop(key)
                flat = found.reshape(-1)
                with np.errstate(all="ignore"):
                    changed = _pick(rng, (
                        found.T.copy(), flat, flat[:0], flat[:1], found[None],
                        np.zeros((), np.float32), found.astype(np.float16) * np.float16(1e4),
                        found.astype(np.float64), found.astype(np.int8), found > 0, found * 1e38,
                    ))  # fmt: skip
                if rng.integers(5):
                    key = _pick(rng, (key, key, key, "", "é", "a" * 5000, key + ".bias",
                                      "lm_head.weight", "model.layers.7.mlp.experts.gate_up_proj",
                                      "model.layers.0.mlp.experts.gate_up_proj"))  # fmt: skip
                    tensors[key] = np.asarray(changed)  # of no axes: NumPy made it a scalar
            files[name] = save(tensors)
    return files


# A GGUF file.

_F32, _Q8_0 = 0, 8


def _gguf_value(value: Any) -> bytes:
    """A metadata value with its type; a NaN as f64, so that both floats are there."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<IQ", 10, value % 2**64)
        case float() if math.isnan(value):
            return struct.pack("<Id", 12, value)
        case float():
            with np.errstate(all="ignore"):
                return struct.pack("<If", 6, np.float32(value))
        case str():
            return struct.pack("<I", 8) + _gguf_text(value)
        case list():
            typed = [_gguf_value(v) for v in value]
            kind = typed[0][:4] if typed else struct.pack("<I", 4)
            return struct.pack("<I", 9) + kind + struct.pack("<Q", len(typed)) + b"".join(
                v[4:] for v in typed
            )  # fmt: skip
    return _gguf_value(str(value))


def _gguf_text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_sizes(config: DecoderConfig) -> dict[str, Any]:
    """The metadata that says how large a model is, as in a file of any architecture."""
    return {
        "block_count": config.num_layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_q_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }


@functools.cache
def gguf_parts(architecture: str) -> tuple[dict[str, Any], dict[str, tuple[list[int], int, bytes]]]:
    """The metadata and the tensors (shape, type, data) of a valid file."""
    model_type = MODEL_TYPES[architecture]
    config = config_from_hf(_raw(model_type))
    tokens, merges = _vocabulary()
    own: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        **gguf_sizes(config),
        "rope.dimension_count": config.rope.rotary_dim or config.head_dim,
        "rope.freq_base": config.rope.theta,
        "expert_count": config.num_experts,
        "expert_used_count": config.experts_per_token,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }
    vocabulary: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.merges": merges,
    }
    if architecture == "phi3":
        vocabulary = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.scores": [-float(rank) for rank in range(len(tokens))],
            "tokenizer.ggml.unknown_token_id": 0,
        }
        own |= {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 1.25,
            "attention.sliding_window": 7,
        }
    else:
        own |= {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    metadata = {
        "general.architecture": architecture,
        "general.alignment": 32,
        **{f"{architecture}.{key}": value for key, value in own.items()},
        **vocabulary,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": _TEMPLATE,
    }
    tensors = {}
    for name, value in _tensors(model_type).items():
        kind, data = _F32, value.tobytes()
        if name.endswith("up_proj.weight"):
            codes = np.random.default_rng(0).integers(0, 256, (value.size // 32, 34), np.uint8)
            codes[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
            kind, data = _Q8_0, codes.tobytes()
        tensors[gguf_name(name)] = (list(value.shape), kind, data)
    divisors, half = ["rope_freqs"], (config.rope.rotary_dim or config.head_dim) // 2
    if architecture == "phi3":
        divisors = ["rope_factors_short", "rope_factors_long"]
    for name in divisors:
        tensors[name + ".weight"] = ([half], _F32, np.ones(half, np.float32).tobytes())
    return metadata, tensors


def gguf_bytes(
    metadata: dict[str, Any], tensors: dict[str, tuple[list[int], int, bytes]]
) -> tuple[bytes, int]:
    """(a file, where its data begins)."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    head += [_gguf_text(key) + _gguf_value(value) for key, value in metadata.items()]
    offset, body = 0, []
    for name, (shape, kind, data) in tensors.items():
        head.append(_gguf_text(name) + struct.pack("<I", len(shape)))
        head += [struct.pack("<Q", size % 2**64) for size in reversed(shape)]
        head.append(struct.pack("<IQ", kind % 2**32, offset))
        body.append(data + bytes(-len(data) % 32))
        offset += len(body[-1])
    start = b"".join(head)
    start += bytes(-len(start) % 32)
    return start + b"".join(body), len(start)


def hostile_gguf(rng: np.random.Generator) -> Files:
    """A file with its metadata, its tensors' places, its bytes or a weight mutated."""
    metadata, tensors = gguf_parts(_pick(rng, tuple(MODEL_TYPES)))
    metadata, tensors = dict(metadata), dict(tensors)
    what = int(rng.integers(8))
    if what < 3:
        for _ in range(int(rng.integers(1, 3))):
            key = _pick(rng, list(metadata))
            match int(rng.integers(6)):
                case 0:
                    del metadata[key]
                case 1:
                    metadata[_pick(rng, ("split.count", "llama.flux", "é", ""))] = metadata[key]
                case 2 if isinstance(metadata[key], list) and metadata[key]:
                    entries = list(metadata[key])
                    entries[int(rng.integers(len(entries)))] = _pick(
                        rng, [v for v in _VALUES if type(v) is type(entries[0])]
                    )
                    metadata[key] = entries[: _pick(rng, (len(entries), 1, 0))]
                case _:
                    metadata[key] = _pick(rng, _VALUES)
    elif what < 5:
        name = _pick(rng, list(tensors))
        shape, kind, data = tensors.pop(name)
        match int(rng.integers(6)):
            case 0:
                name = _pick(rng, ("", "blk.0.a", "é", "blk.7.attn_q.weight"))
            case 1:
                shape = [*shape[:-1], _pick(rng, _NUMBERS)]
            case 2:
                shape = [_pick(rng, _NUMBERS), *shape[1:]]
            case 3:
                shape = _pick(rng, ([], [1] * 5, shape[::-1], [0, *shape], [2**32, 2**32]))
            case 4:
                kind = _pick(rng, (*range(41), 2**31, 2**32 - 1))
            case 5:
                data = data[: len(data) // 2]
        if rng.integers(6):
            tensors[name] = shape, kind, data
    file, end = gguf_bytes(metadata, tensors)
    if what == 5:
        file = mutate_bytes(rng, file, end)
    elif what == 6:
        file = mutate_bytes(rng, file, int(rng.integers(24, len(file))))
    elif what == 7:
        at = end + 2 * int(rng.integers((len(file) - end) // 2 - 2))
        file = file[:at] + struct.pack("<f", _pick(rng, (_NAN, _INF, -_INF))) + file[at + 4 :]
    return {"model.gguf": file}


def read_checkpoint(folder: Path) -> None:
    """Reads all that there is, as a program would that runs the model.

    Raises:
      ValueError: it is refused.
      AssertionError: it was read, but makes no sense.
    """
    file = folder / "model.gguf"
    checkpoint = open_checkpoint(file if file.exists() else folder, jnp.float32)
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    for name, shape in expected_tensors(config).items():
        out = np.empty(shape, np.float32)
        checkpoint.fill(name, out)
        assert np.isfinite(out).all(), name
    for rope in (config.rope, config.local_rope or config.rope):
        frequencies = rope.frequencies(config.head_dim)
        assert np.isfinite(frequencies).all(), rope
        assert (frequencies > 0).all(), rope
        assert 0 < rope.attention_factor < _INF, rope
    assert 0 < config.rms_norm_eps < _INF, config.rms_norm_eps
    assert all(type(i) is int for i in (*config.eos_token_ids, *tokenizer.eos_ids))
    ids = tokenizer.encode("abc é 12\n</s>")
    assert isinstance(tokenizer.decode(ids), str)
    tokenizer.apply_chat([{"role": "user", "content": "abc"}])


# Messages between caches.


class Caches:
    """A sender that has a row, a receiver that waits for it, a ticket and a message per group."""

    def __init__(self):
        def create():
            return KVState.create(
                layer_kinds=("full", 3, "mla"), num_pages=24, page_size=4, num_kv_heads=2,
                head_dim=8, latent_dim=8, max_seqs=4, pages_per_seq=6, dtype=jnp.float32,
            )  # fmt: skip

        source = create()
        source, _, status = source.append([1], [6], num_tokens=8)
        assert status.tolist() == [Status.OK]
        self.source = source
        target = create()
        target, inbox, ids, slots, _ = transfer.prepare(target, Inbox.create(target), [2], [8])
        self.before = jax.device_get((target, inbox))
        self.ticket = Ticket.create(target, ids[0], 2, 0, 8, slots[0])
        sender = Sender(source)
        sender.mark(1, self.ticket, 6)
        messages = sender.messages(source, {1: 6}, max_tokens=8)
        self.frames = {"ticket": self.ticket.to_bytes()}
        self.frames |= {f"message of group {m.group}": m.to_bytes() for m in messages}

    def read(self, kind: str, data: bytes) -> None:
        """Takes the bytes for a ticket or a message and uses it.

        Raises:
          ValueError: it is refused.
          AssertionError: it was refused, but something has changed.
        """
        if kind == "ticket":
            ticket = Ticket.from_bytes(data)
            sender = Sender(self.source)
            sender.mark(1, ticket, 0)
            for message in sender.messages(self.source, {1: 6}, max_tokens=8):
                message.to_bytes()
            return
        message = Message.from_bytes(data)
        target, inbox = jax.device_put(self.before)
        status = Status.BAD_ROW
        try:
            target, inbox, statuses = transfer.deliver(target, inbox, [message])
            status = Status(int(statuses[0]))
        finally:
            if status != Status.OK:
                after = jax.device_get((target, inbox))
                pairs = zip(jax.tree.leaves(self.before), jax.tree.leaves(after), strict=True)
                assert all(np.array_equal(a, b) for a, b in pairs), "the state has changed"
        if status != Status.OK:
            raise ValueError(f"message: status {status.name}")


_caches = functools.cache(Caches)


def hostile_message(rng: np.random.Generator) -> Files:
    """The bytes of a ticket or a message with a header or bytes mutated, most with the right CRC.

    The name says as what they are to be read.
    """
    frames = _caches().frames
    name = _pick(rng, tuple(frames))
    data = frames[name]
    end = 16 + int.from_bytes(data[8:16], "little")
    match int(rng.integers(8)):
        case 0 | 1 | 2 | 3 | 4:
            header = _json_bytes(rng, json.loads(data[16:end]))
            data = data[:8] + len(header).to_bytes(8, "little") + header + data[end:-4]
        case 5 | 6:
            data = mutate_bytes(rng, data[:-4], end)
        case 7:
            return {_pick(rng, tuple(frames)): mutate_bytes(rng, data)}
    as_what = name if rng.integers(10) else _pick(rng, tuple(frames))
    return {as_what: data + zlib.crc32(data).to_bytes(4, "little")}


# Cases.

KINDS: dict[str, Callable[[np.random.Generator], Files]] = {
    "gguf": hostile_gguf,
    "safetensors": hostile_safetensors,
    "folder": hostile_folder,
    "message": hostile_message,
}


def hostile(kind: str, seed: int, number: int) -> Files:
    """Case `number` of a kind."""
    return KINDS[kind](np.random.default_rng([seed, list(KINDS).index(kind), number]))


def read(kind: str, files: Files, folder: Path) -> None:
    """Reads a case as it is meant to be read; `folder` is emptied and takes its files.

    Raises:
      ValueError: it is refused. Anything else is a defect.
    """
    if kind == "message":
        ((name, data),) = files.items()
        assert data is not None
        _caches().read(name, data)
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)
    read_checkpoint(folder)

# SPDX-License-Identifier: Apache-2.0
"""How a Hugging Face folder stores the tensors of a configuration."""

from collections.abc import Iterator

import numpy as np

from ..decoder.config import DecoderConfig
from ..decoder.parameters import Part, Shape, are_scaled, each_expected_tensor, with_scales
from .shards import Shards


def layout_of(config: DecoderConfig, shards: Shards) -> "Layout":
    """That of a folder with these files."""
    kind = GptOssLayout if config.model_type == "gpt_oss" else Layout
    return kind(config, shards)


class Layout:
    """That of most families: each tensor by its name; experts one by one, or fused."""

    def __init__(self, config: DecoderConfig, shards: Shards):
        self.config, self.shards = config, shards

    def stored(self) -> Iterator[tuple[str, Shape]]:
        """(name, shape) of what must be in the files."""
        for name, shape in self._stored_weights():
            yield name, shape
            if self.shards.is_fp8(name):
                yield from with_scales({name: shape}, [name]).items()

    def _stored_weights(self) -> Iterator[tuple[str, Shape]]:
        for name, shape in each_expected_tensor(self.config):
            prefix, part, _ = self._expert_part(name)
            if not part:
                yield name, shape
            elif not self._is_fused(prefix):
                yield from ((piece, shape[1:]) for piece in _pieces(prefix, part, shape[0]))
            elif part == "gate_proj":
                yield prefix + "gate_up_proj", (shape[0], 2 * shape[1], shape[2])
            elif part == "down_proj":
                yield prefix + part, shape

    def scaled(self) -> frozenset[str]:
        """The names of `expected_tensors` that are fp8 with scales of blocks."""
        return frozenset(
            name
            for name, _ in each_expected_tensor(self.config)
            if self._is_scaled(name) and not name.endswith("kv_b_proj.weight")  # is applied by head
        )

    def _is_scaled(self, name: str) -> bool:
        prefix, projection, _ = self._expert_part(name)
        if not projection or self._is_fused(prefix):
            return self.shards.is_fp8(name)
        pieces = list(_pieces(prefix, projection, self.config.num_experts))
        return are_scaled(set(filter(self.shards.is_fp8, pieces)), pieces)

    def fill(self, name: str, out: np.ndarray, part: Part | None = None) -> None:
        """As `Fill`, for a tensor of `expected_tensors`, or the scales of one."""
        get = self.shards.get if out.dtype.itemsize == 1 else self.shards.wide
        prefix, projection, kind = self._expert_part(name)
        if not projection:
            out[...] = get(name, part)
            return
        count, inner = self.config.num_experts, self.config.moe_intermediate_size
        experts, rows, columns = part or (slice(None),) * 3
        if not self._is_fused(prefix):
            for number, piece in enumerate([*_pieces(prefix, projection, count, kind)][experts]):
                out[number] = get(piece, None if part is None else (rows, columns))
        elif projection == "down_proj":
            out[...] = get(prefix + projection, part)
        else:
            first = inner * (projection == "up_proj")
            begin, end, _ = rows.indices(inner)
            of_both = experts, slice(first + begin, first + end), columns
            out[...] = get(prefix + "gate_up_proj", of_both)

    def _expert_part(self, name: str) -> tuple[str, str, str]:
        """For experts what their stored names begin with, "gate_proj" or such, and "weight"."""
        layer, experts, part = name.partition(".mlp.experts.")
        projection, _, kind = part.partition(".")
        return layer + experts, projection, kind

    def _is_fused(self, prefix: str) -> bool:
        return prefix + "gate_up_proj" in self.shards.shapes


def _pieces(prefix: str, part: str, num_experts: int, kind: str = "weight") -> Iterator[str]:
    return (f"{prefix}{expert}.{part}.{kind}" for expert in range(num_experts))


# What 4 bits stand for (E2M1), and a byte, whose low half comes first.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])
_PAIRS = np.stack([np.tile(_FP4, 16), np.repeat(_FP4, 16)], axis=-1)
_FP4_BLOCK = 32
_LARGEST_SCALE = 252  # 6 · 2^(252 − 127) is finite in f32 and bf16; 255 stands for NaN


class GptOssLayout(Layout):
    """That of gpt-oss: rows of gate and up take turns, and the router has a name of its own.

    The experts are transposed, `gate_up_proj` [experts, hidden, 2 · inner] and `down_proj`
    [experts, inner, hidden]. Or they are MXFP4 (OCP Microscaling Formats, 2023): instead of each
    there are `…_blocks` u8[experts, rows, columns / 32, 16] and `…_scales` u8[experts, rows,
    columns / 32], powers of two with a bias of 127.
    """

    def _stored_weights(self) -> Iterator[tuple[str, Shape]]:
        for name, shape in each_expected_tensor(self.config):
            stored, turn = self._where(name)
            if turn == 1:  # beside the gate
                continue
            if turn == 0:
                shape = (shape[0], 2 * shape[1], *shape[2:])
            is_weight = ".mlp.experts." in name and len(shape) == 3
            if is_weight and self._has_blocks(stored):
                *rows, columns = shape
                if columns % _FP4_BLOCK:
                    raise ValueError(
                        f"{self.shards.where(stored + '_blocks')} must be of an expert with a "
                        f"multiple of {_FP4_BLOCK} columns, got {columns}"
                    )
                yield stored + "_blocks", (*rows, columns // _FP4_BLOCK, _FP4_BLOCK // 2)
                yield stored + "_scales", (*rows, columns // _FP4_BLOCK)
            else:
                yield stored, (shape[0], shape[2], shape[1]) if is_weight else shape

    def scaled(self) -> frozenset[str]:
        return frozenset()

    def fill(self, name: str, out: np.ndarray, part: Part | None = None) -> None:
        stored, turn = self._where(name)
        if ".mlp.experts." not in name:
            out[...] = self.shards.get(stored, part)
            return
        experts, rows, *columns = part or (slice(None),) * out.ndim
        picked = slice(None)
        if turn is not None:
            begin, end, _ = rows.indices(self.config.moe_intermediate_size)
            rows, picked = slice(2 * begin, 2 * end), slice(turn, None, 2)
        if not columns:
            out[...] = self.shards.get(stored, (experts, rows))[:, picked]
            return
        for number, expert in enumerate(range(self.config.num_experts)[experts]):
            one = slice(expert, expert + 1)
            if self._has_blocks(stored):
                out[number] = self._widened(stored, one, rows, picked, columns[0])
            else:
                out[number] = self.shards.get(stored, (one, columns[0], rows))[0].T[picked]

    def _widened(
        self, stored: str, expert: slice, rows: slice, picked: slice, columns: slice
    ) -> np.ndarray:
        """f32 of what blocks and scales stand for."""
        num_blocks = self.shards.shapes[stored + "_scales"][-1]
        begin, end, _ = columns.indices(num_blocks * _FP4_BLOCK)
        of_blocks = slice(begin // _FP4_BLOCK, -(-end // _FP4_BLOCK))
        part = (expert, rows, of_blocks)
        codes = self.shards.get(stored + "_blocks", (*part, slice(None)))[0, picked]
        scales = self.shards.get(stored + "_scales", part)[0, picked]
        if scales.size and scales.max() > _LARGEST_SCALE:
            raise ValueError(
                f"{self.shards.where(stored + '_scales')} must hold at most {_LARGEST_SCALE}, for "
                f"finite weights, got {scales.max()}"
            )
        powers = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
        wide = _PAIRS[codes].reshape(*scales.shape, _FP4_BLOCK) * powers[..., None]
        first = begin % _FP4_BLOCK
        return wide.reshape(len(scales), -1)[:, first : first + end - begin]

    def _where(self, name: str) -> tuple[str, int | None]:
        """The name in the files, and of gate and up whose turn it is: 0 or 1."""
        prefix, projection, kind = self._expert_part(name)
        if not projection:
            return name.replace(".mlp.gate.", ".mlp.router."), None
        is_down = projection == "down_proj"
        stored = prefix + ("down_proj" if is_down else "gate_up_proj")
        turn = None if is_down else int(projection == "up_proj")
        return stored + ("_bias" if kind == "bias" else ""), turn

    def _has_blocks(self, stored: str) -> bool:
        return stored + "_blocks" in self.shards.shapes

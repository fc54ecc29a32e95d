# SPDX-License-Identifier: Apache-2.0
"""The bugs that test_emulator.py plants in the CUDA attention kernels. Not a test."""

DIFFERS = "error|not finite|lse"  # the comparison with the oracle
# name → file, what stands there, what the bug makes of it, what must be said about it
BUGS = {
    "no zero fill": (
        "decode_loader.cuh",
        "const bool valid = mask >> row & 1;\n        const bool has_k",
        "const bool valid = true;\n        const bool has_k",
        "not finite",
    ),
    "ring loaded one stage too far": (
        "decode.cuh", "s < stages - 1", "s < stages", "while the cp.async",
    ),
    "loads into the stage being read": (
        "decode.cuh", "stage == 0 ? stages - 1 : stage - 1", "stage", "cp.async|race",
    ),
    "page table off by one": (
        "segment.cuh", "row * args.table_width + (index - behind)",
        "row * args.table_width + (index - behind) + 1",
        f"out of bounds|{DIFFERS}",
    ),
    "page id not checked": (
        "decode_loader.cuh", "page_id_ >= 0 && page_id_ < args.num_pages", "page_id_ != -1",
        "k_pages out of bounds",
    ),
    "32-bit page address": (
        "decode_loader.cuh", "? args.k_strides.Offset(page_id_",
        "? (int32_t)args.k_strides.Offset(page_id_", "k_pages out of bounds",
    ),
    "32-bit page address of vllm5d": (
        "decode_loader.cuh", "v_offset = args.v_strides.Offset(page_id_",
        "v_offset = (int32_t)args.v_strides.Offset(page_id_", "v_pages out of bounds",
    ),
    "values of tokens that do not exist": (
        "decode_tile.cuh", "b[i] &= exists[i % 2]", "b[i] &= ~0u", "not finite",
    ),
    "second half masked like the first": (
        "decode_tile.cuh", "PairMask(token_mask, column + 8)", "PairMask(token_mask, column)",
        DIFFERS,
    ),
    "key of the future": (
        "segment.cuh", "position < 0 ? 0 : position + 1", "position < 0 ? 0 : position + 2",
        DIFFERS,
    ),
    "mask one token too long": (
        "decode_tile.cuh", "(token_mask >> token & 1) &&", "", DIFFERS,
    ),
    "pinned tokens not read": (
        "segment.cuh", "token < NumPinned(args, segment.row)", "token < 0", DIFFERS,
    ),
    "pinned tokens masked": (
        "segment.cuh", "key < NumPinned(args, segment.row)", "key < 0", DIFFERS,
    ),
    "one tile of the gap": (
        "segment.cuh", "if (tile >= gap.begin) tile += gap.size;",
        "if (tile > gap.begin) tile += gap.size;", DIFFERS,
    ),
    "slid rows as if they had not": (
        "logits.cuh", "slot < NumPinned(args, row)) return 0;", "slot >= 0) return 0;", DIFFERS,
    ),
    "wrong partial slot": (
        "segment.cuh", "begin >= range.begin ? 1 : 0", "begin > range.begin ? 1 : 0",
        "race|nobody has written|error",
    ),
    "first to arrive merges": (
        "segment.cuh", "before == limit", "before == 0", "nobody has written|not published",
    ),
    "partial result read through L1": (
        "segment.cuh", "prim::LoadL2(part)", "prim::LoadConst<Float4>(part)",
        "L1 may serve",
    ),
    "ranges overlap": (
        "segment.cuh", "range.end = range.begin + header.chunk;",
        "range.end = range.begin + header.chunk + 3;",
        "race|write after write",
    ),
    "counters not cleared": (
        "begin.cuh", "prim::Store(args.arrivals + i, 0u);", "", "nobody has initialised",
    ),
    "empty rows not filled": (
        "begin.cuh", "prim::Ballot(is_empty)", "prim::Ballot(false)", "not finite",
    ),
    "length not clamped": (
        "logits.cuh", "Clamp<int32_t>(stored, 0, args.capacity)", "stored",
        "page_table out of bounds",
    ),
    "barrier in one warp only": (
        "segment.cuh", "  prim::Store(tops + thread, top);\n  prim::SyncThreads();",
        "  prim::Store(tops + thread, top);\n  if (thread < 32) prim::SyncThreads();",
        "race|nobody has written",
    ),
    "thread that leaves before a barrier": (
        "decode.cuh", "if (range.begin >= range.end) return;",
        "if (range.begin >= range.end || prim::ThreadIndex() == 40) return;", "deadlock.*ended",
    ),
    "shuffle in half a warp": (
        "decode_finish.cuh", "    l += prim::ShuffleXor(l, 1);\n",
        "    if (lane < 16) l += prim::ShuffleXor(l, 1);\n",
        "divergent|deadlock",
    ),
    "exchange buffer too small": (
        "traits.h", "sums[kWarps * kTileRows * kColumnPitch]", "sums[kTileRows * kColumnPitch]",
        "shared memory out of bounds|race|error",
    ),
    "prefill: invalid rows not zeroed": (
        "prefill_loader.cuh", "prim::CpAsync16(v_tile + Row",
        "if (rows[i] >= 0) prim::CpAsync16(v_tile + Row",
        "nobody has|not finite",
    ),
    "prefill: keys read beyond head_dim": (
        "prefill_loader.cuh", "rows[i] >= 0 && chunk * 8 < args.head_dim", "rows[i] >= 0",
        "not finite|out of bounds",
    ),
    "prefill: columns beyond V's head_dim written": (
        "prefill_finish.cuh", "if (chunk * 8 >= args.v_head_dim) continue;", "",
        f"out of bounds|race|write after write|{DIFFERS}",
    ),
    "keys read beyond head_dim": (
        "decode_loader.cuh", "has_k = valid && chunk * 8 < args.head_dim;", "has_k = valid;",
        "not finite|out of bounds",
    ),
    "columns beyond V's head_dim written": (
        "decode_finish.cuh", "first + column < args.v_head_dim", "first + column < HEAD_DIM",
        f"out of bounds|race|write after write|{DIFFERS}",
    ),
    "prefill: waits too late": (
        "prefill.cuh", "prim::CpAsyncWait(0)", "prim::CpAsyncWait(1)", "while the cp.async",
    ),
    "prefill: loads into the stage being read": (
        "prefill_loader.cuh", "const Shared<char> k_tile = KTile(tile);",
        "const Shared<char> k_tile = KTile(tile + 1);",
        "cp.async|race|nobody has",
    ),
    "prefill: no barrier between tiles": (
        "prefill.cuh", "the tile before have been read.\n    prim::SyncThreads();",
        "the tile before have been read.\n    if (tile == 0) prim::SyncThreads();", "race",
    ),
    "prefill: mask overwritten while it is read": (
        "prefill_unit.cuh", "kMaskSlots = 4", "kMaskSlots = 2", "race",
    ),
    "prefill: masks too few tiles": (
        "prefill_mask.cuh", "first_token + Traits::kTokens <= all.end",
        "first_token + Traits::kTokens <= prim::Load(MyWarpKeys<HEAD_DIM>()).any.end",
        DIFFERS,
    ),
    "prefill: diagonal of the unit's first row": (
        "prefill_unit.cuh", "(args, unit, unit.rows.count - 1).end", "(args, unit, 0).end", DIFFERS,
    ),
    "prefill: diagonal one token too far": (
        "prefill_mask.cuh", "token, keys.end - token)", "token, keys.end + 1 - token)", DIFFERS,
    ),
    "prefill: masks of rows read before they are there": (
        "prefill_mask.cuh", "+ row), mask);\n  }\n  prim::SyncWarp();",
        "+ row), mask);\n  }", "race",
    ),
    "prefill: masks of rows where other warps have theirs": (
        "prefill_mask.cuh", "(word * Traits::kRows + row), mask",
        "(word * Traits::kRows + lane), mask",
        f"race|{DIFFERS}",
    ),
    "prefill: pinned tokens seen by queries before them": (
        "prefill_mask.cuh", "(pinned < keys.end ? pinned : keys.end)", "pinned", DIFFERS,
    ),
    "prefill: the last tile of pinned tokens left out": (
        "tree.cuh", "pinned / TILE_TOKENS + (pinned % TILE_TOKENS != 0)", "pinned / TILE_TOKENS",
        DIFFERS,
    ),
    "prefill: pinned tokens not read": (
        "prefill_loader.cuh", "token < NumPinned(args, unit.row))", "token < 0)", DIFFERS,
    ),
    "prefill: the gap behind pinned tokens begins a tile late": (
        "prefill_loader.cuh", "if (tile >= gap.begin)", "if (tile > gap.begin)", DIFFERS,
    ),
    "prefill: a tree seen as a chain": (
        "prefill_mask.cuh", "mask &= TreeMask(", "(void)TreeMask(", DIFFERS,
    ),
    "prefill: the tree of another node": (
        "prefill_mask.cuh", "SeesKey(args, tree, query, first_token + i)",
        "SeesKey(args, tree, query, first_token + i + 1)",
        f"out of bounds|{DIFFERS}",
    ),
    "prefill: keys in the tree seen by all": (
        "prefill_mask.cuh", "if (keys.all.end > root) keys.all.end = root;", ";", DIFFERS,
    ),
    "prefill: page id not checked": (
        "prefill_loader.cuh", "page_id_ >= 0 && page_id_ < args.num_pages", "page_id_ != -1",
        "k_pages out of bounds",
    ),
    "prefill: O not rescaled": (
        "prefill_tile.cuh", "keep[r][half] != 1.0f", "keep[r][half] > 1.0f", DIFFERS,
    ),
    "prefill: rows beyond the unit written": (
        "prefill_finish.cuh", "\n    if (row >= unit.rows.count) break;", "",
        f"out of bounds|race|write after write|{DIFFERS}",
    ),
    "prefill: units drawn twice": (
        "prefill.cuh", "index = prim::GridSize() +", "index = 1 +", "race|write after write",
    ),
    "prefill: ticket not cleared": (
        "begin.cuh", "if (first == 0) prim::Store(args.ticket, 0u);", "",
        "nobody has initialised",
    ),
    "prefill: values of vllm5d tokens that do not exist": (
        "prefill_loader.cuh", "if (mask == 0xffu) return;", "return;", "not finite",
    ),
    "prefill: values of vllm5d cleared by another thread": (
        "prefill_loader.cuh", "const int32_t eight = thread % kEights;\n    const uint32_t mask",
        "const int32_t eight = (thread + 1) % kEights;\n    const uint32_t mask",
        "cp.async|race|nobody has",
    ),
    "prefill: values of vllm5d cleared before they are there": (
        "prefill.cuh", "prim::CpAsyncWait(0);\n    if constexpr (Loader::kIsVllm5d)",
        "if (!Loader::kIsVllm5d) prim::CpAsyncWait(0);\n    if constexpr (Loader::kIsVllm5d)",
        "cp.async",
    ),
    "prefill: values of vllm5d read from other chunks": (
        "prefill_tile.cuh", "2 * k + lane / 8 % 2", "k + lane / 8 % 2", DIFFERS,
    ),
    "prefill: 8 values of vllm5d for the first alone": (
        "prefill_loader.cuh", "(token | 7) < unit.first_key", "token < unit.first_key",
        f"not read|{DIFFERS}",
    ),
    "prefill: values of vllm5d left of the window read": (
        "prefill_loader.cuh", "(token | 7) < unit.first_key || ", "", "outside of the windows",
    ),
    "prefill: keys of vllm5d left of the window read": (
        "prefill_loader.cuh", "token >= LoadUnit<HEAD_DIM>().first_key &&", "",
        "outside of the windows",
    ),
    "rope: turned the other way": ("rope.cuh", "prim::Fma(-b.x", "prim::Fma(b.x", DIFFERS),
    "rope: pairs of the half style where they are interleaved": (
        "rope.cuh", "if (args.rope_interleaved) SwapHalves(&x, &y);\n        TurnPairs",
        "TurnPairs", DIFFERS,
    ),
    "rope: keys of another place": (
        "decode.cuh", "segment, first_token + row);", "segment, first_token + row + 1);", DIFFERS,
    ),
    "rope: keys beyond the tables": (
        "segment.cuh",
        "  if (args.cos && !HasAngle(args, TokenAt<TREES_AND_PINS>(args, segment, token))) "
        "return false;\n",
        "", DIFFERS,
    ),
    "rope: prefill keys beyond the tables": (
        "prefill_loader.cuh", "kTakesRope && args.cos && !HasAngle", "false && !HasAngle", DIFFERS,
    ),
    "rope: a query beyond the tables beside others": (
        "decode.cuh", "  if (!AllHaveAngles<TREES_AND_PINS>(args, segment)) return {0, 0};\n", "",
        DIFFERS,
    ),
    "rope: such a query in a prefill unit": (
        "prefill_mask.cuh", "kTakesRope && !AllHaveAngles", "false && !AllHaveAngles", DIFFERS,
    ),
    "rope: such a query sees": (
        "segment.cuh", "return has_angle ? keys : KeyRange{0, 0};", "return keys;", DIFFERS,
    ),
    "rope: no barrier behind turned keys": (
        "prefill.cuh", "        prim::SyncThreads();  // the turned keys\n", "", "race",
    ),
    "prefill: 32-bit page address of vllm5d": (
        "prefill_loader.cuh", "LayerOffset(args, args.v_strides) + args",
        "LayerOffset(args, args.v_strides) + (int32_t)args", DIFFERS,
    ),
    "window one token too long": (
        "logits.cuh", "position - window + 1", "position - window", "outside of the windows",
    ),
    "work begins at token 0": (
        "segment.cuh", "segment->first_tile += left;", "", f"not read|{DIFFERS}",
    ),
    "tokens left of the window read": (
        "segment.cuh", "return token >= segment.first_key ||", "return true ||",
        "outside of the windows",
    ),
    "values of vllm5d left of the window read": (
        "decode_loader.cuh", "(token | 7) >= segment_.first_key", "true", "outside of the windows",
    ),
    "a query sees the window of the first": (
        "decode.cuh", "first_token >= seen_by_all.first && ", "", DIFFERS,
    ),
    "a sink for each split": (
        "segment.cuh", "l = prim::Fma(ml.y, factor, l);",
        "l = prim::Fma(ml.y + prim::Exp2(LoadSink(args, QueryHead(args, rows, row)) * kLog2E - "
        "Base(ml.x)), factor, l);",
        DIFFERS,
    ),
    "the sink of another head": (
        "segment.cuh", "LoadSink(args, QueryHead(args, rows, row))", "LoadSink(args, 0)", DIFFERS,
    ),
    "a sink for padding": (
        "begin.cuh", "args.num_tokens, ctas, /*with_sinks=*/false", "args.num_tokens, ctas, true",
        "lse: empty rows",
    ),
    "soft cap before the scale": (
        "logits.cuh", "edit.factor /= args.logits.soft_cap",
        "edit.factor = 1.0f / args.logits.soft_cap", DIFFERS,
    ),
    "distance to the row's last query": (
        "segment.cuh", "first_key - position)", "first_key - segment.lengths.seq_len + 1)", DIFFERS,
    ),
    "prefill: tokens left of the window read": (
        "prefill_loader.cuh", "if (token < unit.first_key &&", "if (false &&",
        "outside of the windows",
    ),
    "prefill: the edge of the windows not masked": (
        "prefill_mask.cuh", "first_token >= all.first && ", "", DIFFERS,
    ),
    "prefill: a tile that the warp's last row sees left out": (
        "prefill_mask.cuh", "if (other.any.end > keys.any.end)",
        "if (other.any.end < keys.any.end)",
        DIFFERS,
    ),
    "latent: rows that do not exist not zeroed": (
        "latent_loader.cuh", "prim::CpAsync16(tile + at", "if (valid) prim::CpAsync16(tile + at",
        "nobody has|not finite",
    ),
    "latent: page id not checked": (
        "latent_loader.cuh", "page_id_ >= 0 && page_id_ < args.num_pages", "page_id_ != -1",
        "kv_pages out of bounds",
    ),
    "latent: 32-bit page address": (
        "latent_loader.cuh", "exists ? args.k_strides.Offset",
        "exists ? (int32_t)args.k_strides.Offset", "kv_pages out of bounds",
    ),
    "latent: tokens that no query sees": (
        "latent.cuh", "if (job.end > seen) job.end = seen;", "", "not finite|error",
    ),
    "latent: loads into the stage being read": (
        "latent.cuh", "stage == 0 ? stages - 1 : stage - 1", "stage", "cp.async|race",
    ),
    "latent: waits too late": (
        "latent.cuh", "prim::CpAsyncWait(stages - 2)", "prim::CpAsyncWait(stages - 1)",
        "while the cp.async",
    ),
    "latent: masks of the stage before": (
        "latent.cuh", "masks + stage * kLatentWarps", "masks + (stage ^ 1) * kLatentWarps",
        f"race|nobody has|{DIFFERS}",
    ),
    "latent: the mask of four tokens for eight": (
        "latent_tile.cuh", "exists | also << 4", "exists | exists << 4", DIFFERS,
    ),
    "latent: diagonal one token too far": (
        "latent_tile.cuh", "token + 8 <= seen_by_all.end", "token + 8 <= seen_by_all.end + 1",
        DIFFERS,
    ),
    "latent: O not rescaled": (
        "latent_tile.cuh", "keep[0] != 1.0f || keep[1] != 1.0f", "keep[0] != 1.0f", DIFFERS,
    ),
    "latent: columns of another warp": (
        "latent_tile.cuh", "prim::WarpIndex() % Traits::kValueWarps * Traits::kValueDims",
        "prim::WarpIndex() / 2 % Traits::kValueWarps * Traits::kValueDims",
        f"race|nobody has|{DIFFERS}",
    ),
    "latent: queries beyond the unit's": (
        "latent_tile.cuh", "row < job.rows.count && !scale.is_zero", "!scale.is_zero",
        "q out of bounds",
    ),
    "latent: a prefill unit drawn twice": (
        "latent.cuh", "index = prim::GridSize() +", "index = 1 +", "race|write after write",
    ),
    "latent: scores overwritten while they are read": (
        "latent.cuh", "  prim::SyncThreads();  // tiles and scores have been read\n", "", "race",
    ),
}  # fmt: skip


# The kernels that the planted bugs are tried on: one head_dim, so that they compile in a second.

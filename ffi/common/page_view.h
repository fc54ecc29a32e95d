// SPDX-License-Identifier: Apache-2.0

// Where a token of one layer lies in a page pool. All address arithmetic on pages is here, in
// int64.
//
//   HND     K, V [num_layers, num_pages, num_kv_heads, page_size, head_dim]
//   NHD     K, V [num_layers, num_pages, page_size, num_kv_heads, head_dim]
//   vllm5d  K [num_layers, num_pages, num_kv_heads, head_dim/x, page_size, x], x elements in 16
//           bytes; V [num_layers, num_pages, num_kv_heads, head_dim, page_size]
//   rpa     K and V in one pool [num_layers, num_pages, page_size, 2 * num_kv_heads, head_dim]: the
//           rows of a head stand side by side, K's first
//
// A token's row of one head is cut into atoms, runs of contiguous bytes: the whole row (HND, NHD,
// rpa), 16 bytes (K of vllm5d) or one element (V of vllm5d). Byte b of a row lies at
//   layer * layer_stride + page * page_stride + head * head_stride + offset * token_stride
//     + b / atom_bytes * atom_stride + b % atom_bytes.

#ifndef JAX_PAGED_COMMON_PAGE_VIEW_H_
#define JAX_PAGED_COMMON_PAGE_VIEW_H_

#include <cstdint>

#include "common/host_device.h"

namespace jax_paged {

enum class Layout : int { kHnd = 0, kNhd = 1, kVllm5d = 2, kRpa = 3 };

// Which of a cache's two pools: vllm5d orders them differently.
enum class Pool : int { kKeys = 0, kValues = 1 };

inline constexpr int64_t kKeyAtomBytes = 16;  // of vllm5d

struct PoolShape {
  int64_t num_layers;
  int64_t num_pages;
  int64_t num_kv_heads;
  int64_t page_size;
  int64_t head_dim;
  int64_t element_bytes;
  Layout layout;
  Pool pool;

  int64_t token_bytes() const { return head_dim * element_bytes; }
  int64_t rows_per_head() const { return layout == Layout::kRpa ? 2 : 1; }  // of a token
  int64_t page_bytes() const { return rows_per_head() * num_kv_heads * page_size * token_bytes(); }
  int64_t layer_bytes() const { return num_pages * page_bytes(); }
  int64_t num_slots() const { return num_pages * page_size; }
  // Of the pool's first row from the first byte of its array.
  int64_t first_byte() const {
    return layout == Layout::kRpa && pool == Pool::kValues ? token_bytes() : 0;
  }
};

// Distances in bytes, for kernels that find the layer on the device.
struct PageStrides {
  int64_t layer;
  int64_t page;
  int64_t head;
  int64_t token;
  int64_t atom;        // from one atom of a token to its next
  int64_t atom_bytes;  // contiguous; token_bytes() where the row is one atom

  // Of the first byte of a token from the first byte of its layer.
  JAX_PAGED_HOST_DEVICE int64_t Offset(int64_t page_id, int64_t head_id, int64_t offset) const {
    return page_id * page + head_id * head + offset * token;
  }
};

inline PageStrides MakePageStrides(const PoolShape& shape) {
  const int64_t row = shape.token_bytes();
  PageStrides strides = {shape.layer_bytes(),
                         shape.page_bytes(),
                         /*head=*/row * shape.page_size,
                         /*token=*/row,
                         /*atom=*/row,
                         /*atom_bytes=*/row};
  if (shape.layout == Layout::kNhd || shape.layout == Layout::kRpa) {
    strides.head = row * shape.rows_per_head();
    strides.token = strides.head * shape.num_kv_heads;
  } else if (shape.layout == Layout::kVllm5d) {
    const int64_t atom_bytes = shape.pool == Pool::kKeys ? kKeyAtomBytes : shape.element_bytes;
    strides.token = strides.atom_bytes = atom_bytes;
    strides.atom = shape.page_size * atom_bytes;
  }
  return strides;
}

// Where the slots of a pool lie, for kernels that learn layer and slot on the device.
struct PoolSlots {
  PageStrides strides;
  int64_t num_slots;  // num_pages * page_size
  int32_t num_layers;
  int32_t page_size;

  JAX_PAGED_HOST_DEVICE bool IsSlot(int32_t layer, int32_t slot) const {
    return layer >= 0 && layer < num_layers && slot >= 0 && slot < num_slots;
  }
  // Of the first byte of a head in a slot from the first byte of the pool; it must be a slot of it.
  JAX_PAGED_HOST_DEVICE int64_t Offset(int32_t layer, int32_t slot, int64_t head) const {
    return layer * strides.layer + strides.Offset(slot / page_size, head, slot % page_size);
  }
};

inline PoolSlots MakePoolSlots(const PoolShape& shape) {
  return {MakePageStrides(shape), shape.num_slots(), static_cast<int32_t>(shape.num_layers),
          static_cast<int32_t>(shape.page_size)};
}

struct PageView {
  char* base;  // first byte of the layer
  int64_t num_pages;
  int64_t page_size;
  PageStrides strides;

  bool IsPage(int64_t page) const { return page >= 0 && page < num_pages; }
  bool IsSlot(int32_t slot) const { return slot >= 0 && slot < num_pages * page_size; }

  // First byte of the token at `offset` in `page`, which must be a page of the pool.
  char* Token(int64_t page, int64_t head, int64_t offset) const {
    return base + strides.Offset(page, head, offset);
  }

  // First byte of the token in `slot` = page * page_size + offset, which must be a slot of the
  // pool.
  char* Slot(int64_t slot, int64_t head) const {
    return Token(slot / page_size, head, slot % page_size);
  }
};

// The view of `layer`; without pages where there is no such layer.
inline PageView MakePageView(void* pool, const PoolShape& shape, int64_t layer) {
  const bool is_layer = layer >= 0 && layer < shape.num_layers;
  return {static_cast<char*>(pool) + (is_layer ? layer * shape.layer_bytes() : 0),
          is_layer ? shape.num_pages : 0, shape.page_size, MakePageStrides(shape)};
}

}  // namespace jax_paged

#endif  // JAX_PAGED_COMMON_PAGE_VIEW_H_

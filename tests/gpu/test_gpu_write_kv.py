# SPDX-License-Identifier: Apache-2.0
"""write_kv on a GPU: the bytes that a plain loop writes, and nothing else."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged import write_kv
from jax_paged.layout import PagesShape, make_shape

pytestmark = pytest.mark.gpu


def expected_write(pages, tokens, slots, layer, layout):
    """The contract of write_kv as a loop."""
    pages = pages.copy()
    view = np.swapaxes(pages[layer], -3, -2) if layout == "HND" else pages[layer]
    for token, slot in zip(tokens, slots, strict=True):
        if 0 <= slot < view.shape[0] * view.shape[1]:
            view[divmod(int(slot), view.shape[1])] = token.astype(pages.dtype)
    return pages


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 128), (5, 24), (544, 64), (1, 8)])
def test_tokens_land_in_their_slots_and_nothing_else_changes(page_size, head_dim, dtype, layout):
    rng = np.random.default_rng(page_size)
    dims = (head_dim, head_dim + 8)
    shapes = [make_shape(PagesShape(3, 9, 4, page_size, dim), layout) for dim in dims]
    pools = [rng.standard_normal(shape, "f4").astype(jnp.dtype(dtype)) for shape in shapes]
    tokens = [rng.standard_normal((200, 4, dim), "f4") for dim in dims]
    slots = rng.integers(-5, 9 * page_size + 5, 200).astype(np.int32)  # some twice, some nowhere
    written = write_kv(
        *map(jnp.array, pools), *map(jnp.asarray, tokens), jnp.asarray(slots), layer=1,
        layout=layout, implementation="native",
    )  # fmt: skip
    for out, pages, new in zip(written, pools, tokens, strict=True):
        expected = expected_write(pages, new, slots, 1, layout)
        np.testing.assert_array_equal(np.asarray(out).view(np.uint8), expected.view(np.uint8))

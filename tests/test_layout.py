"""The layouts: one place that knows the order of the axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.layout import LAYOUTS, PagesShape, make_shape, pages_shape, slots_first


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_layers", [None, 3])
def test_make_shape_is_the_inverse_of_pages_shape(num_layers, layout):
    shape = PagesShape(num_layers, num_pages=5, num_kv_heads=2, page_size=4, head_dim=8)
    array = jax.ShapeDtypeStruct(make_shape(shape, layout), jnp.float32)
    assert pages_shape(array, layout) == shape


def test_the_axis_orders_are_those_of_the_names():
    shape = PagesShape(None, num_pages=5, num_kv_heads=2, page_size=4, head_dim=8)
    assert make_shape(shape, "HND") == (5, 2, 4, 8)
    assert make_shape(shape, "NHD") == (5, 4, 2, 8)
    assert make_shape(shape._replace(num_layers=3), "HND") == (3, 5, 2, 4, 8)


def test_slots_first_puts_the_slot_before_the_head():
    pages = jnp.arange(2 * 3 * 4 * 8).reshape(2, 3, 4, 8)
    np.testing.assert_array_equal(slots_first(pages, "HND")[1, 3, 2], pages[1, 2, 3])
    np.testing.assert_array_equal(slots_first(pages, "NHD")[1, 2, 3], pages[1, 2, 3])

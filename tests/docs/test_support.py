# SPDX-License-Identifier: Apache-2.0
"""The table of docs/support.md: what it says of each op and feature has just run.

A cell of each op and one of each feature: all of them in the deep tier.
"""

import pytest
from support_cells.kinds import FEATURES, Meaningless, Refused, Runs
from support_table import BEGIN, END, PAGE, cells, having, page_with, text

import jax_paged


def each(kind):
    """The cells of a kind, as values of op and feature."""
    pairs = [(op, feature) for op, feature, _ in having(kind)]
    return pytest.mark.parametrize(("op", "feature"), pairs, ids=name)


def name(word):
    return word.replace("`", "").replace(", ", "/")


@each(Runs)
def test_it_runs(op, feature):
    cells()[op][feature].check()


@each(Refused)
def test_it_is_refused_by_name(op, feature):
    cells()[op][feature].check()


def test_every_op_says_something_of_every_feature():
    assert all(set(row) == set(FEATURES) for row in cells().values())
    assert all(cell.why for _, _, cell in having(Refused) + having(Meaningless))


def test_few_are_refused():
    assert len(having(Refused)) <= 9


def test_a_cell_that_is_said_to_be_refused_fails_where_it_runs():
    with pytest.raises(AssertionError, match="it runs"):
        Refused(lambda: None, "tree", "").check()
    with pytest.raises(AssertionError, match="unexpected keyword argument 'other'"):
        Refused(lambda: jax_paged.tree_intervals(other=0), "'tree'", "").check()


def test_the_page_has_the_table_of_the_cells():
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
    hint = "to write it: python -P tests/support/support_table.py --write"
    assert page == page_with(text()), hint

# SPDX-License-Identifier: Apache-2.0
"""The harness of the mutation run: which edits it makes, how it goes on, what it reads in a log."""

import ast
from pathlib import Path

import pytest
from mutants.operators import OPERATORS, choose, mutants
from mutants.plan import PLAN
from mutants.run import Outcome, last_test, planned, table, to_run

ROOT = Path(__file__).parents[2]

PYTHON = '''\
"""A docstring: 1 < 2."""
SIZES: tuple[1, 2] = ()


def rows(table: "i32[1]", first, n: int = 3):
    """More of it, 4 - 5."""
    assert n > 0
    if n < 3:  # n < 1
        raise TypeError(f"{n + 1} < 2")
    print("Größe", n - 1)
    table[0] = "ß"; table.sort(key=abs(n - 1))  # after a letter of two bytes
    where = jnp.where(first, table, n)
    return min(n, 7) % 2, where.shape[-1], where.sum(axis=1), first[:, None], a and b
'''
# Line, operator, before and after of every mutant.
PYTHON_EDITS = r"""
5 | off by one | 3 | 4
8 | comparison | n < 3 | n <= 3
8 | dropped statement | if n < 3:  # n < 1\n        raise TypeError(f"{n + 1} < 2") | pass
8 | off by one | 3 | 4
11 | dropped statement | table[0] = "ß" | pass
11 | dropped statement | table.sort(key=abs(n - 1)) | pass
11 | off by one | 0 | 1
11 | off by one | n - 1 | n
12 | swapped operands | jnp.where(first, table, n) | jnp.where(first, n, table)
13 | swapped operands | min(n, 7) | max(n, 7)
13 | swapped operands | min(n, 7) % 2 | 2 % min(n, 7)
13 | off by one | 7 | 8
13 | off by one | 2 | 3
13 | wrong axis | -1 | -2
13 | wrong axis | 1 | 0
13 | wrong axis | :, None | None, :
13 | comparison | a and b | a or b
"""

CPP = """\
// i < 1
constexpr int kRows = 2 * 3;
template <typename T>
void Run(const int* x, int64_t head_dim, int64_t v_head_dim) {
  const int64_t last = head_dim - 1;
  for (int i = 0; i < last; ++i) {
    Check(x[i]);  // x - y
    Tell(x[i], "i < 1");
    if (i > 0 && x[0]) continue;
    sum += std::max(a - b, v_head_dim);
    Prefetch(x + 1);
  }
}
"""
CPP_EDITS = r"""
5 | off by one | m - 1 | m
5 | wrong axis | head_dim | v_head_dim
6 | comparison | i < last | i <= last
6 | off by one | 0 | 1
7 | dropped statement | Check(x[i]); | ;
9 | comparison | i > 0 | i >= 0
9 | comparison | 0 && x[0] | 0 || x[0]
9 | off by one | 0 | 1
9 | wrong axis | 0 | 1
9 | dropped statement | continue; | ;
10 | swapped operands | a - b | b - a
10 | swapped operands | std::max | std::min
10 | wrong axis | v_head_dim | head_dim
10 | dropped statement | sum += std::max(a - b, v_head_dim); | ;
"""


@pytest.mark.parametrize(
    ("file", "text", "edits"),
    [("rows.py", PYTHON, PYTHON_EDITS), ("run.h", CPP, CPP_EDITS)],
    ids=["python", "cpp"],
)
def test_a_file_has_these_mutants(file, text, edits):
    found = mutants(file, text.encode())
    rows = [line.replace(r"\n", "\n").split(" | ") for line in edits.strip().splitlines()]
    assert [len(row) for row in rows] == [4] * len(rows)
    told = {(int(line), *row) for line, *row in rows}
    assert {(m.line, m.operator, m.before, m.after) for m in found} == told
    assert {m.operator for m in found} == set(OPERATORS)
    assert len({m.id for m in found}) == len(found)


@pytest.mark.parametrize(("file", "text"), [("rows.py", PYTHON), ("run.h", CPP)])
def test_an_edit_leaves_every_other_byte(file, text):
    source = text.encode()
    for mutant in mutants(file, source):
        edited = mutant.apply(source)
        assert edited.startswith(source[: mutant.start])
        assert edited.endswith(source[mutant.end :])
        assert len(edited) - len(source) == len(mutant.after.encode()) - len(mutant.before.encode())
        with pytest.raises(ValueError, match=rf"{file}:{mutant.line}: expected"):
            mutant.apply(b"# " + source)


def test_lines_that_move_keep_their_mutants(tmp_path):
    path = tmp_path / "rows.py"
    path.write_text(PYTHON, encoding="utf-8")
    before = choose(tmp_path, {"rows.py": 5}, 1)
    assert before == choose(tmp_path, {"rows.py": 5}, 1)
    assert {m.operator for m in before} == set(OPERATORS)
    path.write_text("import math\n\nSIZE = math.pi\n" + PYTHON, encoding="utf-8")
    assert [m.id for m in choose(tmp_path, {"rows.py": 5}, 1)] == [m.id for m in before]
    assert len({tuple(m.id for m in choose(tmp_path, {"rows.py": 5}, n)) for n in range(9)}) > 4
    with pytest.raises(ValueError, match=r"rows.py: expected at least 99 mutants, got 5"):
        choose(tmp_path, {"rows.py": 99}, 1)


def test_the_plan_fits_the_tree():
    plan = planned()
    assert len(plan) >= 72
    assert len({mutant.id for mutant in plan}) == len(plan)
    assert sum(mutant.file.startswith("ffi/") for mutant in plan) >= 24
    for file, (_, tests) in PLAN.items():
        assert tests, file
        assert [t for t in tests.split() if len([*ROOT.glob(f"tests/*/test_{t}.py")]) != 1] == []
    for mutant in plan:
        if mutant.file.endswith(".py"):
            ast.parse(mutant.apply((ROOT / mutant.file).read_bytes()))


def test_the_test_that_caught_a_mutant_is_read_from_the_log():
    begun = "tests/ops/test_a.py::test_x[1-a b] PASSED [ 1%]\ntests/ops/test_a.py::test_y[2] "
    assert last_test(begun + "Fatal Python error: Segmentation fault") == "ops/test_a.py::test_y[2]"
    failed = begun + "FAILED [ 2%]\n=== short\nFAILED tests/ops/test_a.py::test_y[2 - 1] - It: 3\n"
    assert last_test(failed) == "ops/test_a.py::test_y[2 - 1]"
    assert last_test("ERROR tests/ops/test_b.py - ImportError: no\n") == "ops/test_b.py"
    assert last_test("ImportError while loading conftest") == "import of the package"


def test_a_run_goes_on_and_the_deep_tier_sees_survivors_only():
    found = mutants("rows.py", PYTHON.encode())
    a, b, c, d = (mutant.id for mutant in found[:4])
    state = {
        (a, "default"): Outcome(a, "default", "survived"),
        (b, "default"): Outcome(b, "default", "failed", "ops/test_a.py::test_x"),
    }
    assert to_run(found, state, "default", []) == found[2:]
    assert [mutant.id for mutant in to_run(found, state, "deep", [])] == [a]
    assert [mutant.id for mutant in to_run(found, state, "default", [b])] == [b]
    with pytest.raises(SystemExit, match="--only: expected ids of `list`, got rows-0"):
        to_run(found, state, "default", ["rows-0"])
    state[a, "deep"] = Outcome(a, "deep", "crashed", "test_b.py::test_z")
    state[c, "default"] = Outcome(c, "default", "does not compile")
    text = table(found, state)
    assert "2 mutants: the default tier catches 1, only the deep tier 1; 0 are" in text
    assert "deep tier only: `test_b.py::test_z` (crashed)" in text
    assert c not in text
    state[d, "mapped"] = Outcome(d, "mapped", "failed", "ops/test_a.py::test_y")
    assert to_run(found, state, "default", []) == found[4:]
    assert to_run(found, state, "mapped", []) == found[:3] + found[4:]
    assert "3 mutants: the default tier catches 2" in table(found, state)

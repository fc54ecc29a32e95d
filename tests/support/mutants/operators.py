# SPDX-License-Identifier: Apache-2.0
"""What a mutant is, and where a source file can have one.

Five operators: a comparison changed, off by one, swapped operands, a dropped statement, a wrong
axis. Python files are read with `ast`, C++ files line by line. An edit replaces the text of one
node and leaves every other byte. Left out is what no behaviour depends on: docstrings, comments,
error texts, annotations, asserts, logging and prefetches.
"""

import ast
import dataclasses
import hashlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

COMPARISON, OFF_BY_ONE, SWAPPED, DROPPED, AXIS = OPERATORS = (
    "comparison",
    "off by one",
    "swapped operands",
    "dropped statement",
    "wrong axis",
)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One edit: bytes [start, end) of the file read `before`, and `after` takes their place."""

    file: str
    line: int
    operator: str
    before: str
    after: str
    start: int
    end: int
    id: str
    shown: str  # the edit in its line, ⟦before → after⟧

    def apply(self, source: bytes) -> bytes:
        """The source with the edit, or a ValueError where it has changed since."""
        found = source[self.start : self.end].decode(errors="replace")
        if found != self.before:
            raise ValueError(f"{self.file}:{self.line}: expected {self.before!r}, got {found!r}")
        return source[: self.start] + self.after.encode() + source[self.end :]


# (start, end, operator, after), in bytes of a file.
Site = tuple[int, int, str, str]


def mutants(file: str, source: bytes) -> list[Mutant]:
    """All mutants of a file. Ids depend on the texts of line and edit, not on the line number."""
    sites = _PythonSites(source).found if file.endswith(".py") else list(_cpp_sites(source))
    seen: Counter[tuple[str, ...]] = Counter()
    made = []
    for start, end, operator, after in sorted(set(sites)):
        line, first = source.count(b"\n", 0, start) + 1, source.rfind(b"\n", 0, start) + 1
        before, left = source[start:end].decode(), source[first:start].decode()
        right = source[end:].split(b"\n", 1)[0].decode()
        text = (left + before + right).strip()
        key = (file, text, operator, before, after)
        digest = hashlib.sha256(repr((*key, seen[key])).encode()).hexdigest()
        seen[key] += 1
        name = f"{Path(file).stem.strip('_')}-{digest[:6]}"
        shown = f"{left}⟦{_short(before)} → {_short(after)}⟧{right}".strip()
        made.append(Mutant(file, line, operator, before, after, start, end, name, shown))
    return made


def _short(text: str, limit: int = 60) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def choose(root: Path, counts: Mapping[str, int], seed: int) -> list[Mutant]:
    """`counts[file]` mutants of each file, of different operators where it has them.

    Each site draws a number from the seed and its id, and the lowest one of an operator is taken.
    An edit elsewhere in the file so leaves the choice as it was, mostly.
    """
    chosen = []
    for file, count in counts.items():
        sites = mutants(file, (root / file).read_bytes())
        sites.sort(key=lambda mutant: random.Random(f"{seed} {mutant.id}").random())
        turns = list(OPERATORS)
        random.Random(f"{seed} {file}").shuffle(turns)
        taken: list[Mutant] = []
        for operator in itertools.islice(itertools.cycle(turns), 100 * count):
            lines = {mutant.line for mutant in taken}
            free = [m for m in sites if m.operator == operator and m.line not in lines]
            taken += free[:1]
            if len(taken) == count:
                break
        if len(taken) < count:
            raise ValueError(f"{file}: expected at least {count} mutants, got {len(taken)}")
        chosen += sorted(taken, key=lambda mutant: mutant.line)
    return chosen


# ---- Python ----

# Not `is None`, `in` and `not`, whose other way round any test sees.
_COMPARE: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}
_OTHER_BOUND = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
_TELLS = {"print", "warn", "debug", "info", "warning"}  # logging: nothing depends on it
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
_AXIS_CALLS = {"stack", "concatenate", "expand_dims", "take", "repeat", "squeeze", "cumsum"}


def _name(node: ast.expr) -> str:
    """The last part of a name: `where` of jnp.where."""
    return getattr(node, "attr", getattr(node, "id", ""))


def _integer(node: ast.AST) -> int | None:
    """The value of an integer literal, with its sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _integer(node.operand)
        return None if value is None else -value
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


class _PythonSites(ast.NodeVisitor):
    """Collects the sites of a file; what is not visited has none."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
        self.found: list[Site] = []
        self.visit(ast.parse(source))

    def span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def add(self, node: ast.AST, operator: str, after: str) -> None:
        self.found.append((*self.span(node), operator, after))

    def between(
        self, node: ast.AST, left: ast.AST, right: ast.AST, old: str, new: str
    ) -> str | None:
        """The node's text with `new` for the operator `old` between two operands of it."""
        (start, end), (_, begin), (stop, _) = self.span(node), self.span(left), self.span(right)
        gap = self.source[begin:stop].decode()
        if "#" in gap:  # a comment may hold the operator too
            return None
        gap = gap.replace(old, new, 1)
        return self.source[start:begin].decode() + gap + self.source[stop:end].decode()

    # What has no sites, or only in parts.

    def visit_Assert(self, node: ast.Assert) -> None: ...

    def visit_Raise(self, node: ast.Raise) -> None: ...

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self.statements(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            if not isinstance(statement, ast.Assign):  # the numbers of an enum
                self.visit(statement)

    # Sites.

    def generic_visit(self, node: ast.AST) -> None:
        for part in ("body", "orelse", "finalbody"):
            body = getattr(node, part, None)
            if isinstance(body, list) and not isinstance(node, ast.Module):
                self.statements(body)
        super().generic_visit(node)

    def statements(self, body: list[ast.stmt]) -> None:
        for statement in body:
            match statement:
                case ast.Expr(value=ast.Call(func=function)) if _name(function) not in _TELLS:
                    self.add(statement, DROPPED, "pass")
                case ast.AugAssign() | ast.Continue() | ast.Break():
                    self.add(statement, DROPPED, "pass")
                case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                    self.add(statement, DROPPED, "pass")
                case ast.If(body=[ast.Raise() | ast.Return() | ast.Continue()], orelse=[]):
                    self.add(statement, DROPPED, "pass")
                case _:
                    pass

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, kind, right in zip(operands, node.ops, operands[1:], strict=False):
            if type(kind) in _COMPARE:
                after = self.between(node, left, right, *_COMPARE[type(kind)])
                if after is not None:
                    self.add(node, COMPARISON, after)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in itertools.pairwise(node.values):
            after = self.between(node, left, right, old, new)
            if after is not None:
                self.add(node, COMPARISON, after)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        sign = _ARITHMETIC.get(type(node.op))
        is_text = isinstance(node.left, ast.JoinedStr) or (
            isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        )
        if sign is None or is_text:
            return self.generic_visit(node)
        if sign in "+-" and _integer(node.right) == 1:
            start, _ = self.span(node)
            _, end = self.span(node.left)
            tail = self.source[end : self.span(node.right)[0]].decode().split(sign)[0].rstrip()
            self.add(node, OFF_BY_ONE, self.source[start:end].decode() + tail)
            return self.visit(node.left)
        if sign != "+":
            left, right = (
                self.text(side) if isinstance(side, _ATOMS) else f"({self.text(side)})"
                for side in (node.left, node.right)
            )
            self.add(node, SWAPPED, f"{right} {sign} {left}")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        if name == "expect":  # a check: its condition matters, the words of its message do not
            return self.visit(node.args[0])
        if name in _TELLS:
            return None
        if name in _OTHER_BOUND:
            function = self.text(node.func)
            other = function[: -len(name)] + _OTHER_BOUND[name]
            self.add(node, SWAPPED, other + self.text(node)[len(function) :])
        if name == "where" and len(node.args) == 3 and all(map(self.one_line, node.args)):
            condition, yes, no = map(self.text, node.args)
            self.add(node, SWAPPED, f"{self.text(node.func)}({condition}, {no}, {yes})")
        if name in ("swapaxes", "moveaxis") and len(node.args) == 3:
            self.add(node, AXIS, self.text(node.args[0]))
        if name in _AXIS_CALLS and len(node.args) > 1 and self.axis(node.args[1]):
            node.args.pop(1)
        node.keywords = [  # an axis is no other number
            pair for pair in node.keywords if pair.arg != "axis" or not self.axis(pair.value)
        ]
        return self.generic_visit(node)

    def axis(self, node: ast.expr) -> bool:
        """Adds the axis beside this one, if it is one."""
        value = _integer(node)
        if value is not None:
            self.add(node, AXIS, str(value - 1 if value > 0 or value == -1 else value + 1))
        return value is not None

    def one_line(self, node: ast.expr) -> bool:
        return node.lineno == node.end_lineno

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if _name(node.value) == "shape" and self.axis(node.slice):
            return self.visit(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
        if len(parts) == 2 and {self.text(part) for part in parts} == {":", "None"}:
            first, second = map(self.text, parts)
            self.add(node.slice, AXIS, f"{second}, {first}")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        value = _integer(node)
        if value is None:
            self.generic_visit(node)
        else:
            self.add(node, OFF_BY_ONE, str(value - 1))

    def visit_Constant(self, node: ast.Constant) -> None:
        value = _integer(node)
        if value is not None:
            self.add(node, OFF_BY_ONE, str(value + 1))


# ---- C++ ----

_HIDDEN = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:\\\n|[^\n])*', re.S | re.M)
# Lines without behaviour of their own: declarations of types and constants, bindings, prefetches.
_SKIPPED = re.compile(
    r"static_assert|template|^\S|constexpr|[Pp]refetch|JAX_PAGED_|__attribute__|\busing\b|\.Arg<"
)
_OPERAND = r"(?:\w+(?:(?:\.|->)\w+)*(?:\[[^\[\]]*\])?)"
_CPP_COMPARE = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&",
}  # fmt: skip
# Quantities of one type that are easily taken for each other.
_PAIRS = (
    ("head_dim", "v_head_dim"),
    ("k_dim", "v_dim"),
    ("q_stride", "o_stride"),
    ("k_stride", "v_stride"),
    ("x_stride", "w_stride"),
    ("x_stride", "h_stride"),
    ("num_q_heads", "num_kv_heads"),
    ("hidden", "inner"),
    ("k_pool", "v_pool"),
    ("k_scale", "v_scale"),
    ("k_scales", "v_scales"),
    ("page_size", "num_pages"),
    ("seq_len", "q_len"),
    ("packed_rows", "block_rows"),
    ("row0", "ROWS"),
    ("cos", "sin"),
    ("share_a", "share_b"),
)
_OTHER_NAME = {name: pair[not i] for pair in _PAIRS for i, name in enumerate(pair)}


def _cpp_sites(source: bytes) -> Iterator[Site]:
    """Sites in the lines of function bodies; offsets are bytes, since columns are of bytes too."""
    text = source.decode("latin-1")  # a character per byte
    shown = _HIDDEN.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    start, before, names = 0, ";", set(re.findall(r"\w+|(?:\.|->)\w+", shown))
    for line in shown.splitlines(keepends=True):
        if line.strip() and not _SKIPPED.search(line):
            for first, last, operator, after in _cpp_line(line.rstrip(), before, names):
                # No mutant where a comment or a text would be replaced with it.
                if text[start + first : start + last] == line[first:last]:
                    yield start + first, start + last, operator, after
        before, start = line.strip() or before, start + len(line)


def _cpp_line(line: str, before: str, names: set[str]) -> Iterator[Site]:
    for found in re.finditer(r" (<=?|>=?|[=!]=|&&|\|\|) ", line):
        left = re.search(r"[^\s(]+$", line[: found.start()])
        right = re.match(r"[^\s;,)]+", line[found.end() :])
        if left and right:
            after = f"{left[0]} {_CPP_COMPARE[found[1]]} {right[0]}"
            yield left.start(), found.end() + right.end(), COMPARISON, after
    for found in re.finditer(r"([\w)\]]) [+-] 1(?![\w.'])", line):
        yield *found.span(), OFF_BY_ONE, found[1]
    for found in re.finditer(r"(?<![\w.'\[+-] )(?<![\w.'\[])\b(\d)(?=[,;)}]| [-+*/%<>?:&|])", line):
        yield *found.span(), OFF_BY_ONE, str(int(found[1]) + 1)
    pattern = rf"(?<![\w.>)\]] )({_OPERAND}) ([-/%]) ({_OPERAND})(?![\w(\[.<{{]|->|::)"
    for found in re.finditer(pattern, line):
        if not found[3].isdigit() or found[2] != "-":
            yield *found.span(), SWAPPED, f"{found[3]} {found[2]} {found[1]}"
    for found in re.finditer(rf"\? ({_OPERAND}) : ({_OPERAND})(?=[,;)])", line):
        yield *found.span(), SWAPPED, f"? {found[2]} : {found[1]}"
    for found in re.finditer(r"std::(min|max)\b", line):
        yield *found.span(), SWAPPED, f"std::{_OTHER_BOUND[found[1]]}"
    if before[-1] in ";{}:" or re.fullmatch(r"(if|for|while) .*\)|else", before):
        # A statement, no declaration: those have a type before the name.
        change = rf"{_OPERAND} [-+*/%|&^]?= [^=].*|[\w:.>-]+\(.*\)|(?:\+\+|--)\S+|continue|break"
        found = re.fullmatch(rf"\s+((?:{change});)", line)
        if found and not re.match(r"(?:if|for|while|switch|return)\b", found[1]):
            yield *found.span(1), DROPPED, ";"
    for found in re.finditer(r"\b(if|for|while) \(.*\) (\S.*;)$", line):
        yield *found.span(2), DROPPED, ";"
    for found in re.finditer(r"(?<=\[)[01](?=\])", line):
        yield *found.span(), AXIS, str(1 - int(found[0]))
    for found in re.finditer(r"(\.|->)?\b(\w+)", line):
        dot, other = found[1] or "", _OTHER_NAME.get(found[2])
        is_declared = re.match(r"\w[\w:<>]*[ *&]+$", line[: found.start()].lstrip())
        if other and dot + other in names and not is_declared:
            yield *found.span(2), AXIS, other

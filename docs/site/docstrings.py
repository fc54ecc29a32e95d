# SPDX-License-Identifier: Apache-2.0
"""Makes Markdown of our docstrings, and methods of the verbs, for the reference.

A docstring has paragraphs, formulas (indented), examples (`>>>`) and the sections Args, Returns and
Raises. In a section an entry may be for several arguments: "k, v: …". Nothing is imported: griffe
reads the sources.
"""

import ast
import inspect
import re
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[2]
SECTION = re.compile(r"(Args|Returns|Raises|Attributes):$")
ENTRY = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.*)", re.S)


class OurDocstrings(griffe.Extension):
    def on_package(self, *, pkg, loader, **kwargs):
        if pkg.name != "jax_paged":
            return
        options = option_texts(pkg["ops.options"].filepath)
        table, state = pkg["cache.page_table.PageTable"], pkg["cache.state.KVState"]
        verbs = add_verbs(pkg, table, state)
        links = {name: f"jax_paged.{name}" for name in verbs}
        for page in (ROOT / "docs" / "reference").glob("*.md"):
            for path in re.findall(r"^::: ([\w.]+)", page.read_text("utf-8"), re.M):
                links[path.rpartition(".")[2]] = path
        convert(pkg, options, links)


def option_texts(path):
    """The options of attention and their texts, from their declarations in ops/options.py."""
    calls = [x for x in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(x, ast.Call)]
    declared = [call for call in calls if getattr(call.func, "id", "") == "Option"]
    return {call.args[0].value: call.args[1].value for call in declared}


def add_verbs(pkg, table, state):
    """Makes methods of the verbs: they are attributes, `grow.reserve` or `_verb(…)`."""
    verbs = []
    for name, member in list(table.members.items()):
        found = re.fullmatch(r"([\w]+)\.(\w+)", str(getattr(member, "value", "")))
        if found is None:
            continue
        module = {"row_handles": "handles"}.get(found[1], found[1])
        function = pkg[f"cache.{module}.{found[2]}"]
        text = re.sub(r"\b(\w+)\(table, ", r"table.\1(", function.docstring.value)
        add_method(table, name, function, text)
        verbs.append(f"PageTable.{name}")
        if f"_verb(PageTable.{name}" in str(getattr(state.members.get(name), "value", "")):
            first = re.split(r"\n\n", inspect.cleandoc(function.docstring.value))[0]
            text = f"{first}\n\nThis is `PageTable.{name}`, done on the tables of all groups."
            if "PageCopies" in str(function.returns) or "SlotMoves" in str(function.returns):
                text += " It changes the pages too, and returns (state, status)."
            add_method(state, name, function, text, returns=False)
    return verbs


def add_method(of_class, name, function, text, *, returns=True):
    _, *rest = function.parameters
    this = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    place = of_class.members[name]
    method = griffe.Function(
        name,
        parameters=griffe.Parameters(this, *rest),
        returns=function.returns if returns else None,
        lineno=place.lineno,
        endlineno=place.endlineno,
        docstring=griffe.Docstring(text),
    )
    of_class.set_member(name, method)


def convert(thing, options, links):
    if thing.is_alias:
        return
    if thing.is_attribute and thing.docstring is None:
        comment = comment_of(thing)
        thing.docstring = griffe.Docstring(comment, parent=thing) if comment else None
    if thing.docstring is not None:
        text = inspect.cleandoc(thing.docstring.value)
        if thing.is_function:
            text = fill_options(text, [p.name for p in thing.parameters], options)
        thing.docstring.value = link_names(markdown(text), links, thing.name)
    for member in list(thing.members.values()):
        convert(member, options, links)


def comment_of(attribute):
    """The comments behind a field and above it."""
    if not (attribute.lineno and attribute.parent and attribute.parent.is_class):
        return ""
    lines = attribute.parent.module.filepath.read_text("utf-8").splitlines()
    above, first = [], attribute.lineno - 2
    while re.match(r"\s*# ", lines[first]):
        above.insert(0, lines[first].strip(" #"))
        first -= 1
    behind = lines[attribute.endlineno - 1].partition("  # ")[2]
    return ". ".join(part for part in (behind, " ".join(above)) if part)


def fill_options(text, parameters, options):
    """As `documented` in ops/options.py does it when the package is imported."""
    lines = [
        f"{name}: {options[name]}" for name in parameters
        if name in options and not re.search(rf"^ *{name}: ", text, re.M)
    ]  # fmt: skip
    return re.sub(r"^( *)\{options\}$", lambda found: "\n".join(found[1] + x for x in lines), text,
                  flags=re.M)  # fmt: skip


def markdown(text):
    blocks, lines = [], text.split("\n")
    while lines:
        line = lines[0]
        if not line.strip():
            lines.pop(0)
        elif SECTION.match(line):
            lines.pop(0)
            blocks.append(f"**{line}**")
            inside = take(lines, lambda x: x.startswith(" ") or not x.strip())
            body = inspect.cleandoc("\n" + "\n".join(inside))
            blocks.append(prose(body) if line == "Returns:" else entries(body))
        elif line.startswith(">>>"):
            blocks.append(fence("pycon", take(lines, str.strip)))
        elif line.startswith("- "):
            items = "\n".join(take(lines, str.strip)).split("\n- ")
            blocks.append("\n".join(f"- {prose(item.removeprefix('- '))}" for item in items))
        elif line.startswith("  "):
            blocks.append(fence("text", take(lines, lambda x: x.startswith("  "))))
        else:
            paragraph = take(lines, lambda x: x.strip() and not SECTION.match(x))
            is_list = ENTRY.match(line) and any(x.startswith("  ") for x in paragraph)
            text = "\n".join(paragraph)
            blocks.append(entries(text) if is_list else prose(text))
    return "\n\n".join(blocks)


def take(lines, keep):
    taken = []
    while lines and keep(lines[0]):
        taken.append(lines.pop(0))
    return taken


def fence(language, lines):
    return "\n".join(
        [f"```{language}", *inspect.cleandoc("\n" + "\n".join(lines)).split("\n"), "```"]
    )


def entries(text):
    """A list of the entries, and of the remarks between them."""
    items, is_entry = [], []
    for line in text.split("\n"):
        starts = not line.startswith(" ")
        names = starts and ENTRY.match(line)
        if names or not items or (starts and is_entry[-1]):
            items.append(f"- `{names[1]}`: {names[2]}" if names else f"- {line}")
            is_entry.append(bool(names))
        else:
            items[-1] += " " + line.strip()
    return "\n".join(f"- {prose(item[2:])}" for item in items)


def prose(text):
    """Outside of backticks, nothing is markup."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    escaped = [re.sub(r"([*_\[\]])", r"\\\1", x.replace("<", "&lt;")) for x in parts]
    return "".join(x if x[:1] == "`" else y for x, y in zip(parts, escaped, strict=True))


def link_names(text, links, own):
    """Names in backticks that the reference has become links to it."""
    parts = re.split(r"(```.*?```)", text, flags=re.S)
    return "".join(
        x if x.startswith("```") else re.sub(
            r"(?<!\[)`([\w.]+)`(?!:)",
            lambda found: f"[{found[0]}][{links[found[1]]}]"
            if found[1] in links and found[1] != own else found[0],
            x,
        ) for x in parts
    )  # fmt: skip

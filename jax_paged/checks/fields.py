# SPDX-License-Identifier: Apache-2.0
"""What a value from outside may be: its type and range, under a text that messages show.

Files and messages are written by others. What is read from them is looked up in a table of fields
and domains, and nothing is allocated, indexed or computed with a value that was not.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Domain(NamedTuple):
    """The values that a field may have."""

    text: str  # "an integer from 1 to 8"
    has: Callable[[Any], bool]


def integer(least: int = 0, most: int = 2**31 - 1) -> Domain:
    """Integers, bounds included; True and False are none."""

    def has(value):
        is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        return is_integer and bool(least <= value <= most)

    return Domain(f"an integer from {least} to {most}", has)


def number(least: float, most: float) -> Domain:
    """Integers and floats, bounds included; NaN is in no range."""

    def has(value):
        is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        return is_number and bool(least <= value <= most)

    return Domain(f"a number from {least:g} to {most:g}", has)


def list_of(one: Domain) -> Domain:
    """Lists and tuples of what `one` has."""
    return Domain(
        f"a list, each entry {one.text}",
        lambda value: isinstance(value, (list, tuple)) and all(map(one.has, value)),
    )


def either(*domains: Domain) -> Domain:
    """What one of them has."""
    text = " or ".join(domain.text for domain in domains)
    return Domain(text, lambda value: any(domain.has(value) for domain in domains))


def one_of(*values: Any) -> Domain:
    """These values."""
    return Domain(" or ".join(map(repr, values)), lambda value: value in values)


FLAG = Domain("true or false", lambda value: isinstance(value, bool))
TEXT = Domain("a text", lambda value: isinstance(value, str))
OBJECT = Domain("an object", lambda value: isinstance(value, dict))
NOTHING = Domain("None", lambda value: value is None)
ANYTHING = Domain("anything", lambda value: True)


def short(value: Any) -> str:
    """The repr of a value, cut to what fits a message; it costs little for large values too."""
    if isinstance(value, (str, bytes, list, tuple)) and len(value) > 120:
        return f"{short(value[:20])}… of length {len(value)}"
    if isinstance(value, int) and value.bit_length() > 200:  # its digits would take long
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."


def check_fields(name: str, fields: Any, domains: Mapping[str, Domain]) -> None:
    """Raises a ValueError unless `fields` is an object with just these fields, each in its domain.

    Args:
      name: what the message calls the object.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"{name}: expected an object, got {short(fields)}")
    for field in (*domains, *fields):
        if field not in domains:
            raise ValueError(f"{name}: expected {', '.join(domains)}, got {short(field)} as well")
        if field not in fields:
            raise ValueError(f"{name}.{field}: expected {domains[field].text}, got none")
        if not domains[field].has(fields[field]):
            expected = domains[field].text
            raise ValueError(f"{name}.{field}: expected {expected}, got {short(fields[field])}")

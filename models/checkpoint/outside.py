# SPDX-License-Identifier: Apache-2.0
"""How values and errors come in from files that others wrote.

Each reader has tables of its keys with their `Domain`s, most of them those of `DecoderConfig`'s
fields. `check_keys` holds a file against a table before anything is computed from it, and `reading`
makes an error of a foreign library into one that names the file.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jax_paged.checks.fields import Domain, short


def check_keys(where: object, values: Mapping[str, Any], domains: Mapping[str, Domain]) -> None:
    """Raises a ValueError that names the first key whose value is not in its domain; None passes.

    Args:
      where: what the message calls the file.
      values: key → value; keys that have no domain are not looked at.
    """
    for key, domain in domains.items():
        value = values.get(key)
        if value is not None and not domain.has(value):
            raise ValueError(f"{where}: key {key!r} must be {domain.text}, got {short(value)}")


@contextmanager
def reading(where: object) -> Iterator[None]:
    """Whatever a reader raises within becomes a ValueError of one line that names `where`.

    Foreign readers raise what they like, down to bare Exceptions and the panics of Rust libraries,
    which are BaseExceptions. What the user does (Ctrl-C) and what the machine lacks passes.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        text = " ".join(str(error)[:2000].split())
        text = text if len(text) <= 600 else text[:597] + "..."
        if isinstance(error, ValueError) and text.startswith(str(where)):
            raise
        if not isinstance(error, ValueError) or isinstance(error, UnicodeError):
            text = f"cannot be read: {type(error).__name__}: {text}"
        raise ValueError(f"{where}: {text}") from error

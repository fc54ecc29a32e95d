# SPDX-License-Identifier: Apache-2.0
"""The engine's adapters: a slot on the device for each, under a name, and which rows have which.

Each `add` makes a version with a number of its own. A request keeps the version that it began with,
so its text is that of one adapter from the first token to the last, and a version's slot is free
when its name is another's and no request has it any more. The prefix cache salts pages with the
number: no version ever finds the pages of another one.
"""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_paged.checks import expect

from ..checkpoint.peft import load_adapter
from ..decoder.adapters import Adapters, check_adapter

if TYPE_CHECKING:
    from .runner import ModelRunner


@dataclasses.dataclass(frozen=True)
class AdapterVersion:
    """One adapter in its slot."""

    name: str
    number: int  # of all versions of the engine
    slot: int

    @property
    def salt(self) -> str:
        """What the pages of its requests depend on."""
        return f"adapter {self.number}"


class AdapterSlots:
    """Names, versions and slots.

    Args:
      runner: with the arrays of all slots.
      config: of the model.
    """

    def __init__(self, runner: "ModelRunner", config: Any):
        self._runner, self._config = runner, config
        self._by_name: dict[str, AdapterVersion] = {}
        self._num_versions = 0

    @property
    def names(self) -> list[str]:
        """Those that requests may have, in the order in which they were added first."""
        return list(self._by_name)

    def find(self, name: Any) -> AdapterVersion:
        """The newest version of that name."""
        ok = isinstance(name, str) and name in self._by_name
        expect(ok, "adapter", f"one of {self.names}", repr(name))
        return self._by_name[name]

    def packed(self, adapter: Any) -> Adapters:
        """An adapter, or what a folder holds, as `add` takes it."""
        if isinstance(adapter, str | Path):
            adapter = load_adapter(adapter, self._config)
        check_adapter(adapter, self._config)
        return self._adapters.packed(adapter)

    def add(self, name: Any, packed: Adapters, in_use: Iterable[AdapterVersion]) -> AdapterVersion:
        """Puts an adapter into a slot that no request of `in_use` has."""
        expect(isinstance(name, str) and name != "", "name", "a text that is not empty", repr(name))
        others = [version for other, version in self._by_name.items() if other != name]
        taken = {version.slot for version in (*others, *in_use)}
        most = self._adapters.max_adapters
        free = [slot for slot in range(most) if slot not in taken]
        text = f"a free one of {most} slots (max_adapters)"
        got = (
            f"{len(others)} other adapters and {len(taken) - len(others)} that requests still have"
        )
        expect(bool(free), "name", text, got)
        version = AdapterVersion(name, self._num_versions, free[0])
        self._num_versions += 1
        self._runner.put_adapter(free[0], packed)
        self._by_name[name] = version
        return version

    def remove(self, name: Any) -> None:
        """Forgets a name. Its slot is free when no request has it."""
        self.find(name)
        del self._by_name[name]

    @property
    def _adapters(self) -> Adapters:
        assert self._runner.adapters is not None
        return self._runner.adapters

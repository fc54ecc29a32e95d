# SPDX-License-Identifier: Apache-2.0
"""The part of an engine that changes what it serves: weights, where experts lie, adapters."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from jax_paged._start.interrupt import uninterrupted
from jax_paged.checks import check_choice, expect

from ..decoder.adapters import Adapter
from ..decoder.placement import Balance
from .adapters import AdapterSlots
from .renew import checked_weights
from .stepping import Stepping


class Changes(Stepping):
    """For the `Engine` that is made of it."""

    weight_version: int
    _adapters: AdapterSlots | None
    _salt: str

    def clear_cache(self) -> None:
        """Forgets all cached pages that no request uses."""
        with uninterrupted():
            for one in self._schedulers:
                one.clear_cache()
            self._keep()

    def update_weights(
        self,
        weights: Any,
        *,
        mapping: Callable[[Any], Any] | None = None,
        running: str = "recompute",
        copy: bool = True,
    ) -> None:
        """Takes new weights between two steps; nothing is compiled again.

        For rollouts inside a training process: the trainer's weights, each time they have changed.
        Cached pages are those of the old weights and are found no more. Where an engine has several
        processes, each of the others takes what its `follow` is given.

        Args:
          weights: a model like the engine's own, or a pytree like that of its arrays
            (`split_model`): of the same structure, shapes and dtypes.
          mapping: makes such a pytree of `weights`, where a trainer has other names, shapes or
            dtypes. It is called once, on the device if it is made of jax functions.
          running: what becomes of requests that have begun. "recompute": they compute K and V anew
            with the new weights, so that every token from now on has the distribution that the new
            model gives it. "keep": they go on with what they have, which is cheaper, and no
            model's distribution.
          copy: whether arrays are copied, from the second time on into the memory of the copies
            before, so that a trainer may donate its own. False takes them as they are.

        Raises:
          ValueError: a leaf is missing, too much, or of another shape or dtype; it is named.
        """
        check_choice("running", running, ("recompute", "keep"))
        given = weights if mapping is None else mapping(weights)
        params = checked_weights(given, self._runner.graph, self.params)
        with uninterrupted():
            while self._flying:  # what they draw is of the old weights
                self._read_back()
            self._runner.update(params, copy=copy)
            self.weight_version += 1
            salt = f"{self._salt} weights {self.weight_version}"
            for one in self._schedulers:
                one.renew(salt, recompute=running == "recompute")
            self._keep()
        while self._untold:
            self._untold.popleft().tell()

    def rebalance(self) -> Balance:
        """Moves experts between devices by what they had to do since the last call.

        In each layer the busiest ones get the redundant slots, and the devices get like loads. The
        next steps run as before, and nothing is compiled; K and V and the prefix cache stay. While
        a layer moves, its experts are in memory twice; the model that the engine was made of keeps
        them where they were, as long as there is one.

        Returns:
          How even the loads were, and would have been; see `Balance`.

        Raises:
          ValueError: the model's experts cannot move (`Decoder`, redundant_experts).
        """
        can = self._runner.moves_experts
        expect(can, "model", "one with redundant_experts, 0 or more", "one whose experts stay")
        with uninterrupted():
            return self._runner.rebalance()

    def add_adapter(self, name: str, adapter: str | Path | Adapter) -> None:
        """Puts an adapter into a free slot, for requests from now on; nothing is compiled.

        Where the name is there already, it stands for the new adapter from now on. Requests that
        have the old one keep it to their end, so that no text is one of two adapters; that takes
        a slot as long as they run.

        Args:
          name: what `submit` calls it.
          adapter: an `Adapter`, or a folder that PEFT saved (`load_adapter`).

        Raises:
          ValueError: the adapter is not for this model, its rank is above max_rank, or no slot is
            free.
        """
        slots = self._slots()
        packed = slots.packed(adapter)
        with uninterrupted():
            lists = ((*one.waiting, *one.running) for one in self._schedulers)
            requests = chain.from_iterable(lists)
            slots.add(name, packed, [r.adapter for r in requests if r.adapter is not None])

    def remove_adapter(self, name: str) -> None:
        """Forgets a name; requests that have the adapter keep it to their end.

        Raises:
          ValueError: there is no such name.
        """
        self._slots().remove(name)

    @property
    def adapters(self) -> list[str]:
        """The names that `submit` takes."""
        return [] if self._adapters is None else self._adapters.names

    def _slots(self) -> AdapterSlots:
        got = "an engine without adapters (max_adapters)"
        expect(self._adapters is not None, "adapter", "an engine that was made for some", got)
        assert self._adapters is not None
        return self._adapters

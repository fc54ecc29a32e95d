# SPDX-License-Identifier: Apache-2.0
"""Texts that live between calls: a conversation's pages are still there when it goes on.

    sessions = Sessions(engine, host_bytes=1 << 30)
    talk = sessions.open("alice", tokenizer.encode(greeting))
    request = talk.generate(max_new_tokens=64, stop_tokens=ends)
    talk.append(tokenizer.encode(reply))
    other = talk.fork("alice, but bolder")
    sessions.save("folder")  # Sessions.restore("folder", engine) goes on in another process

A session is its tokens. Their pages stay where the engine has them: in its prefix cache, least
recently used out first, and then in host memory, where there is room for them. What is in neither
is computed anew, so tokens are the same in any case. Sequences by key that are forked and removed
are those of TVM's paged KV cache.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_paged.checks import expect

from .._packages import check_installed
from ..decoder.generation import as_tokens, check_count
from .handover import Piece, PrefillTicket
from .request import Request

if TYPE_CHECKING:
    from .engine import Engine

_VERSION = 1


class Session:
    """A text that goes on; `Sessions.open` and `fork` make it. Read key, tokens and request.

    tokens: ids, those that were given and those that were drawn; not the stop token.
    adapter: the name of the one that it runs with, or None.
    request: what runs for it, between `begin` and `finish`; else None.
    """

    def __init__(self, sessions: "Sessions", key: str, adapter: str | None):
        self.key, self.adapter = key, adapter
        self.tokens: list[int] = []
        self.request: Request | None = None
        self._sessions = sessions
        self._ticket: PrefillTicket | None = None  # pages of its first tokens in host memory

    def append(self, tokens: Sequence[int]) -> None:
        """Adds token ids to the text; nothing is computed yet."""
        self._check_free()
        self.tokens += as_tokens("tokens", tokens, self._engine.config.vocab_size).tolist()

    def generate(self, **options: Any) -> Request:
        """Draws the next tokens and adds them to the text: `begin`, then `finish`."""
        self.begin(**options)
        return self.finish()

    def begin(self, **options: Any) -> Request:
        """Submits the text to the engine, which may serve others meanwhile.

        Args:
          options: max_new_tokens and others, as for `Engine.submit`; the adapter is the session's.

        Raises:
          ValueError: the text has no token, something runs for it already, or as `Engine.submit`.
        """
        self._check_free()
        engine, sessions = self._engine, self._sessions
        options |= {"adapter": self.adapter, "hand_out": sessions.host_bytes > 0}
        ticket, prompt = self._ticket, self.tokens
        if ticket is not None and ticket.facts != engine.facts():  # of weights of before
            ticket = self._ticket = None
        if ticket is not None and ticket.num_tokens < len(prompt):
            self.request = engine.receive(prompt, ticket, **options)
        else:
            self.request = engine.submit(prompt, **options)
        sessions._touch(self)
        return self.request

    def finish(self) -> Request:
        """Runs the engine until the session's request is done, and adds its tokens to the text.

        A request that was cancelled adds those that it has.

        Returns:
          The request; its `reason` tells why it has ended.

        Raises:
          ValueError: nothing runs for the session.
        """
        request, sessions = self.request, self._sessions
        expect(request is not None, "session", "one with a request, after `begin`", repr(self.key))
        assert request is not None
        while not request.is_done:
            self._engine.step()
        self.request = None
        self.tokens += request.tokens
        if request.num_kept > 0:
            self._ticket = self._engine.hand_out(request)
        sessions._touch(self)
        return request

    def fork(self, key: str) -> "Session":
        """Another session with the same text; they share its pages.

        Raises:
          ValueError: a session has this key, or something runs for this one.
        """
        self._check_free()
        child = self._sessions.open(key, self.tokens, adapter=self.adapter)
        child._ticket = self._ticket
        return child

    def close(self) -> None:
        """Forgets the session. A request that runs for it is cancelled."""
        sessions = self._sessions
        expect(sessions.get(self.key) is self, "session", "an open one", f"{self.key!r}, closed")
        if self.request is not None:
            self._engine.cancel(self.request)
            self.request = None
        del sessions._by_key[self.key]

    @property
    def host_bytes(self) -> int:
        """What it has in host memory, perhaps together with its forks."""
        pieces = () if self._ticket is None else self._ticket.pieces
        return sum(piece.values.nbytes for piece in pieces)

    @property
    def _engine(self) -> "Engine":
        return self._sessions.engine

    def _check_free(self) -> None:
        is_open = self._sessions.get(self.key) is self
        expect(is_open, "session", "an open one", f"{self.key!r}, closed")
        text = "one for which nothing runs; `finish` comes first"
        expect(self.request is None, "session", text, repr(self.key))


class Sessions:
    """The sessions of an engine, by key.

    Args:
      engine: serves them, and other requests too. Without its prefix cache each call computes all
        that host memory does not have.
      host_bytes: most bytes of pages in host memory. The pages of a session are copied there when
        its request is done, and back when it goes on and the prefix cache has lost them. Those of
        the session that was used least recently go first. The engine swaps
        (preemption="swap"). 0 = none.

    Raises:
      ValueError, NotImplementedError: the engine cannot copy pages to host memory.
    """

    def __init__(self, engine: "Engine", *, host_bytes: int = 0):
        check_count("host_bytes", host_bytes, 0)
        if host_bytes:
            engine._check_swaps("hand_out")
        self.engine, self.host_bytes = engine, int(host_bytes)
        self._by_key: dict[str, Session] = {}  # the least recently used first

    def open(self, key: str, tokens: Sequence[int] = (), *, adapter: str | None = None) -> Session:
        """A new session.

        Args:
          key: its name.
          tokens: ids that the text begins with.
          adapter: the name of a LoRA adapter of the engine; None = none.

        Raises:
          ValueError: there is a session with this key, or a token id or the adapter is wrong.
        """
        expect(isinstance(key, str), "key", "a str", repr(key))
        expect(key not in self._by_key, "key", "one that no session has", repr(key))
        if adapter is not None:
            self.engine._slots().find(adapter)
        session = Session(self, key, adapter)
        self._by_key[key] = session
        try:
            if len(tokens):
                session.append(tokens)
        except ValueError:
            del self._by_key[key]
            raise
        return session

    def get(self, key: str) -> Session | None:
        """The session with this key, or None."""
        return self._by_key.get(key)

    def __getitem__(self, key: str) -> Session:
        return self._by_key[key]

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)

    def _touch(self, session: Session) -> None:
        """It was used; makes room in host memory."""
        if self._by_key.pop(session.key, None) is not None:
            self._by_key[session.key] = session
        for one in self:
            if self._bytes() <= self.host_bytes:
                break
            one._ticket = None

    def _bytes(self) -> int:
        """In host memory; what forks share counts once."""
        return sum({id(one._ticket): one.host_bytes for one in self}.values())

    def save(self, folder: str | Path) -> None:
        """Saves all sessions with orbax: their tokens, pages in host memory, and what runs.

        Args:
          folder: a new one.

        Raises:
          ValueError: the folder is there already. ImportError: orbax-checkpoint is missing.
        """
        check_installed("orbax.checkpoint", extra="sessions")
        import orbax.checkpoint as ocp

        running = [one.request for one in self if one.request is not None]
        values: dict[str, np.ndarray] = {}
        told = []
        for one in self:
            known: dict[str, Any] = {
                "key": one.key, "tokens": one.tokens, "adapter": one.adapter,
                "runs": one.request is not None,
            }  # fmt: skip
            if (ticket := one._ticket) is not None:
                names = [f"{len(values) + i}" for i in range(len(ticket.pieces))]
                values |= {n: piece.values for n, piece in zip(names, ticket.pieces, strict=True)}
                places = [[p.pool, p.page, p.head] for p in ticket.pieces]
                known["ticket"] = {
                    "facts": dict(ticket.facts), "num_tokens": ticket.num_tokens,
                    "digest": ticket.digest, "adapter": ticket.adapter,
                    "pieces": [[n, *place] for n, place in zip(names, places, strict=True)],
                }  # fmt: skip
            told.append(known)
        text = {"version": _VERSION, "sessions": told, "engine": self.engine.snapshot(running)}
        values |= {} if values else {"none": np.zeros(1, np.int8)}  # orbax saves no empty tree
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as saver:
            saver.save(
                Path(folder).absolute(),
                ocp.args.Composite(
                    pages=ocp.args.PyTreeSave(values), sessions=ocp.args.JsonSave(text)
                ),
            )

    @classmethod
    def restore(
        cls, folder: str | Path, engine: "Engine", *, host_bytes: int = 0, **options: Any
    ) -> "Sessions":
        """The sessions of `save`, with an engine of the same model; requests go on that ran.

        Args:
          folder, engine, host_bytes: as for `save` and `Sessions`.
          options: decode and tokenizer, as for `Engine.restore`.

        Raises:
          ValueError: there are no sessions in the folder, they are of another model, or as
            `Sessions`. ImportError: orbax-checkpoint is missing.
        """
        check_installed("orbax.checkpoint", extra="sessions")
        import orbax.checkpoint as ocp

        sessions, path = cls(engine, host_bytes=host_bytes), Path(folder).absolute()
        expect((path / "sessions").is_dir(), "folder", "one that `save` has written", str(folder))
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as loader:
            found = loader.restore(
                path,
                ocp.args.Composite(pages=ocp.args.PyTreeRestore(), sessions=ocp.args.JsonRestore()),
            )
        text, values = found["sessions"], found["pages"]
        version = text.get("version")
        expect(version == _VERSION, "folder", f"sessions of version {_VERSION}", version)
        requests = iter(engine.restore(text["engine"], **options))
        for known in text["sessions"]:
            one = sessions.open(known["key"], known["tokens"], adapter=known["adapter"])
            one.request = next(requests) if known["runs"] else None
            if host_bytes and (told := known.get("ticket")) is not None:
                pieces = [
                    Piece(pool, page, head, np.asarray(values[name]))
                    for name, pool, page, head in told.pop("pieces")
                ]
                one._ticket = PrefillTicket(**told, pieces=pieces)
            sessions._touch(one)
        return sessions

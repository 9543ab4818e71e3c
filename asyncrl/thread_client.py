"""A Client for code that is not asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from asyncrl.client import Client, Unreachable
from asyncrl.messages import Hello, Message, Welcome
from asyncrl.wire import Frame, Packet

T = TypeVar("T")
CLOSE_S = 2.0
"""The longest that ThreadClient.close waits, for its client and for its thread."""


class ThreadClient:
    """A Client on an event loop in a thread of its own, for callers that are not asyncio."""

    def __init__(self, address: str, *, hello: Hello) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"wire-{hello.member}", daemon=True
        )
        self._thread.start()
        self._client: Client = self._run(self._make(address, hello)).result()

    @property
    def hello(self) -> Hello:
        """See Client.hello."""
        return self._client.hello

    @property
    def welcome(self) -> Welcome | None:
        """See Client.welcome."""
        return self._client.welcome

    @property
    def address(self) -> str:
        return self._client.address

    def heed_line(self, on_line: Callable[[bool], None]) -> None:
        """`on_line` becomes Client.on_line; it runs in the thread."""
        self._client.on_line = on_line

    def connect(self, *, deadline_s: float) -> Welcome:
        return self._run(self._client.connect(deadline_s=deadline_s)).result()

    def call(
        self, message: Message, *, frames: tuple[Frame, ...] = (), deadline_s: float
    ) -> Packet:
        return self.call_soon(message, frames=frames, deadline_s=deadline_s).result()

    def call_soon(
        self, message: Message, *, frames: tuple[Frame, ...] = (), deadline_s: float
    ) -> Future[Packet]:
        """As `call`, but returns a future at once (prefetch)."""
        return self._run(self._client.call(message, frames=frames, deadline_s=deadline_s))

    def close(self) -> None:
        """Calls that wait end with Unreachable. Safe to call twice."""
        if self._loop.is_closed():
            return
        wait([self._run(self._end())], timeout=CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        await self._client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop.is_closed():
            coroutine.close()
            raise Unreachable("the connection to the buffer was closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    @staticmethod
    async def _make(address: str, hello: Hello) -> Client:
        return Client(address, hello=hello)

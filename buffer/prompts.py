"""The order in which prompts are handed out: epoch after epoch, each shuffled by the run's seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence

import msgpack

from asyncrl.types import GroupId, Row

MAX_ROW_BYTES = 8 << 20
"""A larger row is refused: it travels in the header of a message (wire.MAX_HEADER_BYTES)."""


class Prompts:
    """Names the k-th prompt of the run and finds its row. The order depends on the seed alone."""

    def __init__(self, rows: Sequence[Row], *, num_epochs: int, seed: int, shuffle: bool) -> None:
        """Raises ValueError for no rows at all, and for a row that cannot be sent."""
        if not rows:
            raise ValueError("data.train_files hold no rows: there is nothing to train on")
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[int, list[int]] = {}
        self.num_groups = len(rows) * num_epochs
        self.fingerprint = _fingerprint(rows, seed=seed, shuffle=shuffle)
        """Hash of rows and order; a resumed run must have the same."""

    def group_id(self, number: int) -> GroupId:
        """The name of the `number`-th prompt, counted from 0 over all epochs.

        Numbers from num_groups on are prompts of a further epoch (last_batch=wrap).
        """
        return GroupId(*divmod(number, len(self._rows)))

    def row(self, id: GroupId) -> Row:
        return self._rows[self._order(id.epoch)[id.position]]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self._rows)))
            if self._shuffle:
                random.Random(f"{self._seed}|{epoch}").shuffle(order)
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = order
        return self._orders[epoch]


def _fingerprint(rows: Sequence[Row], *, seed: int, shuffle: bool) -> str:
    digest = hashlib.blake2b(f"{seed}|{shuffle}|".encode(), digest_size=16)
    for packed in pack_rows(rows, "data.train_files"):
        digest.update(packed)
    return digest.hexdigest()


def pack_rows(rows: Sequence[Row], where: str) -> Iterator[bytes]:
    """The bytes of each row. Raises ValueError, naming `where`, for one that cannot be sent."""
    for index, row in enumerate(rows):
        try:
            packed = pack_row(row)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"{where}: row {index} cannot be sent to a generator: {error}. "
                "Use text, numbers, lists and dicts with text keys."
            ) from None
        if len(packed) > MAX_ROW_BYTES:
            raise ValueError(
                f"{where}: row {index} has {len(packed)} bytes and cannot be sent to a generator: "
                f"shorten its prompt, answer or extra_info to {MAX_ROW_BYTES} bytes in all"
            )
        yield packed


def pack_row(row: Row) -> bytes:
    """A row as it travels."""
    packed: bytes = msgpack.packb(row)
    return packed

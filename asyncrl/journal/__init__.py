"""The journal of a run: what the buffer must not forget, and who reads it (docs/journal.md).

journal.py writes: database.py holds the rows of tables.py, segments.py the payloads. memory.py
keeps nothing. claim.py: who may write. cap.py: how much it may hold. recorded.py reads a run once
more.
"""

from asyncrl.journal.journal import SEGMENT_BYTES, Journal, fates, open_read_only

__all__ = ["SEGMENT_BYTES", "Journal", "fates", "open_read_only"]

"""The journal: what was acknowledged survives SIGKILL, and old payloads go in whole segments."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from asyncrl.journal import Journal, fates, open_read_only
from asyncrl.journal.database import JournalLocked
from asyncrl.journal.segments import CHECKSUM_BYTES, DamagedError
from asyncrl.journal.tables import SCHEMA, BeatRow, Change, GroupRow, PayloadRef

WRITER = """
import os, sys
from pathlib import Path
from asyncrl.journal import Journal
from asyncrl.journal.tables import Change
sys.path.insert(0, "tests")
from test_journal import payload_of, row

journal = Journal(Path(sys.argv[1]), segment_bytes=100_000)
number = len(journal.stored.groups)
while True:
    written = []
    for number in range(number, number + 5):
        ref = journal.append(payload_of(number))
        written.append(journal.write(Change(groups=(row(number, ref=ref),))))
    for done in written:
        done.result()
    number += 1
    print(number, flush=True)
"""


def payload_of(number: int) -> bytes:
    return number.to_bytes(8, "little") * (100 + number % 900)


def row(
    number: int, *, ref: PayloadRef | None = None, state: str = "ready", step: int | None = None
) -> GroupRow:
    segment, offset, length = ref or (None, None, None)
    return GroupRow(
        number=number,
        epoch=0,
        position=number,
        state=state,
        attempt=0,
        strikes=0,
        seed_k=0,
        member="generator-0",
        version=0,
        started=1,
        step=step,
        accepted_attempt=0,
        segment=segment,
        offset=offset,
        length=length,
        token_versions="{}",
        reason="",
        valid_attempt=0,
        reward=0.5,
        leased_at=1.0,
        finished_at=2.0,
    )


def ref_of(row: GroupRow) -> PayloadRef:
    assert row.segment is not None
    assert row.offset is not None
    assert row.length is not None
    return PayloadRef(row.segment, row.offset, row.length)


def test_a_killed_writer_loses_no_acknowledged_payload(tmp_path: Path) -> None:
    for life in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        first = writer.stdout.readline()
        time.sleep(0.1 + 0.07 * life)
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged = int([first, *writer.stdout.read().splitlines()][-1])
        writer.wait()

        journal = Journal(tmp_path)
        rows = journal.stored.groups
        assert len(rows) >= acknowledged > 0
        assert [row.number for row in rows] == list(range(len(rows)))
        for found in rows:
            assert journal.read(ref_of(found)) == payload_of(found.number)
        journal.close()


def test_rows_replace_those_with_the_same_key(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(Change(groups=(row(0, state="leased"), row(1)), meta={"committed": "1"}))
    journal.write(Change(groups=(row(0, state="filtered"),), meta={"committed": "2"})).result()
    assert fates(tmp_path) == {"filtered": 1, "ready": 1}
    journal.close()
    again = Journal(tmp_path)
    assert again.stored.meta["committed"] == "2"
    assert [row.state for row in again.stored.groups] == ["filtered", "ready"]
    again.close()


def test_segments_go_whole_when_all_their_steps_are_behind_the_oldest_checkpoint(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path, segment_bytes=2 * (50 + CHECKSUM_BYTES))
    for number in range(6):  # two payloads a segment: steps 0 0 | 1 1 | 2 2
        ref = journal.append(bytes(50))
        journal.write(Change(groups=(row(number, ref=ref, state="trained", step=number // 2),)))
    kept = journal.append(bytes(50))  # a segment with a filtered group and one without fate
    waiting = journal.append(bytes(50))
    journal.write(Change(groups=(row(6, ref=kept, state="filtered"), row(7, ref=waiting))))
    journal.append(bytes(50))

    def segments() -> list[str]:
        return sorted(path.name for path in (tmp_path / "segments").iterdir())

    journal.retain(from_step=0, settled=["filtered"]).result()
    assert segments() == ["000001", "000002", "000003", "000004", "000005"]
    journal.retain(from_step=2, settled=["filtered"]).result()
    assert segments() == ["000003", "000004", "000005"]
    journal.write(Change(groups=(row(7, ref=waiting, state="trained", step=3),)))
    journal.retain(from_step=4, settled=["filtered"]).result()
    assert segments() == ["000005"]
    journal.close()
    assert [row.segment for row in Journal(tmp_path).stored.groups] == [None] * 8


def test_a_segment_that_cannot_be_deleted_is_a_warning_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path, segment_bytes=100)
    for number in range(3):
        ref = journal.append(bytes(100))
        journal.write(Change(groups=(row(number, ref=ref, state="trained", step=number),)))
    segments = tmp_path / "segments"
    journal.retain(from_step=0, settled=[]).result()
    (segments / ".nfs01").touch()  # as network file systems leave them
    (segments / "000001").unlink()
    (segments / "000001").mkdir()  # unlink fails
    journal.retain(from_step=2, settled=[]).result(timeout=5)
    assert sorted(path.name for path in segments.iterdir()) == [".nfs01", "000001", "000003"]
    assert "000001" in caplog.text
    (segments / "000001").rmdir()
    (segments / "000001").touch()
    journal.retain(from_step=2, settled=[]).result(timeout=5)
    journal.close()
    assert sorted(path.name for path in segments.iterdir()) == [".nfs01", "000003"]
    Journal(tmp_path).close()


def test_a_future_that_nobody_waits_for_does_not_stop_the_writer(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for number in range(200):
        journal.write(Change(groups=(row(number),))).cancel()
    journal.write(Change(groups=(row(200),))).result(timeout=5)
    journal.close()
    assert fates(tmp_path) == {"ready": 201}


def test_a_second_writer_and_another_schema_are_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(ValueError, match="another buffer has the journal"):
        Journal(tmp_path)
    journal.close()
    database = sqlite3.connect(tmp_path / "journal.sqlite")
    database.execute("UPDATE meta SET value='99' WHERE key='schema'")
    database.commit()
    database.close()
    with pytest.raises(ValueError, match=f"has schema 99, this program reads {SCHEMA}"):
        Journal(tmp_path)


def test_a_failed_write_fails_that_future_and_all_later_ones(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    broken = journal.write(Change(groups=(row(0)._replace(state=None),)))  # type: ignore[arg-type]
    with pytest.raises(sqlite3.IntegrityError):
        broken.result(timeout=5)
    with pytest.raises(sqlite3.IntegrityError):
        journal.write(Change(groups=(row(1),))).result(timeout=5)
    journal.close()
    assert fates(tmp_path) == {}


def test_fates_of_a_directory_without_journal_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no journal at"):
        fates(tmp_path)


def test_a_journal_of_another_schema_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        database.execute("INSERT INTO meta VALUES('schema', '2')")
        database.commit()
    with pytest.raises(ValueError, match=f"has schema 2, this program reads {SCHEMA}"):
        Journal(tmp_path)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall() == [
            ("meta",)
        ]


def test_anybody_reads_beside_the_writer_whatever_the_directory_is_called(tmp_path: Path) -> None:
    run_dir = tmp_path / "a run? 100% #1"
    run_dir.mkdir()
    journal = Journal(run_dir)
    journal.write(Change(groups=(row(0),))).result(timeout=5)
    with closing(open_read_only(run_dir)) as reader:
        assert reader.execute("SELECT reward FROM groups").fetchall() == [(0.5,)]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.execute("DELETE FROM groups")
        journal.write(Change(groups=(row(1),))).result(timeout=5)
        assert len(reader.execute("SELECT * FROM groups").fetchall()) == 2
    journal.close()


def test_a_finished_run_is_read_where_nobody_may_write() -> None:
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name)
        journal = Journal(run_dir)
        journal.write(Change(groups=(row(0),))).result(timeout=5)
        journal.close()
        run_dir.chmod(0o555)
        assert not [*run_dir.glob("journal.sqlite-*")]
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                if os.geteuid() == 0:
                    os.setuid(65534)  # root may write everywhere
                code = 0 if fates(run_dir) == {"ready": 1} else 2
            os._exit(code)
        _, status = os.waitpid(child, 0)
        run_dir.chmod(0o755)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_program_that_locks_the_database_for_too_long_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.journal.database.LOCKED_S", 0.2)
    journal = Journal(tmp_path)
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as other:
        other.execute("BEGIN IMMEDIATE")
        write = journal.write(Change(groups=(row(0),)))
        with pytest.raises(JournalLocked, match="another program has .* locked for 0.2 s: end it"):
            write.result(timeout=5)
        other.rollback()
    journal.close()


def beat(number: int, member: str, state: str = "generating") -> BeatRow:
    return BeatRow(float(number), member, "generator", state, "{}", number, 0)


def test_many_heartbeats_are_thinned_out_evenly_and_ends_stay(tmp_path: Path) -> None:
    beats = [beat(n, f"generator-{n % 2}") for n in range(2000)]
    beats[700] = beat(700, "generator-0", "dead")
    for part in (beats[:900], beats[900:]):
        journal = Journal(tmp_path, max_beats=100)
        for row in part:
            journal.write(Change(beats=(row,))).result(timeout=5)
        journal.close()
    with closing(open_read_only(tmp_path)) as database:
        left = [BeatRow._make(found) for found in database.execute("SELECT * FROM beats")]
    assert 50 <= len(left) <= 100
    assert {beats[0], beats[1], beats[700], beats[1998], beats[1999]} <= set(left)
    for member in ("generator-0", "generator-1"):
        times = sorted(row.at for row in left if row.member == member)
        gaps = [after - before for before, after in pairwise(times)]
        assert max(gaps) <= 8 * 2000 / len(left)


def test_a_process_of_few_heartbeats_keeps_them_however_many_there_are(tmp_path: Path) -> None:
    beats = [beat(n, f"generator-{n // 2}") for n in range(300)]
    journal = Journal(tmp_path, max_beats=100)
    for row in beats:
        journal.write(Change(beats=(row,))).result(timeout=5)
    journal.close()
    with closing(open_read_only(tmp_path)) as database:
        assert database.execute("SELECT COUNT(*) FROM beats").fetchone() == (300,)


def test_rows_that_sqlite_cannot_hold_fail_their_future_and_do_not_hang_the_writer(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path)
    broken = journal.write(Change(groups=(row(0)._replace(position=1 << 70),)))
    with pytest.raises(OverflowError):
        broken.result(timeout=5)
    journal.close()


def test_a_payload_that_is_not_read_soon_takes_no_memory_and_can_be_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    ref = journal.append(b"seldom", is_read_soon=False)
    other = journal.append(b"soon")
    journal.write(Change(groups=(row(0, ref=ref), row(1, ref=other)))).result(timeout=5)
    assert journal.read(ref) == b"seldom"
    (tmp_path / "segments" / "000001").unlink()
    with pytest.raises(DamagedError, match="segments/000001 is not there"):
        journal.read(ref)
    assert journal.read(other) == b"soon"
    with pytest.raises(DamagedError, match="segments/000001 is not there"):
        journal.read(other)  # kept for the first time alone
    journal.close()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: data[:104] + b"x" + data[105:], "is damaged: the 10 bytes from byte 104 on"),
        (lambda data: data[:114] + b"x" + data[115:], "is damaged: the 10 bytes from byte 104 on"),
        (lambda data: data[:110], "is cut: it ends at byte 110, before"),
        (lambda data: data[:117], "is cut: it ends at byte 117, before the end of the 10 bytes"),
        (lambda data: b"", "is cut: it ends at byte 0, before"),
    ],
)
def test_a_payload_that_is_not_as_it_was_written_is_named_and_the_others_are_read(
    tmp_path: Path, damage: Callable[[bytes], bytes], told: str
) -> None:
    journal = Journal(tmp_path)
    refs = [journal.append(data, is_read_soon=False) for data in (bytes(100), b"p" * 10, b"")]
    journal.write(Change()).result(timeout=5)
    assert refs == [(1, 0, 100), (1, 104, 10), (1, 118, 0)]
    assert [journal.read(ref) for ref in refs] == [bytes(100), b"p" * 10, b""]
    segment = tmp_path / "segments" / "000001"
    whole = segment.read_bytes()
    assert len(whole) == journal.num_bytes == 110 + 3 * CHECKSUM_BYTES
    assert whole[114:118] == zlib.crc32(b"p" * 10).to_bytes(4, "little")
    segment.write_bytes(damage(whole))
    with pytest.raises(DamagedError, match=f"segments/000001 {told}"):
        journal.read(refs[1])
    if damage(whole):
        assert journal.read(refs[0]) == bytes(100)
    journal.close()


def test_a_segment_stays_as_long_as_the_row_of_a_payload_in_it_has_yet_to_come(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path, segment_bytes=100)
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as other:
        other.execute("BEGIN IMMEDIATE")  # a transaction of the writer is on its way for as long
        journal.write(Change(meta={"position": "1"}))
        ref = journal.append(b"p" * 90, is_read_soon=False)
        retained = journal.retain(from_step=9, settled=["filtered"])
        journal.append(b"q" * 90, is_read_soon=False)  # opens the next segment
        other.rollback()
    retained.result(timeout=5)
    journal.write(Change(groups=(row(0, ref=ref),))).result(timeout=5)
    assert journal.read(ref) == b"p" * 90
    journal.retain(from_step=9, settled=["ready"]).result(timeout=5)
    assert journal.num_bytes == 90 + CHECKSUM_BYTES
    journal.close()

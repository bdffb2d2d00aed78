"""The file under the records: locks, ends of lines, full disks, deaths."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tvm_fusion.errors import DatabaseError
from tvm_fusion.tuning.journal import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "lines")


def test_reads_only_what_is_new(journal: Journal) -> None:
    assert journal.read() == ([], b"", False)
    other = Journal(journal.path)
    other.append(['["a"]', '["b"]'])
    assert journal.read() == ([b'["a"]', b'["b"]'], b"", True)
    assert journal.read() == ([], b"", False)
    other.append(['["c"]'])
    assert journal.read() == ([b'["c"]'], b"", False)


def test_a_file_that_was_replaced_is_read_from_its_beginning(journal: Journal) -> None:
    journal.append(["[1]", "[2]"])
    journal.read()
    Journal(journal.path).rewrite(lambda lines: lines[1:])
    assert journal.read() == ([b"[2]"], b"", True)
    assert not list(journal.path.parent.glob(".*"))


def test_a_torn_tail_is_no_line_and_goes_with_the_next_append(journal: Journal) -> None:
    journal.path.write_bytes(b'{"a":1}\n{"b":')
    assert journal.read() == ([b'{"a":1}'], b'{"b":', True)
    journal.append(['{"c":1}'])
    assert journal.path.read_bytes() == b'{"a":1}\n{"c":1}\n'
    assert journal.read().lines == [b'{"c":1}']


def test_a_whole_line_without_its_end_gets_one(journal: Journal) -> None:
    journal.path.write_bytes(b'{"a":1}\n{"b":1}')
    assert journal.read().tail == b'{"b":1}'
    journal.append(['{"c":1}'])
    assert journal.path.read_bytes() == b'{"a":1}\n{"b":1}\n{"c":1}\n'
    assert journal.read().lines == [b'{"b":1}', b'{"c":1}']


def test_nothing_lies_between_reading_and_appending(journal: Journal) -> None:
    journal.append(["[0]"])
    journal.read()
    Journal(journal.path).append(["[1]"])
    seen = []
    journal.update(lambda news: seen.extend(news.lines) or ["[2]"])
    assert seen == [b"[1]"]
    assert journal.path.read_text() == "[0]\n[1]\n[2]\n"


def test_a_rewrite_that_fails_changes_nothing(journal: Journal, monkeypatch) -> None:
    journal.append(["[1]", "[2]"])

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DatabaseError, match="Input/output error"):
        journal.rewrite(lambda lines: [])
    assert os.listdir(journal.path.parent) == ["lines"]
    assert journal.path.read_text() == "[1]\n[2]\n"


def test_a_rewrite_drops_a_torn_tail_and_keeps_a_whole_one(journal: Journal) -> None:
    assert not journal.rewrite(lambda lines: lines)
    assert not journal.path.exists()
    for tail, kept in ((b'{"b"', b""), (b"[2]", b"[2]\n")):
        journal.path.write_bytes(b"[1]\n" + tail)
        assert journal.rewrite(lambda lines: lines) is (tail == b'{"b"')
        assert journal.path.read_bytes() == b"[1]\n" + kept


def short_writes(monkeypatch, room: int, error: int = errno.ENOSPC):
    """Let ``os.write`` take so many bytes in all, a part of the last line among them."""
    real, left = os.write, [room]

    def write(fd: int, data: bytes) -> int:
        if left[0] == 0:
            raise OSError(error, os.strerror(error))
        count = real(fd, data[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("room", [0, 1, 7, 8, 12])
def test_a_full_disk_leaves_no_part_of_a_line(journal: Journal, monkeypatch, room: int) -> None:
    journal.append(["[0]"])
    with monkeypatch.context() as patch:
        short_writes(patch, room)
        with pytest.raises(
            DatabaseError, match=r"cannot write .*lines: No space left on device; make room, "
        ):
            journal.append(["[11111]", "[22222]"])
    assert journal.path.read_bytes() == b"[0]\n"
    journal.append(["[3]"])
    assert journal.path.read_bytes() == b"[0]\n[3]\n"


def test_an_interrupt_leaves_no_part_of_a_line(journal: Journal, monkeypatch) -> None:
    real = os.write

    def write(fd: int, data: bytes) -> int:
        real(fd, data[:2])
        raise KeyboardInterrupt

    journal.append(["[0]"])
    monkeypatch.setattr(os, "write", write)
    with pytest.raises(KeyboardInterrupt):
        journal.append(["[11111]"])
    assert journal.path.read_bytes() == b"[0]\n"


FILE_LIMIT = """
import resource, sys
from pathlib import Path
from tvm_fusion.errors import DatabaseError
from tvm_fusion.tuning.journal import Journal

resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
journal = Journal(Path(sys.argv[1]))
written = 0
try:
    while True:
        journal.append(['["' + "x" * 28 + '"]'])
        written += 1
except DatabaseError as error:
    print(written, error)
"""


def test_a_file_that_may_not_grow(journal: Journal) -> None:
    """The kernel itself cuts the write short: 100 bytes hold three lines of 33 and a byte."""
    done = subprocess.run(
        [sys.executable, "-c", FILE_LIMIT, journal.path], capture_output=True, text=True
    )
    told = "File too large; make room, or name another work dir"
    assert done.stdout == f"3 cannot write {journal.path}: {told}\n", done.stderr
    assert journal.path.stat().st_size == 99


WRITER = """
import sys
from pathlib import Path
from tvm_fusion.tuning.journal import Journal

journal = Journal(Path(sys.argv[1]))
for number in range(500):
    journal.append([f'{{"who":"{sys.argv[2]}","number":{number},"more":"{"x" * (number % 97)}"}}'])
"""


def test_two_processes_lose_and_tear_nothing(journal: Journal) -> None:
    """While a third one rewrites the file again and again."""
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, journal.path, who]) for who in "ab"]
    while any(writer.poll() is None for writer in writers):
        Journal(journal.path).rewrite(lambda lines: lines)
        time.sleep(0.005)
    assert [writer.returncode for writer in writers] == [0, 0]
    expected = {
        f'{{"who":"{who}","number":{n},"more":"{"x" * (n % 97)}"}}'.encode()
        for who in "ab"
        for n in range(500)
    }
    lines = journal.read().lines
    assert len(lines) == 1000 and set(lines) == expected


def test_a_killed_writer_leaves_at_most_one_torn_line(journal: Journal) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, journal.path, "a"])
    while not journal.path.exists() or journal.path.stat().st_size < 500:
        time.sleep(0.002)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    journal.append(["[]"])
    content = journal.path.read_bytes()
    assert content.endswith(b"}\n[]\n")
    assert [line.count(b"{") for line in content.splitlines()[:-1]] == [1] * (
        content.count(b"\n") - 1
    )


def test_threads_wait_for_each_other(journal: Journal) -> None:
    def work(who: int) -> None:
        for number in range(50):
            Journal(journal.path).append([f"[{who},{number}]"])

    threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(journal.read().lines)) == 200


def test_what_cannot_be_opened_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    folder = Journal(tmp_path)
    for use in (folder.read, lambda: folder.append(["[]"]), lambda: folder.rewrite(list)):
        with pytest.raises(
            DatabaseError,
            match=r"cannot (read|write) .*: Is a directory(; name another work dir)?$",
        ):
            use()

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    # The tests may run as root, whom no permission stops.
    monkeypatch.setattr(os, "open", refuse)
    file = Journal(tmp_path / "lines")
    for use in (file.read, lambda: file.append(["[]"])):
        with pytest.raises(
            DatabaseError,
            match=r"cannot (read|write) .*: Permission denied(; make it writable, .*)?$",
        ):
            use()

"""Atomic files, strict documents, locks and record logs."""

from __future__ import annotations

import errno
import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from advbayes.store import (
    DiskFullError,
    Lock,
    LockedError,
    MissingError,
    NotWritableError,
    RecordLog,
    StoreError,
    claim,
    files,
    read_document,
    write_bytes,
    write_document,
)
from advbayes.store import documents as strict
from advbayes.store.files import read_bytes
from tests import faults, forking

# Atomic files


def full_disk(monkeypatch: pytest.MonkeyPatch, call: str, error: int = errno.ENOSPC) -> None:
    def refuse(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, call, refuse)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    write_bytes(tmp_path / "a", b"old")
    with monkeypatch.context() as patch:
        full_disk(patch, call, error)
        with pytest.raises(
            DiskFullError, match=r"a: wanted 1000 bytes of disk, got \d+ bytes free"
        ) as caught:
            write_bytes(tmp_path / "a", 1000 * b"x")
    assert caught.value.errno == errno.ENOSPC
    assert isinstance(caught.value, OSError)
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_another_fault_of_the_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, "write", errno.EFBIG)
    with pytest.raises(OSError, match=r"File too large: '.*/a'"):
        write_bytes(tmp_path / "a", b"x")


def test_no_room_is_known_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))  # type: ignore[attr-defined]
    full_disk(monkeypatch, "open")
    with pytest.raises(DiskFullError, match="wanted 11 bytes of disk, got 10 bytes free"):
        write_bytes(tmp_path / "a", 11 * b"x")


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_place_where_nothing_may_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    full_disk(monkeypatch, "open", error)
    words = rf"{tmp_path}/a: wanted a place to write to, got {os.strerror(error)}"
    for write in (lambda path: write_bytes(path, b"x"), faults.small_bundle):
        with pytest.raises(NotWritableError, match=words) as caught:
            write(tmp_path / "a")
        assert isinstance(caught.value, PermissionError)


def test_too_many_open_files_end_a_save_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(monkeypatch, "open", errno.EMFILE)
    for name in ("a", "a.advbayes"):
        with pytest.raises(OSError, match="Too many open files"):
            faults.small_bundle(tmp_path / name)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o027, 0o077])
def test_who_may_read_what_is_written_is_for_the_umask_to_say(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        for _ in range(2):  # new, then over what is there
            write_bytes(tmp_path / "bytes", b"x")
            write_document(tmp_path / "document.json", {"a": 1})
            faults.small_bundle(tmp_path / "one.advbayes")
            faults.small_bundle(tmp_path / "folder")
            RecordLog(tmp_path / "log.jsonl").append({"a": 1})
    finally:
        os.umask(before)
    written = list(tmp_path.rglob("*"))
    assert len(written) > 8
    for path in written:
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert path.stat().st_mode & 0o777 == wanted, path


def test_other_errors_pass_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, "write", errno.EIO)
    with pytest.raises(OSError, match="Input/output") as caught:
        write_bytes(tmp_path / "a", b"x")
    assert not isinstance(caught.value, StoreError)
    assert not os.listdir(tmp_path)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: whole(descriptor, data[:7]))
    write_bytes(tmp_path / "a", bytes(range(100)))
    assert (tmp_path / "a").read_bytes() == bytes(range(100))


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "a")
    write_bytes(tmp_path / "link", b"x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "a").read_bytes() == b"x"


def test_leftovers_of_the_dead_only(tmp_path: Path) -> None:
    names = {
        ".a.0123456789abcdef.tmp": False,
        ".a.12-00000000-0x0-00000000.tmp": False,  # as an earlier version named them
        ".b.0123456789abcdef.tmp": True,  # of another file
        ".a.0123456789abcdef.tmpx": True,
        ".a.tmp": True,
    }
    for name in names:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / ".a.1111111111111111.tmp").mkdir()
    with (
        files.staged(tmp_path / "a") as living,
        files.staged(tmp_path / "a", folder=True) as folder,
    ):
        write_bytes(tmp_path / "a", b"x")
        stay = {name for name, stays in names.items() if stays}
        assert set(os.listdir(tmp_path)) == {"a", living.name, folder.name, *stay}
    assert set(os.listdir(tmp_path)) == {"a", *stay}


def test_a_writer_whose_name_was_swept_takes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, swept = os.close, []

    def sweeping(descriptor: int) -> None:
        close(descriptor)
        if not swept:  # the moment between making the name and locking it
            swept.append(True)
            files.sweep(tmp_path / "a")

    monkeypatch.setattr(os, "close", sweeping)
    write_bytes(tmp_path / "a", b"x")
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"x"


def test_without_locks_files_are_written_and_nothing_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".a.0123456789abcdef.tmp").touch()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    write_bytes(tmp_path / "a", b"x")
    assert sorted(os.listdir(tmp_path)) == [".a.0123456789abcdef.tmp", "a"]


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="absent: wanted a folder to write to"):
        write_bytes(tmp_path / "absent" / "a", b"x")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        StoreError, match="link: wanted a readable regular file, got a symbolic link"
    ):
        read_bytes(tmp_path / "link", limit=10)
    with pytest.raises(StoreError, match="pipe: wanted a regular file, got p"):
        read_bytes(tmp_path / "pipe", limit=10)
    with pytest.raises(StoreError, match="wanted a regular file, got d"):
        read_bytes(tmp_path, limit=10)


# Documents


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"\xff", "JSON"),
        (b"\xef\xbb\xbf{}", "JSON"),
        (b"{'a': 1}", "JSON"),
        (b"1" * 5000, "JSON"),
        (b"9223372036854775808", "64 bits"),
        (b"NaN", "finite"),
        (b"[1, -Infinity]", "finite"),
        (b"1e999", "finite"),
        (b'{"a": {"b": 1, "b": 1}}', "each key once"),
        (b'"\\ud800"', "Unicode"),
        (b'{"\\ud800": 1}', "Unicode"),
        (b"[" * 100 + b"]" * 100, "32 deep"),
        (b"[" * 100_000, "32 deep"),
        (b" " * (2 << 20) + b"1", "at most 2097152 bytes"),
        (b"{} {}", "JSON"),
        (b"!!python/object/apply:os.system [id]", "JSON"),
    ],
)
def test_documents_refused(data: bytes, wanted: str) -> None:
    with pytest.raises(StoreError, match=rf"x\.json.*: wanted .*{wanted}"):
        strict.decode(data, "x.json")


@pytest.mark.parametrize(
    "value", [{1: 2}, {"a": {1}}, {"a": b"x"}, {"a": object()}, {"a": float("inf")}, {"a": 2**63}]
)
def test_documents_that_are_not_written(value: object) -> None:
    with pytest.raises(StoreError, match=r"^x"):
        strict.encode(value, "x")


def test_a_document_too_large_to_read_is_not_written() -> None:
    with pytest.raises(StoreError, match="at most 2097152 bytes"):
        strict.encode("x" * (2 << 20), "x")


def test_document_round_trip(tmp_path: Path) -> None:
    document = {"b": [1, 2.5, 1e-300, -0.0, None, True, "é\n\0"], "a": {"": {}}, "c": 2**63 - 1}
    write_document(tmp_path / "d.json", document)
    assert read_document(tmp_path / "d.json") == document
    assert strict.encode(document) == strict.encode(dict(reversed(document.items())))


def test_no_number_of_a_document_changes_unnoticed(tmp_path: Path) -> None:
    path, document = tmp_path / "audit.json", {"accuracy": 0.25, "level": "B"}
    write_document(path, document)
    data = path.read_bytes()
    assert json.loads(data).keys() == {"accuracy", "level", "sha256"}  # any reader of JSON can
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        renamed = data.index(b"sha256") <= bit // 8 < data.index(b"sha256") + 6
        with suppress(StoreError) if renamed else pytest.raises(StoreError, match=r"audit\.json"):
            read = read_document(path)
            assert isinstance(read, dict)
            assert {key: read.get(key) for key in document} == document  # no other number
    for size in range(len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(StoreError, match="audit"):
            read_document(path)


def test_documents_with_and_without_a_seal(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    for plain in ([1, 2], {}, "text"):  # only what has fields is sealed
        write_document(path, plain)
        assert path.read_bytes() == strict.encode(plain)
        assert read_document(path) == plain
    path.write_text('{"accuracy": 0.25}')  # as earlier versions wrote them
    assert read_document(path) == {"accuracy": 0.25}
    with pytest.raises(StoreError, match="other names than sha256"):
        write_document(path, {"sha256": "x"})
    write_document(path, {"accuracy": 0.25})
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "accuracy": 0.5}))
    with pytest.raises(StoreError, match="ends in its own SHA-256, got another end"):
        read_document(path)
    largest = {"": "x" * (strict.MAX_BYTES - len(strict.encode({"": ""})))}
    write_document(path, largest)
    assert read_document(path) == largest


# Locks


def test_lock_says_who(tmp_path: Path) -> None:
    host = platform.node()
    with Lock(tmp_path) as lock:
        assert json.loads(lock.path.read_text()) == {"pid": os.getpid(), "host": host}
        with (
            pytest.raises(LockedError, match=f"pid {os.getpid()} on host {host}") as caught,
            Lock(tmp_path),
        ):
            pass
        assert (caught.value.pid, caught.value.host) == (os.getpid(), host)
        for content, shown in (
            (b'{"pid": 7, "host": "\\u001b[2J"}', r"pid 7 on host \\x1b\[2J"),
            (b"\xff[", "pid 0"),
        ):
            lock.path.write_bytes(content)
            with pytest.raises(LockedError, match=shown) as caught, Lock(tmp_path):
                pass
            assert str(caught.value).isprintable()
    assert not os.listdir(tmp_path)
    with Lock(tmp_path):
        pass


def test_lock_is_released_by_an_exception(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Lock(tmp_path):
        raise RuntimeError
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_lock_on_a_full_disk_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(number, "no room")

    monkeypatch.setattr("filelock.FileLock.acquire", full)
    with pytest.raises(DiskFullError, match=r"\.lock: wanted 4096 bytes of disk"), Lock(tmp_path):
        pass


def test_lock_needs_a_folder(tmp_path: Path) -> None:
    with (
        pytest.raises(MissingError, match="absent: wanted a folder to lock"),
        Lock(tmp_path / "absent"),
    ):
        pass


@pytest.mark.parametrize(
    "content", [b"", b'{"pid": 1', b"[" * 4000, b"null", b'{"pid": 1, "host": "alpha"}']
)
def test_the_lock_of_a_dead_process_is_taken(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".lock").write_bytes(content)
    with Lock(tmp_path) as lock:
        assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/null", path)],
    ids=["pipe", "folder", "link"],
)
def test_what_is_no_lock_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / ".lock")
    with (
        pytest.raises(StoreError, match=r"\.lock: wanted a lock file, got [pdl]r"),
        Lock(tmp_path, wait=60),
    ):
        pass


def test_a_forked_child_leaves_its_parents_lock_alone(tmp_path: Path) -> None:
    with Lock(tmp_path) as lock:
        assert faults.forked(lambda: lock.__exit__(None, None, None)) == 0
        assert lock.path.exists()
        with pytest.raises(LockedError), Lock(tmp_path):
            pass


def test_lock_waits(tmp_path: Path) -> None:
    program = (
        f"import time; from advbayes.store import Lock\nwith Lock({str(tmp_path)!r}): "
        "print(flush=True); time.sleep(0.3)"
    )
    reads, writes = os.pipe()
    child = forking.start(program, writes, 2)
    os.close(writes)
    with open(reads) as output, forking.limited(child):
        output.readline()
        with pytest.raises(LockedError, match=f"pid {child} "), Lock(tmp_path):
            pass
        with Lock(tmp_path, wait=20):
            pass
        assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(ValueError, match="wait must be"):
        Lock(tmp_path, wait=-1)


def test_claim_never_gives_a_folder_twice(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file in the way")
    assert Path(claim(tmp_path / "run").folder).name == "run-2"
    with pytest.raises(MissingError, match="absent"):
        claim(tmp_path / "absent" / "run")


# Record logs


def filled(path: Path, num: int = 5) -> bytes:
    log = RecordLog(path)
    log.append(*({"step": step, "loss": 1 / (step + 1)} for step in range(num)))
    return path.read_bytes()


def test_log_is_json_lines_and_goes_on(tmp_path: Path) -> None:
    filled(tmp_path / "log", 3)
    again = RecordLog(tmp_path / "log")
    again.append({"step": 3})
    again.append({"step": 4}, {"step": 5})
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(6))
    assert [record["step"] for record in again.read()] == list(range(6))


def test_every_torn_tail_is_dropped(tmp_path: Path) -> None:
    data = filled(tmp_path / "log")
    ends = [0, *(index + 1 for index, byte in enumerate(data) if byte == 10)]
    for size in range(len(data)):
        whole = max(index for index, end in enumerate(ends) if end <= size)
        (tmp_path / "log").write_bytes(data[:size])
        assert len(RecordLog(tmp_path / "log").read()) == whole
    RecordLog(tmp_path / "log").append({"step": 4})
    assert [record["step"] for record in RecordLog(tmp_path / "log").read()] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("start", range(6))
def test_blocks_that_never_reached_the_disk_are_dropped(tmp_path: Path, start: int) -> None:
    data = filled(tmp_path / "log", 60)
    ends = [0, *(index + 1 for index, byte in enumerate(data) if byte == 10)]
    synced = ends[7 * start]  # all after this was one append, some blocks of which are lost
    for block in range(synced // 512, len(data) // 512 + 1):
        first, last = max(synced, 512 * block), min(len(data), 512 * (block + 1))
        (tmp_path / "log").write_bytes(data[:first] + bytes(last - first) + data[last:])
        assert len(RecordLog(tmp_path / "log").read()) == sum(end <= first for end in ends) - 1


def test_every_bit_flip_is_refused_and_located(tmp_path: Path) -> None:
    data = filled(tmp_path / "log", 3)
    for bit in range(8 * (len(data) - 1)):  # without the last newline the line is a torn one
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "log").write_bytes(damaged)
        line = data[: bit // 8].count(b"\n") + 1
        with pytest.raises(StoreError, match=rf"log:{line}: wanted a record that continues"):
            RecordLog(tmp_path / "log").read()


def test_a_damaged_line_before_a_torn_one_is_refused(tmp_path: Path) -> None:
    data = filled(tmp_path / "log", 40)
    torn = data[: len(data) // 512 * 512] + bytes(512) + b"}\n"  # one block was lost
    (tmp_path / "log").write_bytes(torn)
    assert 4 < len(RecordLog(tmp_path / "log").read()) < 40
    (tmp_path / "log").write_bytes(torn.replace(b'"step": 3,', b'"step": 8,'))
    with pytest.raises(StoreError, match="log:4: wanted a record that continues"):
        RecordLog(tmp_path / "log").read()


def test_lost_and_swapped_lines_are_refused(tmp_path: Path) -> None:
    lines = filled(tmp_path / "log").splitlines(keepends=True)
    for wrong in (
        lines[1:],
        lines[:1] + lines[2:],
        [lines[1], lines[0], *lines[2:]],
        [lines[0], *lines],
    ):
        (tmp_path / "log").write_bytes(b"".join(wrong))
        with pytest.raises(StoreError, match="misplaced"):
            RecordLog(tmp_path / "log").append({"step": 5})


def test_keep(tmp_path: Path) -> None:
    data = filled(tmp_path / "log")
    log = RecordLog(tmp_path / "log")
    with pytest.raises(StoreError, match="wanted 6 records, got 5"):
        log.keep(6)
    log.keep(3)
    log.append({"step": 3, "loss": 1 / 4}, {"step": 4, "loss": 1 / 5})
    assert (
        tmp_path / "log"
    ).read_bytes() == data  # what a resumed run writes is what an uninterrupted one wrote
    log.keep(0)
    assert (tmp_path / "log").read_bytes() == b""


def test_nan_is_never_logged(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "log")
    log.append({"loss": 1.0})
    with pytest.raises(StoreError, match=r"log\.loss: wanted a finite number, got nan"):
        log.append({"loss": 2.0}, {"loss": float("nan")})
    for record in ({}, {"check": 1}):
        with pytest.raises(StoreError, match="wanted a record with fields"):
            log.append(record)
    assert log.read() == [{"loss": 1.0}]


def test_full_disk_leaves_whole_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RecordLog(tmp_path / "log")
    log.append({"step": 0})
    whole = os.write

    def torn(descriptor: int, data: memoryview) -> int:
        whole(descriptor, data[:5])
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", torn)
        with pytest.raises(DiskFullError):
            log.append({"step": 1})
    assert (tmp_path / "log").read_bytes().endswith(b"}\n")
    log.append({"step": 1})
    assert log.read() == [{"step": 0}, {"step": 1}]


def test_no_log_is_an_empty_one(tmp_path: Path) -> None:
    assert RecordLog(tmp_path / "log").read() == []
    RecordLog(tmp_path / "log").keep(None)
    assert not os.listdir(tmp_path)

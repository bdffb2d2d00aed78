"""Work dirs and their trials: every fault that a disk, a user or another process can bring."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tvm

from tvm_fusion.errors import DatabaseError, FusionError
from tvm_fusion.targets import parse_target
from tvm_fusion.testing.trials import trial
from tvm_fusion.tuning.journal import Journal
from tvm_fusion.tuning.trials import Trial
from tvm_fusion.tuning.work_dir import Records, WorkDir, dtype_policy, record_arch


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trials.jsonl"


def test_layout(tmp_path: Path) -> None:
    work = WorkDir(tmp_path / "new" / "work")
    work.open("sm_90a", "float16").add(trial())
    folder = tmp_path / "new" / "work" / f"sm_90-float16-tvm{tvm.__version__}"
    assert [path.name for path in folder.iterdir()] == ["trials.jsonl"]
    (place,) = work.places()
    assert place == work.place("sm_90", "float16")
    assert (place.folder, place.arch, place.dtype_policy) == (folder, "sm_90", "float16")
    assert list(place.records()) == [trial()]


def test_archs_dtypes_and_versions_are_apart(tmp_path: Path) -> None:
    work = WorkDir(tmp_path)
    work.open("sm_90", "float16").add(trial())
    for other in (("sm_80", "float16"), ("sm_90", "float32")):
        assert not len(work.open(*other))
    assert not len(work.place("sm_90", "float16", "0.99.0").records())
    assert len(work.open("sm_90a", "float16")) == 1
    assert [place.arch for place in work.places()] == ["sm_80", "sm_90", "sm_90"]


@pytest.mark.parametrize(
    ("arch", "policy"),
    [("sm_91", "float16"), ("../sm", "float16"), ("sm_90", ""), ("sm_90", "a/b"), ("", "f")],
)
def test_names_that_would_not_do(tmp_path: Path, arch: str, policy: str) -> None:
    with pytest.raises(ValueError):
        WorkDir(tmp_path).open(arch, policy)
    assert not list(tmp_path.iterdir())


def test_archs_of_targets() -> None:
    assert record_arch(parse_target("cuda:sm_90a").attrs) == "sm_90"
    assert record_arch({"kind": "cuda", "arch": "sm_80"}) == "sm_80"
    assert record_arch({"kind": "llvm", "mtriple": "aarch64-linux-gnu"}) == "aarch64"
    host = record_arch(parse_target("llvm").attrs)
    assert host == tvm.target.codegen.llvm_get_system_triple().split("-")[0]
    # LLVM compiles for this machine where no triple says otherwise.
    assert record_arch({"kind": "llvm", "mcpu": "skylake"}) == host


def test_policies_of_dtypes() -> None:
    assert dtype_policy(["float16", "int64", "float16"]) == "float16"
    assert dtype_policy(["float32", "float16"]) == "float16+float32"
    assert dtype_policy(["bfloat16", "bool"]) == "bfloat16"
    assert dtype_policy(["float32", "tf32", "int64"]) == "float32+tf32"
    assert dtype_policy(["int8", "int32"]) == "int32+int8"
    assert dtype_policy([]) == "none"
    assert WorkDir("w").place("sm_90", dtype_policy(["float32", "float16"])).tvm == tvm.__version__


def test_records_of_another_arch_are_ignored(file: Path) -> None:
    """Also where someone has put the files together by hand."""
    Records(file, "sm_80").add(trial(arch="sm_80", us=1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = Records(file, "sm_90")
    assert not len(records) and records.best("k0") is None
    records.add(trial(us=5.0))
    assert Records(file, "sm_90").best("k0") == trial(us=5.0)
    assert Records(file, "sm_80").best("k0") == trial(arch="sm_80", us=1.0)
    with pytest.raises(ValueError, match="a trial of sm_80 among records of sm_90"):
        records.add(trial(arch="sm_80"))


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (b"garbage\n", "line skipped: 1 damaged"),
        (b"\x00\xff" * 40 + b"\n", "line skipped: 1 damaged"),
        (b'{"schema":9,"anything":1}\n', "line skipped: 1 of a later release"),
        (b'x\n{"schema":2}\n{}\n', "lines skipped: 2 damaged and 1 of a later release"),
        (trial(rows=8).to_line().replace(":8}", ":9}").encode() + b"\n", "line skipped: 1 damaged"),
    ],
)
def test_bad_lines_are_skipped_with_one_warning(file: Path, bad: bytes, told: str) -> None:
    before, after = trial(rows=1), trial(rows=2)
    file.write_bytes(before.to_line().encode() + b"\n" + bad + after.to_line().encode() + b"\n")
    with pytest.warns(UserWarning, match=f"trials.jsonl: {told}$") as caught:
        records = Records(file, "sm_90")
        file.write_bytes(file.read_bytes() + b"more of it\n")
        records.refresh()
    assert len(caught) == 1
    assert list(records) == [before, after]
    # What cannot be read stays, for whoever can read it.
    records.add(trial(rows=3))
    assert bad in file.read_bytes()


def test_blank_lines_are_nothing(file: Path) -> None:
    file.write_text(f"\n{trial().to_line()}\n  \r\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(Records(file, "sm_90")) == [trial()]


def test_killed_while_appending(file: Path) -> None:
    """The torn line is skipped with a warning and goes; the trials before it count."""
    lines = f"{trial(rows=1).to_line()}\n{trial(rows=2).to_line()}\n"
    for size in range(len(trial(rows=1).to_line()) + 2, len(lines) - 1, 37):
        file.write_text(lines[:size])
        with pytest.warns(UserWarning, match="line skipped: 1 damaged"):
            records = Records(file, "sm_90")
        assert list(records) == [trial(rows=1)]
        records.add(trial(rows=3))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert list(Records(file, "sm_90")) == [trial(rows=1), trial(rows=3)]


def test_every_process_sees_what_the_others_add(file: Path) -> None:
    one, two = Records(file, "sm_90"), Records(file, "sm_90")
    one.add(trial(rows=1, us=3.0))
    assert not len(two)
    assert two.refresh() == 1
    two.add(trial(rows=2, us=1.0))
    assert one.refresh() == 1
    assert one.refresh() == 0
    assert one.best("k0") == two.best("k0") == trial(rows=2, us=1.0)


def test_known_trials_are_not_written_again(file: Path) -> None:
    records = Records(file, "sm_90")
    records.add(trial(), trial())
    Records(file, "sm_90").add(trial())
    assert len(file.read_text().splitlines()) == 1
    records.add(trial(date="2026-02-02", us=9.0))
    assert list(Records(file, "sm_90")) == [trial(date="2026-02-02", us=9.0)]


def test_a_full_disk_keeps_trials_in_memory_and_writes_them_later(file: Path, monkeypatch) -> None:
    records = Records(file, "sm_90")
    records.add(trial(rows=1))
    real = os.write

    def write(fd: int, data: bytes) -> int:
        if len(data) > 10:
            return real(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        for rows in (2, 3):
            with pytest.raises(FusionError) as caught:
                records.add(trial(rows=rows, us=1.0 / rows))
    assert str(caught.value) == (
        f"cannot write {file}: No space left on device; make room, or name another work dir; 2 of the 3 trials are in "
        "memory only"
    )
    assert records.best("k0") == trial(rows=3, us=1.0 / 3)
    assert list(Records(file, "sm_90")) == [trial(rows=1)]
    records.add(trial(rows=4))
    assert list(Records(file, "sm_90")) == list(records)
    assert len(records) == 4


TUNER = """
import sys
from pathlib import Path
from tvm_fusion.testing.trials import trial
from tvm_fusion.tuning.work_dir import Records

records = Records(Path(sys.argv[1]), "sm_90")
for number in range(500):
    records.add(trial(kernel=sys.argv[2], rows=number + 1, us=number + 1.0))
    records.refresh()
print(len(records.trials(sys.argv[2])))
"""


def test_two_tuners_at_once(file: Path) -> None:
    tuners = [
        subprocess.Popen([sys.executable, "-c", TUNER, file, kernel], stdout=subprocess.PIPE)
        for kernel in ("a", "b")
    ]
    assert [tuner.communicate()[0] for tuner in tuners] == [b"500\n", b"500\n"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        records = Records(file, "sm_90")
    assert len(file.read_bytes().splitlines()) == 1000
    for kernel in ("a", "b"):
        found = [t.decision for t in records.trials(kernel)]
        assert found == [(("rows", number + 1),) for number in range(500)]
        assert records.best(kernel).microseconds == 1.0


def test_a_file_where_the_work_dir_should_be(tmp_path: Path) -> None:
    (tmp_path / "work").write_text("")
    work = WorkDir(tmp_path / "work")
    with pytest.raises(DatabaseError, match=r"^cannot make work dir .*; name another one$"):
        work.open("sm_90", "float16")
    with pytest.raises(
        DatabaseError, match=r"^cannot read work dir .*: Not a directory; name the folder"
    ):
        work.places()


def test_a_work_dir_that_is_not_writable(tmp_path: Path, monkeypatch) -> None:
    work = WorkDir(tmp_path)
    work.place("sm_90", "float16").folder.mkdir()
    real = os.open

    def refuse(path, flags: int, *rest) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    told = r"^cannot write .*trials.jsonl: Permission denied; make it writable, or name another work dir$"
    with pytest.raises(DatabaseError, match=told):
        work.open("sm_90", "float16")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(DatabaseError, match=r"^cannot make work dir .*: Read-only file system; "):
        work.open("sm_80", "float16")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(DatabaseError, match="Permission denied"):
            WorkDir(tmp_path).open("sm_90", "float16")
    finally:
        tmp_path.chmod(0o755)


def test_a_work_dir_that_only_others_may_write_is_read(tmp_path: Path, monkeypatch) -> None:
    work = WorkDir(tmp_path)
    work.open("sm_90", "float16").add(trial())
    monkeypatch.setattr(Journal, "append", None)
    assert list(work.place("sm_90", "float16").records()) == [trial()]


def test_missing_and_empty_work_dirs(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"cannot read work dir .*: No such file or directory"):
        WorkDir(tmp_path / "none").places()
    with pytest.raises(DatabaseError, match="holds no records; tvm-fusion tune --work-dir makes"):
        WorkDir(tmp_path).places()
    # For tuning, both are where it begins.
    assert not len(WorkDir(tmp_path).open("sm_90", "float16"))
    assert not len(WorkDir(tmp_path / "none").open("sm_90", "float16"))
    assert not len(WorkDir(tmp_path / "never").place("sm_90", "float16").records())


def test_a_trial_of_an_open_schema_stays_when_read_by_name(file: Path) -> None:
    """Lines with names that this release does not know count."""
    line = trial().to_line().replace("{", '{"unknown":[1],', 1)
    file.write_text(line + "\n")
    assert list(Records(file, "sm_90")) == [trial()]
    assert isinstance(next(iter(Records(file, "sm_90"))), Trial)

"""``tvm-fusion db``: list, merge, export and prune."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from tvm_fusion.cli import db, main
from tvm_fusion.testing.trials import trial
from tvm_fusion.tuning.corrections import save_models
from tvm_fusion.tuning.refit import Correction
from tvm_fusion.tuning.work_dir import WorkDir

COMMANDS = {"list": [], "merge": ["-o", "out"], "export": ["-o", "out.jsonl"], "prune": []}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Two kernels on sm_90, the first tried three times."""
    records = WorkDir(tmp_path / "work").open("sm_90", "float16")
    records.add(
        trial("a" * 16, 1, 3.25, operators=("conv2d", "relu")), trial("a" * 16, 2, 1.5),
        trial("a" * 16, 3, None), trial("b" * 16, 1, None),
    )  # fmt: skip
    return tmp_path / "work"


def out(capsys, code: int = 0, *arguments: object) -> str:
    """Run ``tvm-fusion db``; return its stdout, or the one line of its error."""
    assert main(["db", *map(str, arguments)]) == code
    captured = capsys.readouterr()
    if code == 0:
        assert captured.err == ""
        return captured.out
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str, capsys) -> None:
    text = out(capsys, 0, command, "--help")
    assert f"tvm-fusion db {command} " in text and "--debug" in text


def test_help_lists_the_commands(capsys) -> None:
    text = out(capsys, 0, "--help")
    assert all(command in text for command in COMMANDS)
    assert main(["--help"]) == 0
    assert " db " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing command. Try: tvm-fusion db --help"),
        (["no-such"], "No such command 'no-such'. Try: tvm-fusion db --help"),
        (["list"], "Missing argument 'DIR...'. Try: tvm-fusion db list --help"),
        (["merge", "a"], "Missing option '--output'"),
        (["prune", "a", "--keep", "0"], "'--keep'"),
        (["list", "a", "--format", "xml"], "'--format'"),
    ],
)
def test_bad_usage(arguments, message: str, capsys) -> None:
    assert message in out(capsys, 2, *arguments)


@pytest.mark.parametrize("command", COMMANDS)
def test_work_dirs_that_are_none(command: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, told in (
        ("empty", "holds no records"),
        ("none", "No such file or directory"),
        ("file", "Not a directory"),
    ):
        message = out(capsys, 2, command, name, *COMMANDS[command])
        assert message.startswith("tvm-fusion: ") and told in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]


def test_list(work: Path, capsys) -> None:
    text = out(capsys, 0, "list", work, work)
    first, second = (line.split() for line in text.splitlines()[1:])
    version = WorkDir(work).places()[0].tvm
    known = ["sm_90", "float16", version]
    assert first == [*known, "a" * 16, "conv2d", "relu", "matmul", "3", "2", "1.50", "a", "GPU"]
    assert second == [*known, "b" * 16, "–", "1", "0", "–"]


def test_list_as_json(work: Path, capsys) -> None:
    first, second = json.loads(out(capsys, 0, "list", work, "--format", "json"))
    assert first["decision"] == {"rows": 2} and first["best_us"] == 1.5
    assert (first["trials"], first["right"]) == (3, 2)
    assert second["best_us"] is None and second["template"] is None


def test_list_of_damaged_records_warns(work: Path, capsys) -> None:
    file = WorkDir(work).places()[0].folder / "trials.jsonl"
    file.write_text("garbage\n" + file.read_text() + '{"torn')
    assert main(["db", "list", str(work)]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 3
    assert captured.err.endswith("trials.jsonl: lines skipped: 2 damaged\n")
    assert captured.err.startswith("tvm-fusion: warning: ")


def test_merge(work: Path, tmp_path: Path, capsys) -> None:
    other = tmp_path / "other"
    WorkDir(other).open("sm_80", "float16").add(trial(arch="sm_80"))
    both = tmp_path / "both"
    told = f"to {both}\n"
    text = out(capsys, 0, "merge", work, other, "-o", both)
    assert text == f"added 5 trials and 0 records of meta-schedule {told}"
    text = out(capsys, 0, "merge", other, work, "-o", both)
    assert text == f"added 0 trials and 0 records of meta-schedule {told}"
    assert [place.arch for place in WorkDir(both).places()] == ["sm_80", "sm_90"]


def test_export(work: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "sm_90.jsonl"
    assert out(capsys, 0, "export", work, "-o", file) == f"wrote 1 kernel to {file}\n"
    (line,) = map(json.loads, file.read_text().splitlines())
    assert (line["kernel"], line["samples_us"], line["decision"]) == ("a" * 16, [1.5], {"rows": 2})
    assert line["tvm"] == WorkDir(work).places()[0].tvm

    WorkDir(work).open("sm_80", "float16").add(trial(arch="sm_80", us=None))
    message = out(capsys, 2, "export", work, "-o", file)
    assert "there are records of sm_80, sm_90; choose with --arch" in message
    message = out(capsys, 2, "export", work, "-o", file, "--arch", "sm_80")
    assert "no kernel of sm_80 has a time" in message
    assert out(capsys, 0, "export", work, "-o", file, "--arch", "sm_90")
    assert "No such folder" in out(capsys, 2, "export", work, "-o", tmp_path / "no" / "file")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("command", ["export", "report"])
@pytest.mark.parametrize("name", ["trials.jsonl", "models/new.json"])
def test_records_are_not_replaced(work: Path, command: str, name: str, capsys) -> None:
    (folder,) = work.iterdir()
    (folder / "models").mkdir()
    before = (folder / "trials.jsonl").read_bytes()
    assert "is among the records" in out(capsys, 2, command, work, "-o", folder / name)
    assert (folder / "trials.jsonl").read_bytes() == before and not (
        folder / "models/new.json"
    ).exists()


def test_an_export_that_cannot_be_written_names_its_file(
    work: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    """Not the file beside it that takes its place when it is whole."""

    def write_text(file: Path, text: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(file))

    monkeypatch.setattr(db, "write_text", write_text)
    told = out(capsys, 2, "export", work, "-o", tmp_path / "best.jsonl")
    place = f"{tmp_path / 'best.jsonl'}; name a place that can be written to"
    assert told == f"tvm-fusion: Read-only file system: {place}\n"
    assert not list(tmp_path.glob("*.jsonl*"))


def test_prune(work: Path, capsys) -> None:
    (place,) = WorkDir(work).places()
    text = out(capsys, 0, "prune", work)
    assert text == f"{place.folder}: dropped 3 trials and 0 records of meta-schedule\n"
    assert [t.microseconds for t in place.records()] == [1.5]
    assert "dropped 0 trials" in out(capsys, 0, "prune", work, "--keep", "3")
    with (place.folder / "trials.jsonl").open("a") as file:
        file.write("garbage\n{")
    told = "dropped 0 trials, 2 damaged lines and 0 records of meta-schedule"
    assert told in out(capsys, 0, "prune", work)


def test_a_place_without_trials(tmp_path: Path, capsys) -> None:
    """As a run leaves it that was stopped before its first trial."""
    WorkDir(tmp_path / "work").open("sm_90", "float16")
    listed = ["list", tmp_path / "work"]
    assert out(capsys, 0, *listed) == "no trials are on record yet\n"
    assert json.loads(out(capsys, 0, *listed, "--format", "json")) == []
    assert out(capsys, 0, *listed, "--models") == "no cost model was corrected yet\n"
    page = tmp_path / "page.html"
    assert "no trials are on record there yet" in out(
        capsys, 2, "report", tmp_path / "work", "-o", page
    )
    assert "no kernel has a time" in out(capsys, 2, "export", tmp_path / "work", "-o", page)
    assert not page.exists()
    assert "dropped 0 trials" in out(capsys, 0, "prune", tmp_path / "work")


def test_models(work: Path, capsys) -> None:
    assert json.loads(out(capsys, 0, "list", work, "--models", "--format", "json")) == []
    (folder,) = work.iterdir()
    fitted = Correction("matmul", 1.0, 0.9, {"rows": 0.1}, 4, 60, 0.45, 0.52, 0.02)
    save_models(folder, "a GPU", {"matmul": fitted})
    (row,) = json.loads(out(capsys, 0, "list", work, "--models", "--format", "json"))
    assert (row["device"], row["arch"], row["used"]) == ("a GPU", "sm_90", True)
    assert Correction.from_dict(row) == fitted
    header, line = filter(str.strip, out(capsys, 0, "list", work, "--models").splitlines())
    assert "rank correlation" in header and line.split()[-3:] == ["0.45", "0.52", "yes"]
    (folder / "model.json").write_text("{")
    assert main(["db", "list", str(work), "--models"]) == 0
    assert capsys.readouterr().err.count("is ignored") == 1

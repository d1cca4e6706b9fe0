"""The faults of tests/mutants.txt fit the current files; their runner repairs the files that it
breaks."""

from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import COLUMNS, Mutant, applied, kill, options_of, read_results, read_table

PACKAGES = ("cape_plugins", "fairseq_user_dir", "hf_models")
MUTANTS, SETS = read_table(mutants.TABLE.read_text(encoding="utf-8"))


def test_what_is_broken_is_there_once(repo_root: Path) -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
    for mutant in MUTANTS:
        source = (repo_root / mutant.file).read_text(encoding="utf-8")
        broken_source = mutant.broken(source)
        assert broken_source != source
        compile(broken_source, mutant.file, "exec")


def test_every_room_is_broken_somewhere(repo_root: Path) -> None:
    rooms = {
        path.parent.relative_to(repo_root).as_posix()
        for package in PACKAGES
        for path in (repo_root / package).rglob("*.py")
    }
    assert rooms <= {Path(mutant.file).parent.as_posix() for mutant in MUTANTS}


def test_sets_of_tests_are_used_and_have_files(repo_root: Path) -> None:
    assert {mutant.tests for mutant in MUTANTS} == SETS.keys()
    for tests in SETS.values():
        patterns = [word for word in tests.split() if word.startswith("tests/")]
        assert patterns
        for pattern in patterns:
            assert all((repo_root / path).exists() for path in options_of(pattern, repo_root))
            assert options_of(pattern, repo_root), f"{pattern}: no such tests"


def test_a_fault_survives_where_the_tests_pass(tmp_path: Path) -> None:
    """A runner that finds no fault is seen at once; one that calls all of them killed is not."""
    (tmp_path / "broken_here.py").write_text("VALUE = 2\n")
    program = "import broken_here\n\ndef test_value():\n    assert broken_here.VALUE == 2\n"
    (tmp_path / "test_it.py").write_text(program)
    mutant = Mutant("name", "broken_here.py", "all", "2", "1 + 1")
    row = kill(mutant, tmp_path, {"all": "test_it.py"})
    assert (row["result"], row["test"]) == ("SURVIVED", "")
    assert (tmp_path / "broken_here.py").read_text() == "VALUE = 2\n"


def test_an_error_repairs_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("x")
    with pytest.raises(KeyError, match="y"), applied(Mutant("", "a.py", "", "x", "y"), tmp_path):
        raise KeyError(path.read_text())
    assert path.read_text() == "x"


def test_a_kill_that_is_lost_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stored table names what was found before; without it, a survivor is the same every time."""
    before, after = tmp_path / "before.csv", tmp_path / "after.csv"
    names = [mutant.name for mutant in MUTANTS[:3]]

    def run(*options: str, survivor: str) -> int:
        def row(mutant: Mutant, *_: object) -> dict[str, object]:
            result = "SURVIVED" if mutant.name == survivor else "killed"
            values = (mutant.name, mutant.file, result, "tests/test_a.py::test[1, 2]", 3)
            return dict(zip(COLUMNS, values, strict=True))

        monkeypatch.setattr(mutants, "kill", row)
        return mutants.main([*names, "--skip-baseline", *options])

    def copy_of_broken_files(folder: Path) -> None:
        for mutant in MUTANTS[:3]:
            (folder / mutant.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / mutant.file).write_bytes((mutants.ROOT / mutant.file).read_bytes())

    monkeypatch.setattr(mutants, "copy_of_tracked_files", copy_of_broken_files)
    assert run("--table", str(before), survivor=names[0]) == 1
    assert before.read_text().startswith("# commit ")
    assert read_results(before) == dict(zip(names, ("SURVIVED", "killed", "killed"), strict=True))
    compare = ("--compare", str(before), "--table", str(after))
    assert run(*compare, survivor=names[0]) == 0
    assert "0 killed in" in capsys.readouterr().out
    assert run(*compare, survivor=names[2]) == 1
    lost = f"1 killed in {before} and not now\nSURVIVED {names[2]}\n"
    assert capsys.readouterr().out.endswith(lost)
    assert read_results(after)[names[0]] == "killed"


def test_a_mutant_that_did_not_run_is_a_lost_kill(tmp_path: Path) -> None:
    path = tmp_path / "kills.csv"
    rows = [dict.fromkeys(COLUMNS, "") | {"name": name, "result": "killed"} for name in "ab"]
    mutants.write_results(path, "by hand", rows)
    stored = read_results(path)
    assert mutants.lost_kills(stored, {"a": "killed"}, ()) == {"b": "NOT RUN"}
    assert mutants.lost_kills(stored, {"a": "killed"}, ["a"]) == {}


def test_stored_kills_are_of_current_mutants() -> None:
    stored = read_results(mutants.STORED)
    assert stored.keys() <= {mutant.name for mutant in MUTANTS}
    assert "killed" in stored.values()

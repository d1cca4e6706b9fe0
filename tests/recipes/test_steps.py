"""How programs of the recipes end."""

import pytest

from recipes.steps import ChildError, CommandError, progress, run_main, shown_command


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (CommandError("--epochs 0: allowed: at least 1"), 2, "error: --epochs 0: allowed"),
        (NotADirectoryError(20, "Not a directory", "work/data"), 2, "work/data: a file is where"),
        (ChildError("fairseq-train failed"), 1, "error: fairseq-train failed"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_no_traceback_for_what_the_caller_did(error, status, message, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as ended:
        run_main(main)
    assert ended.value.code == status
    assert message in capsys.readouterr().err


def test_a_defect_keeps_its_traceback():
    def main():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_main(main)


def test_shown_commands_name_no_folder_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside, outside = tmp_path / "runs" / "a", "/some/place"
    argv = ["--model", f"cape={inside}/last.pt,{outside}/b/last.pt", "x=runs/*/last.pt"]
    argv += ["--data", outside, "--work", "w", "--ratio", "1/2", "--output", outside]
    assert shown_command("python -m recipes.x", argv) == (
        "python -m recipes.x --model cape=runs/a/last.pt,b/last.pt 'x=runs/*/last.pt' --data place "
        "--ratio 1/2"
    )


def test_progress_is_shown_on_terminals_only(capfd, monkeypatch):
    assert list(progress(range(3), "count", mininterval=0)) == [0, 1, 2]
    assert capfd.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress(title="count", total=2) as bar:
        bar.update()
        bar.refresh()
    assert "count:  50%" in capfd.readouterr().err

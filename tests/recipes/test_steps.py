"""How programs of the recipes end."""

import pytest

from recipes.steps import ChildError, CommandError, run_main


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

"""Proves that ``--user-dir`` accepts both packages: by path from another folder, and after they
have been imported. test_other_trainings.py has the bare name in the repository."""

import re
from argparse import Namespace

import pytest
from fairseq import utils

from tests.support.fairseq_models import ROOT, train_words


@pytest.mark.parametrize("package", ["cape_plugins", "fairseq_user_dir"])
@pytest.mark.parametrize("folder", ["", f"{ROOT}/"])
def test_user_dir_that_has_been_imported_is_taken(folder, package, monkeypatch):
    """Commands import the user directory when they parse, and again when they run."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delattr(utils.import_user_module, "memo", raising=False)
    for _ in range(2):
        utils.import_user_module(Namespace(user_dir=f"{folder}{package}"))


@pytest.mark.slow
def test_real_command_from_elsewhere(run_cli, tmp_path):
    """The command finds both packages by itself: nothing else makes them importable. It knows the
    architecture, and tells in one line that there are no data."""
    words = train_words("no-data", tmp_path, "--user-dir", ROOT / "cape_plugins")
    result = run_cli(*words, cwd=tmp_path, env={"PYTHONPATH": ""}, check=False)
    assert result.returncode == 1
    (line,) = (text for text in result.stderr.splitlines() if "error: " in text)
    assert re.match("fairseq-train: error: .*no-data", line)

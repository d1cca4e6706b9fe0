"""Proves that ``--user-dir`` takes both packages: by bare name in the repository, by path from
elsewhere, and after they have been imported."""

from argparse import Namespace

import pytest
from fairseq import utils

from tests.support.fairseq_models import ROOT, generate_words, lines, train_words

PACKAGES = ("cape_plugins", "fairseq_user_dir")


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("place", ["", f"{ROOT}/"])
def test_user_dir_that_has_been_imported_is_taken(place, package, monkeypatch):
    """Commands import the user directory when they parse, and again when they run."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delattr(utils.import_user_module, "memo", raising=False)
    for _ in range(2):
        utils.import_user_module(Namespace(user_dir=f"{place}{package}"))


@pytest.mark.slow
def test_real_commands_from_the_repository_and_from_elsewhere(run_cli, corpus, tmp_path, test_data):
    """The commands find the package by themselves: nothing else makes it importable."""
    environment = {"PYTHONPATH": ""}
    words = train_words(corpus.binary, tmp_path, "--user-dir", "cape_plugins", updates=1)
    run_cli(*words, cwd=ROOT, env=environment)
    checkpoint = tmp_path / "checkpoint_last.pt"
    words = generate_words(test_data, checkpoint, "--user-dir", ROOT / "fairseq_user_dir")
    output = run_cli(*words, cwd=tmp_path, env=environment).stdout
    assert len(lines(output, "H")) == 24

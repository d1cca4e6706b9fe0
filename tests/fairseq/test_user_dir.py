"""Proves that ``--user-dir`` takes both packages: by bare name in the repository, by path from
elsewhere, and after they have been imported."""

import pytest

from tests.support.fairseq_models import ROOT, generate_words, lines, train_words

pytestmark = pytest.mark.slow

PACKAGES = ("cape_plugins", "fairseq_user_dir")
# Commands import the user directory when they parse, and again when they run.
IMPORTED = """
import argparse, sys
import fairseq_user_dir
from fairseq import utils
from fairseq.models import ARCH_MODEL_REGISTRY
for _ in range(2):
    utils.import_user_module(argparse.Namespace(user_dir=sys.argv[1]))
assert "cape_transformer_tiny" in ARCH_MODEL_REGISTRY
"""


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("place", ["", f"{ROOT}/"])
def test_user_dir_that_has_been_imported_is_taken(place, package, run_cli):
    run_cli("python", "-c", IMPORTED, f"{place}{package}", cwd=ROOT, fresh=True)


@pytest.mark.parametrize("package", PACKAGES)
def test_real_commands_from_the_repository_and_from_elsewhere(
    package, run_cli, corpus, test_data, tmp_path
):
    """The commands find the package by themselves: nothing else makes it importable."""
    environment = {"PYTHONPATH": ""}
    words = train_words(corpus.binary, tmp_path, "--user-dir", package, updates=1)
    run_cli(*words, cwd=ROOT, env=environment)
    checkpoint = tmp_path / "checkpoint_last.pt"
    words = generate_words(test_data, checkpoint, "--user-dir", ROOT / package)
    output = run_cli(*words, cwd=tmp_path, env=environment).stdout
    assert len(lines(output, "H")) == 24

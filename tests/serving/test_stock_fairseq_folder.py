"""``cape-plugins export stock`` of models trained in fairseq: the folder stands alone, whatever the
training was told on its command line, and failures leave nothing behind."""

import re
import resource

import pytest
import torch

from cape_plugins.cli import main
from tests.serving.test_stock_fairseq import CAPE
from tests.support.engines import program_of
from tests.support.stock import run_without_package
from tests.support.translation_models import save_fairseq, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("folders") / "data")


def refusal(capsys, *words):
    """The line with which the command refuses, without anything written."""
    with pytest.raises(SystemExit, match="2"):
        main(["export", "stock", *map(str, words)])
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_languages_come_from_the_names_of_the_binarised_texts(corpus, tmp_path):
    """As after fairseq-train without -s and -t, which stores neither."""
    checkpoint, out = save_fairseq(corpus, tmp_path / "model.pt", *CAPE), tmp_path / "out"
    state = torch.load(checkpoint, weights_only=False)
    for section in (state["cfg"].task, state["cfg"].model):
        section.source_lang = section.target_lang = None
    torch.save(state, checkpoint)
    (corpus / "binary" / "train.en-de.en.idx").touch()
    main(["export", "stock", str(checkpoint), str(out)])
    assert "--source-lang en --target-lang de" in (out / "README.md").read_text(encoding="utf-8")
    (translation,) = run_without_package([(out, program_of(out), "w1 w2\n")], tmp_path)
    assert "Error" not in translation
    assert "Exception" not in translation
    assert {path.name for path in out.glob("dict*")} == {"dict.en.txt", "dict.de.txt"}


def test_dictionaries_of_another_training(corpus, tmp_path, capsys):
    checkpoint, out = save_fairseq(corpus, tmp_path / "model.pt", *CAPE), tmp_path / "out"
    others = tmp_path / "others"
    others.mkdir()
    for name in ("dict.en.txt", "dict.de.txt"):
        words = (corpus / "binary" / name).read_text(encoding="utf-8")
        (others / name).write_text(f"{words}more 1\n", encoding="utf-8")
    line = refusal(capsys, checkpoint, out, "--data", others)
    assert f"does not fit the dictionaries in {others} (size mismatch for" in line
    assert "give --data DIR" in line
    assert not out.exists()


def test_full_disk_leaves_nothing(corpus, tmp_path, capsys):
    """Whichever file is the first that has no room: a limit on the size of files does the same."""
    checkpoint = save_fairseq(corpus, tmp_path / "model.pt", *CAPE)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit, *options in ((20_000,), (100,), (20_000, "--to", "hugging-face")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        try:
            line = refusal(capsys, checkpoint, tmp_path / "new" / "out", *options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        assert re.search(
            r"OUT \S+/new/out cannot be written \((File too large|disk full\?)\)", line
        )
        assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]

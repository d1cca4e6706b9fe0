"""Models, texts and ways to export that several files of these tests use."""

from pathlib import Path

import pytest

from tests.support import engines


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Translation models of fairseq, made when they are asked for."""
    from tests.support.served_fairseq import ServedModels

    return ServedModels(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Texts and pieces of them."""
    from tests.support.served import Corpus

    return Corpus(tmp_path_factory.mktemp("corpus"))


def saved_in(folder, source):
    """The path of a model, which is saved first if `source` is the model itself."""
    if not isinstance(source, Path):
        source.save_pretrained(folder / "model")
        source = folder / "model"
    return source


@pytest.fixture
def export_of(tmp_path):
    """Function that gives the folder which ``cape-plugins export`` writes, of a model or a path."""

    def export(engine, source, *options):
        return engines.export(engine, saved_in(tmp_path, source), tmp_path / "out", *options)

    return export


@pytest.fixture
def refusal_of(tmp_path, capsys):
    """Function that gives the line with which an export ends, of a model or a path."""

    def refusal(engine, source, *options):
        source = saved_in(tmp_path, source)
        return engines.refusal(capsys, engine, source, tmp_path / "out", *options)

    return refusal

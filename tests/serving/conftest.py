"""Models and texts that several files of these tests use."""

import pytest


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

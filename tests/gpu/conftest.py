"""Tests that need a GPU: marked ``gpu``, and left out with one reason where there is none."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.gpu import MISSING, ON_GPU, REASON

FOLDER = Path(__file__).parent
collect_ignore_glob = []
if not importlib.util.find_spec("transformers"):
    collect_ignore_glob.append("test_hf_*.py")
if importlib.util.find_spec("fairseq"):
    from tests.fairseq.conftest import corpus, shared_folder, test_data  # noqa: F401
else:
    collect_ignore_glob.append("test_fairseq_*.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder, and no other, which pytest hands over as well."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if MISSING:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    """Products of matrices in float32, for the comparison with the CPU."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(autouse=True)
def _free_memory() -> Iterator[None]:
    """Workers share one GPU."""
    yield
    if ON_GPU and not MISSING:
        torch.cuda.empty_cache()

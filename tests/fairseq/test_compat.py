"""fairseq's checkpoints under ``torch.load(weights_only=True)``."""

import argparse
import collections
import io
import os
import pickle
import re

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.distributed.utils import _TensorPlaceholder
from omegaconf import OmegaConf

from cape_plugins.checkpoints.fairseq_files import NUMBERS
from fairseq_user_dir.host.compat import allow_fairseq_checkpoints


@pytest.fixture
def nothing_allowed():
    """The list of safe types emptied, and put back afterwards."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(before)
    # the user dir declares its types when it is imported, which may have been within the test
    allow_fairseq_checkpoints()


def saved(value, **options):
    buffer = io.BytesIO()
    torch.save({"value": value}, buffer, **options)
    return buffer.getvalue()


def load(data):
    return torch.load(io.BytesIO(data), weights_only=True)["value"]


SETTINGS = {"model": argparse.Namespace(a=1), "lr": [0.1], "task": {"data": None}}
PASSIVE = {
    "Namespace": argparse.Namespace(arch="transformer_tiny", lr=[0.1]),
    **{f"array {name}": np.array([1, 0], name) for name in NUMBERS},
    **{f"number {name}": np.array([1], name)[0] for name in NUMBERS},
    # what rank 0 sends when several ranks resume
    "OmegaConf": {"cfg": OmegaConf.create(SETTINGS, flags={"allow_objects": True})},
    "placeholder": _TensorPlaceholder(3),
    "defaultdict": collections.defaultdict(dict),  # empty, as in OmegaConf: no others can be loaded
}


@pytest.mark.parametrize("value", PASSIVE.values(), ids=PASSIVE)
def test_passive_types_load_only_when_allowed(value, nothing_allowed):
    data = saved(value)
    with pytest.raises(pickle.UnpicklingError):
        load(data)
    allow_fairseq_checkpoints()
    loaded = load(data)
    assert type(loaded) is type(value)
    assert np.all(loaded == value)


def test_types_that_other_code_took_off_the_list_come_back(tmp_path):
    """The end of torch's own context manager also removes what was declared before it."""
    path = tmp_path / "checkpoint.pt"
    state = {"extra_state": {"counts": np.arange(4), "train_iterator": {"epoch": 1}}}
    state["optimizer_history"] = [{"num_updates": 0, "lr_scheduler_state": {}}]
    torch.save({**state, "args": None, "cfg": None, "model": {}}, path)
    with torch.serialization.safe_globals([np.ndarray]):
        pass
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert state["extra_state"]["counts"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("value", [np.arange(4.0), np.int64(7)], ids=["array", "number"])
@pytest.mark.parametrize("home", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_files_written_under_either_numpy_load(value, home, nothing_allowed):
    # this format stores names as text, ended by a line break, so that they can be exchanged
    data = saved(value, _use_new_zipfile_serialization=False)
    data, count = re.subn(rb"numpy\._?core\.multiarray", home.encode(), data)
    assert count > 0
    with pytest.raises(pickle.UnpicklingError):
        load(data)
    allow_fairseq_checkpoints()
    assert np.array_equal(load(data), value)


def test_files_that_run_code_are_still_refused(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    allow_fairseq_checkpoints()
    for value in (Attack(), argparse.Namespace(deep=Attack()), np.array([Attack()], dtype=object)):
        with pytest.raises(pickle.UnpicklingError):
            load(saved(value))
    assert not (tmp_path / "made").exists()

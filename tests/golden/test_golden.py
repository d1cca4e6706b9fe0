"""Golden files (make.py): models that version 0.2.0 has saved load in later versions and compute
the same."""

import json

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("fairseq")
pytest.importorskip("transformers")

from cape_plugins import PositionConfig, PositionEncoder
from cape_plugins.settings.options import FORMER_NAMES
from tests.golden import make

with safe_open(make.OUTPUTS, "pt") as file:
    STORED = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    SETTINGS = {name: json.loads(text) for name, text in file.metadata().items() if text[0] == "{"}
CASES = sorted(SETTINGS.keys() - make.MODELS.keys() - make.RUNS.keys())
# Not bit for bit: BLAS, its threads and the instructions of a processor decide in which order sums
# are taken, and a release of torch may change its kernels; in float32 a sum differs by some 1e-7.
SAME = {"rtol": 1e-5, "atol": 1e-6}


def stored(name):
    """``{key: tensor}`` of a case or model."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): STORED[key] for key in STORED if key.startswith(prefix)}


def check(name, model):
    """Settings that were added later are allowed; their defaults must change nothing."""
    settings = {FORMER_NAMES.get(option, option): value for option, value in SETTINGS[name].items()}
    assert settings.items() <= make.stored_settings(model).items()
    values = stored(name)
    expected = values.pop("outputs")
    inputs = {key.removeprefix("inputs/"): value for key, value in values.items()}
    torch.testing.assert_close(make.compute(model, inputs), expected, **SAME)


@pytest.mark.parametrize("name", make.MODELS)
def test_hugging_face_folder_computes_what_it_did(name):
    model, report = make.load_model(name)
    assert not any(report.values())
    assert make.MODELS[name][2].items() <= model.config.position_embedding.items()
    check(name, model)


@pytest.mark.parametrize("name", make.RUNS)
def test_fairseq_checkpoint_computes_what_it_did(name, tmp_path):
    make.write_dictionaries(tmp_path)
    check(name, make.load_checkpoint(name, tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_settings_give_the_positions_that_they_gave(name):
    settings = dict(SETTINGS[name])
    where = settings.pop("domain"), settings.pop("architecture")
    values = make.positions(PositionConfig.from_dict(settings, *where))
    torch.testing.assert_close(values, stored(name), **SAME)


@pytest.mark.parametrize("name", sorted({*make.MODELS, *make.RUNS} - {"llama"}))
def test_other_positions_would_be_seen(name, tmp_path, monkeypatch):
    """The comparison fails where nothing is added and tables are empty. (Llama's own module turns
    queries and keys in evaluation.)"""
    make.write_dictionaries(tmp_path)
    hugging_face = name in make.MODELS
    model = make.load_model(name)[0] if hugging_face else make.load_checkpoint(name, tmp_path)
    forward = PositionEncoder.forward
    monkeypatch.setattr(
        PositionEncoder, "forward", lambda *args, **more: 0 * forward(*args, **more)
    )
    for part, table in model.named_parameters():
        if "position" in part or "relative" in part:
            table.data.zero_()
    with pytest.raises(AssertionError, match="not close"):
        check(name, model)


@pytest.mark.slow
def test_training_of_a_golden_checkpoint_goes_on(run_cli, tmp_path):
    """With the state of its optimizer."""
    make.write_data(tmp_path)
    (tmp_path / "checkpoint_last.pt").write_bytes((make.FOLDER / "translation.pt").read_bytes())
    words = make.train_words("translation", tmp_path, tmp_path, updates=5)
    log = run_cli("fairseq-train", *words, cwd=make.ROOT)
    assert "Loaded checkpoint" in log.stdout + log.stderr
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert state["optimizer_history"][-1]["num_updates"] == 5

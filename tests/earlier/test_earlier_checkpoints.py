"""Checkpoints that earlier versions wrote (make.py) load and compute the same."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("fairseq")
pytest.importorskip("transformers")
from transformers import AutoConfig

import hf_models
from tests.earlier.make import RUNS, SIZES, TYPES, fairseq_output

HERE = Path(__file__).parent
STORED = load_file(HERE / "outputs.safetensors")


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("family", SIZES)
def test_hugging_face_folder_computes_what_it_did(family, name):
    folder = HERE / "hf" / f"{family}-{name}"
    config = AutoConfig.from_pretrained(folder)
    assert config.position_embedding["type"] == name
    auto = list(hf_models.AUTO_CLASSES[type(config)])[-1]
    model, report = auto.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values())
    prefix = f"hf/{family}/"
    values = {key.removeprefix(prefix): STORED[key] for key in STORED if key.startswith(prefix)}
    inputs = {key: value for key, value in values.items() if key not in TYPES}
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
    torch.testing.assert_close(logits, values[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_fairseq_checkpoint_computes_what_it_did(name, monkeypatch):
    monkeypatch.chdir(HERE.parents[1])  # fairseq stores relative paths
    torch.testing.assert_close(
        fairseq_output(name, STORED), STORED[f"fairseq/{name}"], rtol=1e-6, atol=1e-6
    )


def test_types_of_a_stack_are_told_apart():
    """The comparison above would see another position embedding."""
    for prefix in ("hf/marian", "hf/vit", "hf/speech_ctc", "hf/speech_to_text"):
        outputs = [STORED[f"{prefix}/{name}"] for name in ("nopos", "sinpos", "abspos", "relpos")]
        for i, first in enumerate(outputs):
            for second in outputs[:i]:
                assert not torch.allclose(first, second, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_training_of_an_earlier_checkpoint_goes_on(run_cli, tmp_path):
    """The optimizer's state too; nothing about positions has to be said again."""
    shutil.copy(HERE / "fairseq" / "translation-cape.pt", tmp_path / "checkpoint_last.pt")
    log = run_cli(
        "fairseq-train", HERE / "fairseq" / "text", "--user-dir", HERE.parents[1] / "cape_plugins",
        "--arch", "cape_transformer_tiny", *RUNS["translation-cape"][2], "--optimizer", "adam",
        "--lr", 0.01, "--max-update", 5, "--cpu", "--no-progress-bar", "--num-workers", 0,
        "--disable-validation", "--no-epoch-checkpoints", "--required-batch-size-multiple", 1,
        "--position-embedding", "cape", "--save-dir", tmp_path,
    )  # fmt: skip
    assert "Loaded checkpoint" in log.stdout + log.stderr
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert state["optimizer_history"][-1]["num_updates"] == 5

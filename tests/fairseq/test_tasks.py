"""Proves that tasks without one source and one target language train: their alpha is 1."""

import pytest
import torch

from fairseq_user_dir.host.errors import SettingsError
from tests.support.fairseq_models import TINY_FLAGS, USER_DIR, generate_words, lines

pytestmark = pytest.mark.slow
LANGUAGES = ["--lang-pairs", "en-de", "--langs", "en,de", "--decoder-langtok"]
TASKS = {
    "denoising": [
        "--arch", "cape_bart_base", "--mask", 0.3, "--mask-length", "span-poisson",
        "--poisson-lambda", 3, "--replace-length", 1, "--tokens-per-sample", 32,
    ],
    "translation_multi_simple_epoch": [
        "--arch", "cape_transformer_tiny", "--sampling-method", "concat", *LANGUAGES,
    ],
}  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_alpha_is_one_without_a_language_pair(
    task, fairseq_train, run_cli, corpus, test_data, tmp_path, caplog
):
    data = corpus.lm if task == "denoising" else corpus.binary
    words = [
        "fairseq-train", data, "--user-dir", USER_DIR, "--task", task, *TASKS[task], *TINY_FLAGS,
        "--save-dir", tmp_path, "--max-update", 2, "--batch-size", 8, "--optimizer", "adam",
        "--lr", 0.001, "--cpu", "--num-workers", 0, "--no-epoch-checkpoints",
        "--required-batch-size-multiple", 1, "--skip-invalid-size-inputs-valid-test",
    ]  # fmt: skip
    with pytest.raises(
        SettingsError, match="--position-source-scale auto cannot count .* no single"
    ):
        fairseq_train([*words, "--position-source-scale", "auto"])
    assert not (tmp_path / "checkpoint_last.pt").exists()
    caplog.clear()
    fairseq_train(words)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any("alpha = 1; another one by --position-source-scale" in text for text in warnings)
    checkpoint = tmp_path / "checkpoint_last.pt"
    model = torch.load(checkpoint, weights_only=True)["cfg"]["model"]
    assert model.position_source_scale == "1"
    assert model.position_source_bos
    if task != "denoising":
        languages = ["--task", task, *LANGUAGES, "-s", "en", "-t", "de", "--max-len-b", 3]
        output = run_cli(*generate_words(test_data, checkpoint, *languages)).stdout
        assert len(lines(output, "H")) == 24

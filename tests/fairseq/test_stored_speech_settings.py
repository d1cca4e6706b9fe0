"""Proves that checkpoints of speech models say all of their position settings, those of a decoder
of its own included."""

import pytest
import torch
from fairseq import checkpoint_utils

from cape_plugins.checkpoints.fairseq_files import fairseq_config
from fairseq_user_dir.host.errors import SettingsError
from tests.fairseq.test_stored_settings import settings
from tests.support.fairseq_models import USER_DIR, flags
from tests.support.fairseq_speech import SIZES, durations, write_manifest

ABSENT = ("feature_dropout", "abspos_frames", "encoder_layerdrop", "input_feat_per_channel")


def speech_words(folder):
    """Words of fairseq-train for a small model, with data of its own."""
    for split in ("train", "valid"):
        write_manifest(folder, split, durations(8))
    sizes = flags({name: value for name, value in SIZES.items() if name not in ABSENT})
    return [
        "fairseq-train", folder, "--user-dir", USER_DIR, "--task", "cape_asr", "--arch",
        "cape_s2t_transformer_xs", "--criterion", "label_smoothed_cross_entropy", "--max-tokens",
        4000, "--optimizer", "adam", "--lr", 0.001, "--cpu", "--num-workers", 0, "--save-dir",
        folder / "run", "--no-epoch-checkpoints", *sizes,
    ]  # fmt: skip


@pytest.mark.slow
def test_settings_of_both_sides_are_stored_and_compared(fairseq_train, tmp_path):
    """The flags are not given again to decode; a resumed training has no others; another type of
    the encoder leaves the decoder as it is."""
    words = [*speech_words(tmp_path), "--position-decoder-embedding", "relpos"]
    context = ("--position-decoder-relative-context", 3)
    fairseq_train([*words, *context, "--max-update", 1])
    path = tmp_path / "run/checkpoint_last.pt"
    stored = settings(path)
    assert None not in stored.values()
    assert stored["position_max_global_shift"] == 30.0
    with pytest.raises(SettingsError, match=r"--position-max-global-shift 30.0 \(now 7.0\)"):
        fairseq_train([*words, *context, "--max-update", 2, "--position-max-global-shift", 7])
    with pytest.raises(SettingsError, match=r"--position-decoder-relative-context 3 \(now 150\)"):
        fairseq_train([*words, "--max-update", 2])
    (model,), _ = checkpoint_utils.load_model_ensemble([str(path)])
    config = model.decoder.position_config
    assert (config.type, config.relative_context) == ("relpos", 3)
    stored = torch.load(path, weights_only=True)
    arguments = vars(stored["cfg"]["model"])
    assert None not in arguments["position_decoder"].values()
    assert fairseq_config(arguments, stored["model"], "decoder") == config
    overrides = {"position_embedding": "sinpos"}
    (model,), _ = checkpoint_utils.load_model_ensemble([str(path)], overrides)
    assert model.position_config.type == "sinpos"
    assert model.decoder.position_config == config

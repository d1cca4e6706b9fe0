"""Proves that checkpoints of speech models say all of their position settings, those of a decoder
of its own included."""

import pytest
import torch
from fairseq import checkpoint_utils

from cape_plugins.checkpoints.fairseq_files import fairseq_config
from fairseq_user_dir.host.errors import SettingsError
from tests.fairseq.test_stored_settings import settings
from tests.support.fairseq_models import USER_DIR
from tests.support.fairseq_speech import SIZES, durations, write_manifest

SPEECH = {
    "cape_ctc_transformer": ("cape_ctc", ("decoder_layers", "decoder_attention_heads",
        "decoder_ffn_embed_dim", "conv_channels", "input_feat_per_channel")),
    "cape_s2t_transformer_xs": ("label_smoothed_cross_entropy", ("feature_dropout",
        "abspos_frames", "encoder_layerdrop", "input_feat_per_channel")),
    "cape_seq2seq_transformer_tiny": ("label_smoothed_cross_entropy", ("conv_channels",
        "input_feat_per_channel")),
}  # fmt: skip


def speech_words(folder, arch):
    """Words of fairseq-train for a small model, with data of its own."""
    criterion, absent = SPEECH[arch]
    for split in ("train", "valid"):
        write_manifest(folder, split, durations(8))
    sizes = {name: value for name, value in SIZES.items() if name not in absent}
    return [
        "fairseq-train", folder, "--user-dir", USER_DIR, "--task", "cape_asr", "--arch", arch,
        "--criterion", criterion, "--max-tokens", 4000, "--optimizer", "adam", "--lr", 0.001,
        "--cpu", "--num-workers", 0, "--save-dir", folder / "run", "--no-epoch-checkpoints",
        *(word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", value)),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arch", SPEECH)
def test_speech_models_store_and_compare(arch, fairseq_train, tmp_path):
    words = speech_words(tmp_path, arch)
    fairseq_train([*words, "--max-update", 1])
    stored = settings(tmp_path / "run" / "checkpoint_last.pt")
    assert None not in stored.values()
    assert stored["position_max_global_shift"] == 30.0
    with pytest.raises(SettingsError, match=r"--position-max-global-shift 30.0 \(now 7.0\)"):
        fairseq_train([*words, "--max-update", 2, "--position-max-global-shift", 7])
    cfg = torch.load(tmp_path / "run" / "checkpoint_last.pt", weights_only=True)["cfg"]["model"]
    if arch != "cape_ctc_transformer":
        assert None not in cfg.position_decoder.values()
        assert cfg.position_decoder["max_global_shift"] == 5.0


@pytest.mark.slow
def test_decoder_of_its_own_is_stored_and_compared(fairseq_train, tmp_path):
    """The flags are not given again to decode; a resumed training has no others; another type of
    the encoder leaves the decoder as it is."""
    words = speech_words(tmp_path, "cape_s2t_transformer_xs")
    words += ["--position-decoder-embedding", "relpos"]
    context = ("--position-decoder-relative-context", 3)
    fairseq_train([*words, *context, "--max-update", 1])
    path = str(tmp_path / "run/checkpoint_last.pt")
    with pytest.raises(SettingsError, match=r"--position-decoder-relative-context 3 \(now 150\)"):
        fairseq_train([*words, "--max-update", 2])
    (model,), _ = checkpoint_utils.load_model_ensemble([path])
    config = model.decoder.position_config
    assert (config.type, config.relative_context) == ("relpos", 3)
    assert model.position_config.type == "cape"
    stored = torch.load(path, weights_only=True)
    arguments = vars(stored["cfg"]["model"])
    assert fairseq_config(arguments, stored["model"], "decoder") == config
    (model,), _ = checkpoint_utils.load_model_ensemble([path], {"position_embedding": "sinpos"})
    assert model.position_config.type == "sinpos"
    assert model.decoder.position_config == config


# -------------------------------------------------------------------------------- fine-tuning

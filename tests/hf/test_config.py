"""Configurations: settings are completed, kept, merged and refused."""

import re

import pytest
from transformers import AutoConfig

from cape_plugins import PositionConfig
from hf_models import (
    CapeLlamaConfig,
    CapeMarianConfig,
    CapeSpeech2TextConfig,
    CapeSpeechConfig,
    CapeViTConfig,
)


def test_defaults_are_written_out():
    config = CapeMarianConfig(position_embedding={"type": "cape", "source_scale": "3/2"})
    assert config.position_embedding == {
        "type": "cape",
        "max_global_shift": 5.0,
        "max_local_shift": 0.5,
        "synchronize": True,
        "source_scale": "3/2",
        "source_bos": True,
    }
    settings = {"type": "cape", "source_scale": 1, "source_bos": False}
    assert not CapeMarianConfig(position_embedding=settings).position_embedding["source_bos"]
    assert CapeViTConfig().position_config == PositionConfig("cape", "image", "encoder")


def test_single_options_of_a_stored_configuration_change(tmp_path):
    settings = {"type": "cape", "source_scale": 2, "max_global_shift": 3}
    CapeMarianConfig(position_embedding=settings).save_pretrained(tmp_path)
    changed = AutoConfig.from_pretrained(tmp_path, position_embedding={"max_global_shift": 9})
    assert changed.position_config.max_global_shift == 9.0
    assert changed.position_config.alpha == 2.0
    other = AutoConfig.from_pretrained(tmp_path, position_embedding={"type": "shape"})
    assert other.position_config.type == "shape"
    assert other.position_config.alpha == 1.0
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.position_config.max_global_shift == 3.0


BAD = [
    (CapeMarianConfig, {"type": "cape", "source_scale": "nan"}, ("source_scale='nan'", "> 0")),
    (CapeMarianConfig, {"type": "rotary"}, ("position_embedding='rotary'", "cape")),
    (CapeMarianConfig, "cape", ("position_embedding='cape'", "dict")),
    (CapeLlamaConfig, "rope", ("position_embedding='rope'", "dict")),
    (CapeLlamaConfig, {"type": "rope", "rotary_base": 5.0}, ("rotary_base=5", "rope_theta")),
    (CapeLlamaConfig, {"type": "rope", "augment_probability": 0.5}, ("no effect", "max_local")),
    (CapeSpeechConfig, {"type": "cape", "gamma": 2}, ("gamma=2", "Leave it out")),
    (CapeSpeech2TextConfig, {"type": "cape", "synchronize": True}, ("synchronize=True", "encoder")),
    (CapeViTConfig, {"type": None}, ("position_embedding=None", "cape")),
]


@pytest.mark.parametrize(
    ("config", "settings", "messages"), BAD, ids=lambda value: str(value)[-60:]
)
def test_bad_settings_are_refused_at_construction_and_assignment(config, settings, messages):
    good = config(position_embedding={"type": "nopos"})
    message = ".*".join(map(re.escape, messages))
    with pytest.raises(ValueError, match=message):
        config(position_embedding=settings)
    with pytest.raises(ValueError, match=message):
        good.position_embedding = settings
    assert good.position_embedding == {"type": "nopos"}


BAD_SIZES = [
    *(("hop_seconds", 0), ("window_seconds", 0.0), ("num_mel_bins", 0), ("conv_kernel_size", 4)),
    *(("layer_norm", "none"), ("ctc_loss_reduction", "max")),
    *(("drop_path_rate", -0.1), ("drop_path_rate", 1.0), ("drop_path_rate", 1.5)),
]


@pytest.mark.parametrize(("field", "size"), BAD_SIZES)
def test_bad_sizes_are_refused(field, size):
    config = CapeViTConfig if field == "drop_path_rate" else CapeSpeechConfig
    with pytest.raises(Exception, match=re.escape(f"{field}={size!r}") + ".*allowed"):
        config(**{field: size})


def test_decoder_of_speech_to_text_has_its_own_settings(tmp_path):
    config = CapeSpeech2TextConfig(position_embedding={"type": "cape", "max_global_shift": 20})
    assert config.position_config.max_global_shift == 20.0
    assert config.decoder_position_config.max_global_shift == 5.0
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(
        tmp_path, decoder_position_embedding={"type": "relpos", "relative_context": 7}
    )
    assert again.position_config == config.position_config
    assert again.decoder_position_config.relative_context == 7

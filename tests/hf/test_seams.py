"""Models with every kind of seam: the stock type, draws in training, and copies."""

import copy
import pickle
from functools import partial

import pytest
import torch
import transformers

from hf_models.checks.calls import padded
from hf_models.checks.outputs import equal, outputs_of
from hf_models.checks.updates import same_updates
from hf_models.switching.install import auto_models
from tests.hf import (
    test_optional_grids,
    test_packed_grids,
    test_patch_angles,
    test_rows,
    test_sinusoids,
    test_spectrograms,
    test_video,
    test_video_angles,
)
from tests.support.generated import switched

IDS = {"input_ids": torch.arange(5, 55, 5).repeat(2, 1)}
PAIRS = {**IDS, "decoder_input_ids": IDS["input_ids"].flip(1)}
SOUNDS = {"input_values": test_spectrograms.sounds()}
VIDEOS = {"pixel_values": test_video.videos()}
MASKED = {**VIDEOS, "bool_masked_pos": torch.arange(8).expand(2, -1) % 2 == 0}
VJEPA2 = partial(test_video_angles.build, transformers.VJEPA2ForVideoClassification)
# what builds a stock model, and a batch of equal samples
MODELS = {
    **{name: (partial(test_rows.build, name), IDS) for name in test_rows.MODELS},
    "xglm": (partial(test_sinusoids.build, "xglm"), IDS),
    "nllb-moe": (partial(test_sinusoids.build, "nllb-moe"), PAIRS),
    "audio-spectrogram-transformer": (test_spectrograms.build, SOUNDS),
    **{name: (partial(test_video.build, name), VIDEOS) for name in test_video.MODELS},
    "vjepa2": (VJEPA2, {"pixel_values_videos": test_video_angles.videos(8)}),
    "dinov3_vit": (test_patch_angles.build, {"pixel_values": test_patch_angles.images()}),
    "siglip2_vision_model": (test_packed_grids.build, test_packed_grids.images((4, 4), (4, 4))),
    "data2vec-vision": (test_optional_grids.build, {"pixel_values": test_optional_grids.images()}),
    "videomae, masked": (test_video.build_masked, MASKED),
}
STOCK_TYPES = {"xglm": "sinpos", "nllb-moe": "sinpos", "vjepa2": "rope", "dinov3_vit": "rope"}
STOCK_TYPES["data2vec-vision"] = "nopos"


@pytest.mark.parametrize("name", MODELS)
def test_the_stock_type_is_the_stock_model_bit_for_bit(name):
    """Padded and not, and after updates."""
    build, inputs = MODELS[name]
    stock = build()
    model = switched(stock, type=STOCK_TYPES.get(name, "abspos"))
    for batch in filter(None, (inputs, padded(stock, inputs, "right"))):
        equal(outputs_of(model, batch), outputs_of(stock, batch))
    same_updates(stock, model, inputs)


@pytest.mark.parametrize("name", MODELS)
def test_models_draw_for_each_sample_in_training_alone_and_are_stored_and_copied(name, tmp_path):
    build, inputs = MODELS[name]
    model = switched(build(), type="cape", max_global_scale=1.5)
    expected = outputs_of(model, inputs)
    model.save_pretrained(tmp_path)
    autos = auto_models(type(model.config)).items()
    auto = next((auto for auto, head in autos if head is type(model)), type(model))
    loaded = auto.from_pretrained(tmp_path)
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        equal(outputs_of(other.eval(), inputs), expected)
        outputs = outputs_of(other.train(), inputs).values()
        moved = next(output for output in outputs if output.dim() > 0)
        assert not torch.allclose(moved[0], moved[1], atol=1e-3)
    equal(outputs_of(model, inputs), expected)
    assert model.state_dict().keys().isdisjoint(f"{path}.weight" for path in model.seam_paths)

"""Families whose classes are made from stock classes: what is odd about single ones, and what holds
for all of them."""

import copy

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import hf_models
from hf_models.checks.proof import prove
from hf_models.checks.stock_models import tiny_stock_models
from hf_models.seams.scope import Scope
from tests.hf.conftest import copies
from tests.support.generated import (
    BUILDERS,
    CAPE,
    batch,
    gemma3,
    llava,
    logits,
    mistral,
    mistral3,
    qwen2_vl,
    stock_model,
)

each_family = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)


def positions_of_angles(model, **inputs):
    """What reaches the stock modules of angles in one forward, in the order of the calls."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        for stock_class in {type(module).__bases__[-1] for module in model.seams()}:

            def note(self, x, position_ids, *args, forward=stock_class.forward, **kwargs):
                seen.append(position_ids)
                return forward(self, x, position_ids, *args, **kwargs)

            patch.setattr(stock_class, "forward", note)
        model(**inputs)
    return seen


def test_the_stock_type_of_mistral3_is_the_stock_model():
    """Outputs, updates, checkpointing. test_doctor.py and test_probe.py prove the others."""
    assert prove("mistral3").is_proved


@each_family
def test_positions_are_drawn_in_training_only(build):
    stock, inputs = build(), batch()
    model = hf_models.switch(copy.deepcopy(stock), CAPE).eval()
    before = torch.get_rng_state()
    assert torch.equal(logits(model, **inputs), logits(stock, **inputs))
    model.train()
    with torch.no_grad():  # a step of generation, which must see the positions of earlier steps
        step = model(**inputs, use_cache=True).logits
        assert torch.equal(step, stock.train()(**inputs, use_cache=True).logits)
    assert torch.equal(torch.get_rng_state(), before)
    first, second = logits(model, 1, **inputs), logits(model, 2, **inputs)
    with torch.no_grad():  # training that repeats a forward with gradients, from the same seed
        assert torch.equal(logits(model, 1, **inputs), first)
    assert not torch.equal(first, second)
    assert torch.equal(logits(model, 1, **inputs), first)
    assert first.isfinite().all()


@each_family
def test_saved_models_and_stock_checkpoints_are_loaded(build, tmp_path):
    """Checkpoints hold experts one by one, and parts under older names. Models are copied, too."""
    stock, inputs = build(), batch()
    expected = logits(stock, **inputs)
    model = hf_models.switch(copy.deepcopy(stock), CAPE)
    stock.save_pretrained(tmp_path / "stock")
    is_text = type(stock).__name__.endswith("CausalLM")
    auto = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    others = [
        auto.from_pretrained(tmp_path / "stock", position_embedding=CAPE),
        type(stock).from_pretrained(tmp_path / "stock", position_embedding=CAPE),
        *copies(model, tmp_path / "cape"),
        auto.from_pretrained(tmp_path / "cape"),
    ]
    for other in others:
        assert type(other) is type(model)
        assert other.config.position_embedding == model.config.position_embedding
        assert torch.equal(logits(other.eval(), **inputs), expected)
        other.train()
        assert not torch.equal(logits(other, 1, **inputs), logits(other, 2, **inputs))


@each_family
def test_left_padding_changes_nothing(build):
    """In training, too, if the draw is the same; local shifts differ from token to token."""
    model, inputs = hf_models.switch(build(), {**CAPE, "max_local_shift": 0}), batch()
    alone = {"input_ids": inputs["input_ids"][1:, 3:]}
    alone["attention_mask"] = torch.ones_like(alone["input_ids"])
    draw = model.train().seams()[0].positions.draw(2)
    second = type(draw)(*(part[1:] if isinstance(part, torch.Tensor) else part for part in draw))
    model.eval()
    for padded, unpadded in ((None, None), (draw, second._replace(batch_size=1))):
        with_padding = logits(model, **inputs, draw=padded)[1, 3:]
        without = logits(model, **alone, draw=unpadded)[0]
        torch.testing.assert_close(with_padding, without, atol=1e-4, rtol=1e-4)
    assert (without - logits(model, **alone)[0]).abs().max() > 1e-3  # the draw has moved something


def test_gemma3_turns_by_both_thetas_at_the_same_moved_positions():
    model = hf_models.switch(gemma3(), CAPE).train()
    seen = positions_of_angles(model, **batch())
    assert len(seen) == 2
    assert torch.equal(*seen)
    assert not torch.equal(seen[0], seen[0].round())


def test_coordinates_of_words_stay_equal_in_qwen2_vl():
    """``[3, B, T]`` positions of time, height and width, which are equal for words."""
    model = hf_models.switch(qwen2_vl(), CAPE).train()
    (moved,) = positions_of_angles(model, **batch())
    assert moved.shape == (3, 2, 9)
    torch.testing.assert_close(moved[1:], moved[:1].expand(2, -1, -1))
    assert not torch.equal(moved, moved.round())


def test_other_coordinates_of_qwen2_vl_are_scaled_alike():
    """A patch two rows below another is two scales away from it."""
    model = hf_models.switch(qwen2_vl(), {**CAPE, "max_local_shift": 0}).train()
    ids = torch.stack([torch.arange(6), 2 * torch.arange(6), torch.zeros(6).long()])[:, None]
    inputs = {"input_ids": torch.ones(1, 6, dtype=torch.long), "position_ids": ids}
    (moved,) = positions_of_angles(model, **inputs)
    scale = moved[0, 0, 1]
    assert scale != 1
    torch.testing.assert_close(moved, ids * scale)


@pytest.mark.parametrize("build", [llava, qwen2_vl, mistral3])
def test_towers_of_images_stay_stock(build):
    model = hf_models.switch(build(), CAPE)
    assert [path.rpartition(".")[0] for path in model.seam_paths] == ["model.language_model"]
    models = [m for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
    ours = [each for each in models if type(each).__module__.startswith("hf_models")]
    assert ours == [model, model.model]


def test_composites_keep_the_attention_of_each_part():
    stock = llava()
    stock.config.text_config._attn_implementation = "eager"

    def attention(config):
        return [getattr(config, part)._attn_implementation for part in config.sub_configs]

    expected = attention(stock.config)
    assert attention(hf_models.switch(stock, CAPE).config) == expected
    assert len(set(expected)) == 2


def test_moonshine_counts_frames_of_its_encoder_in_recordings_longer_than_in_training():
    """Positions are counted, not in seconds: a frame has the same number in every recording."""
    stock = next(tiny_stock_models("moonshine"))
    waves = torch.randn(2, 4 * stock.inputs["input_values"].shape[1])
    inputs = {**stock.inputs, "input_values": waves}
    model = hf_models.switch(copy.deepcopy(stock.model), {**CAPE, "max_local_shift": 0}).eval()
    assert torch.equal(logits(model, **inputs), logits(stock.model, **inputs))
    frames = model.get_encoder()(waves).last_hidden_state.shape[1]
    short = model.get_encoder()(stock.inputs["input_values"]).last_hidden_state.shape[1]
    assert frames > 3 * short
    of_frames = positions_of_angles(model, **inputs)[0]
    torch.testing.assert_close(of_frames[0].float(), torch.arange(frames).float())
    moved, *_, of_words = positions_of_angles(model.train(), **inputs)
    scales = moved[:, 1]
    assert scales[0] != scales[1]
    torch.testing.assert_close(moved, scales[:, None] * torch.arange(frames))
    torch.testing.assert_close(of_words[:, 1], scales)  # one draw for both sides


def test_a_base_model_alone_draws():
    model = hf_models.switch(stock_model("MistralModel"), CAPE).train()
    ids = batch()["input_ids"]
    first, second = (model(ids).last_hidden_state for _ in range(2))
    assert not torch.equal(first, second)


def test_models_inside_a_model_share_its_draws():
    model = hf_models.switch(mistral(), CAPE).train()
    draw = model.seams()[0].positions.draw(2)
    seen = []

    class Noting(Scope):
        def __init__(self, *args):
            super().__init__(*args)
            seen.append(self)

    outer = Scope((), {}, None, draw)
    inner = Noting((), {}, outer)
    assert inner.draw(model.seams()[0].positions, 2, draw.scale.device) is draw
    assert inner.moved is not outer.moved
    with torch.no_grad():
        quiet = Scope((), {"use_cache": True})
    assert not Scope((), {}, quiet).draws  # with gradients, below a model without


def test_unknown_stock_models_are_told_what_to_do():
    config = transformers.T5Config(d_model=16, num_layers=1, num_heads=2, d_ff=16, vocab_size=30)
    model = transformers.T5Model(config)
    with pytest.raises(ValueError, match="T5Model.*`cape-plugins doctor t5` tells"):
        hf_models.switch(model, CAPE)
    assert type(model) is transformers.T5Model


@pytest.mark.parametrize("option", [{"source_scale": 2.0}, {"source_bos": True}])
def test_options_of_source_and_target_are_refused_where_each_has_a_field(option):
    stock = next(tiny_stock_models("blenderbot")).model
    with pytest.raises(ValueError, match="needs one position embedding of source and target"):
        hf_models.switch(stock, {"type": "cape", **option})


def test_misspelt_fields_are_refused_before_a_family_is_made(tmp_path):
    mistral().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="position_embeding"):
        AutoConfig.from_pretrained(tmp_path, position_embeding=CAPE)

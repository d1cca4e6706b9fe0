"""What holds for the models of every family and type."""

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCTC,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

from tests.support.hf import ALL, FAMILIES, VARIANTS, WITH_STOCK, batch, make, seam

AUTO = {
    "marian": AutoModelForSeq2SeqLM,
    "vit": AutoModelForImageClassification,
    "speech_ctc": AutoModelForCTC,
    "speech_to_text": AutoModelForSpeechSeq2Seq,
}
RANDOM = [(f, n) for f, n in ALL if n.split("+")[0] in ("shape", "cape")]


def outputs(model, family):
    with torch.no_grad():
        return model(**batch(family))


@pytest.mark.parametrize(("family", "name"), ALL)
def test_saved_model_loads_the_same(family, name, tmp_path):
    model = make(family, name)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    again, report = AUTO[family].from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values())
    assert type(again) is type(model)
    assert again.config.position_config == model.config.position_config
    assert torch.equal(outputs(again, family).logits, outputs(model, family).logits)
    assert again.accepts_loss_kwargs is False
    assert "cape-plugins" in again.model_tags
    base = AutoModel.from_pretrained(tmp_path)
    assert base.config.position_config == model.config.position_config


@pytest.mark.parametrize("family", WITH_STOCK)
def test_stock_type_equals_the_stock_model_bit_for_bit(family):
    """Outputs, loss and parameters after updates."""
    row = FAMILIES[family]
    stock = row.build_stock(seed=1, attn_implementation="eager")
    ours = row.build({"type": row.stock_type}, seed=2, attn_implementation="eager")
    stored = {name for name in stock.state_dict() if "embed_positions" not in name}
    assert set(ours.state_dict()) == stored
    ours.load_state_dict(stock.state_dict(), strict=False)
    inputs = batch(family)
    if family == "speech_to_text":  # stock lets padding leak through its convolutions
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    for model in (stock, ours):
        model.train()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            kwargs = {"interpolate_pos_encoding": True} if family == "vit" else {}
            model(**inputs, **kwargs).loss.backward()
            optimizer.step()
    for name, value in ours.state_dict().items():
        assert torch.equal(value, stock.state_dict()[name]), name


@pytest.mark.parametrize("family", WITH_STOCK)
def test_stock_checkpoint_loads_completely(family, tmp_path):
    row = FAMILIES[family]
    stock = row.build_stock(seed=1)
    stock.save_pretrained(tmp_path)
    for name, settings in VARIANTS[family].items():
        model, report = row.model.from_pretrained(
            tmp_path, position_embedding=settings, output_loading_info=True
        )
        new = [key for key in report.pop("missing_keys") if "relative." not in key]
        assert not any(report.values())
        learned = model.config.position_config.encoding.counts and row.stock_type != "abspos"
        assert len(new) == (2 if learned else 0), name


@pytest.mark.parametrize(("family", "name"), ALL)
def test_training_draws_and_evaluation_does_not(family, name):
    model, inputs = make(family, name), batch(family)
    first, second = (model(**inputs).loss for _ in range(2))
    assert torch.equal(first, second)
    model.train()
    first, second = (model(**inputs).loss for _ in range(2))
    configs = [model.config.position_config]
    if family == "speech_to_text":
        configs.append(model.config.decoder_position_config)
    assert torch.equal(first, second) == (not any(config.random for config in configs))
    first.backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without


@pytest.mark.parametrize(("family", "name"), RANDOM)
def test_a_draw_can_be_injected(family, name):
    model, inputs = make(family, name).train(), batch(family)
    draw = seam(model).draw(3)
    with torch.no_grad():
        torch.manual_seed(0)
        first = model(**inputs, draw=draw)
        torch.manual_seed(0)
        second = model(**inputs, draw=draw)
        other = model(**inputs)
    assert torch.equal(first.loss, second.loss)
    assert not torch.equal(first.loss, other.loss)


@pytest.mark.parametrize(("family", "name"), ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_positions_are_exact(family, name, dtype, tmp_path):
    """The position embedding of a half-precision model is the float32 one, rounded at the end."""
    model = make(family, name)
    if seam(model) is None or seam(model).encoding is None:
        pytest.skip("nothing computed is added")
    seen = {}

    def note(key, model):
        seam(model).register_forward_hook(lambda _m, _a, out: seen.__setitem__(key, out))

    wide = batch(family)
    if family == "marian":
        for key in ("input_ids", "attention_mask"):
            wide[key] = wide[key].repeat(1, 60)
    note("here", model)
    with torch.no_grad():
        model(**wide)
        exact = seen["here"].to(dtype)
        for key in ("pixel_values", "input_features"):
            if key in wide:
                wide[key] = wide[key].to(dtype)
        model.to(dtype)(**wide)
        assert seen["here"].dtype == dtype
        assert torch.equal(seen["here"], exact)
        model.save_pretrained(tmp_path)
        loaded = AUTO[family].from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager")
        note("loaded", loaded.eval())
        loaded(**wide)
        assert torch.equal(seen["loaded"], exact)


@pytest.mark.parametrize(("family", "name"), RANDOM)
def test_gradient_checkpointing_does_not_draw_twice(family, name):
    model, inputs = make(family, name).train(), batch(family)
    if family == "speech_to_text":
        inputs["use_cache"] = False  # which checkpointing switches off

    def gradients():
        torch.manual_seed(5)
        model.zero_grad()
        model(**inputs).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable()
    for expected, other in zip(plain, gradients(), strict=True):
        assert torch.equal(expected, other)


@pytest.mark.parametrize(("family", "name"), ALL)
def test_sdpa_equals_eager(family, name):
    model = make(family, name)
    eager = outputs(model, family).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(outputs(model, family).logits, eager, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", WITH_STOCK)
def test_modules_own_no_buffers_for_positions(family):
    model = make(family, "cape")
    stock = FAMILIES[family].build_stock()
    assert {n for n, _ in model.named_buffers()} <= {n for n, _ in stock.named_buffers()}

"""Types in attention for families whose stock models add positions: the layers of generated
families compute what the layers of a family with a file do, with padding, caches, checkpointing."""

import copy
import pickle

import pytest
import torch
import transformers

import hf_models
from cape_plugins import TYPES as REGISTRY
from tests.hf import test_grids, test_rows, test_sinusoids, test_video
from tests.hf.test_rows import PAD, output, texts
from tests.support.expected import IN_ATTENTION

OPTIONS = {"relative_context": 4, "max_local_shift": 0.5, "max_global_scale": 2.0}
TYPES = {
    name: {"type": name, **{k: v for k, v in OPTIONS.items() if k in REGISTRY[name].options}}
    for name in IN_ATTENTION
}
TYPES["cape-relative"] = {"type": "cape", "relative_context": 4}
types = pytest.mark.parametrize("name", TYPES)
ENCODERS = ("roberta", "electra", "distilbert", "clip_text_model")
DECODERS = ("gpt2", "opt", "biogpt")
IMAGES = ("clip_vision_model", "vit_msn", "ijepa")
COMPUTES_ITSELF = ("mpnet", "lilt", "gpt_neo")
WITH_LOGITS = {"output_logits": True, "return_dict_in_generate": True}


def switched(stock, name, **options):
    torch.manual_seed(3)
    model = hf_models.switch(copy.deepcopy(stock), {**TYPES[name], **options}).eval()
    with torch.no_grad():  # new relative embeddings and biases must show
        for path, parameter in model.named_parameters():
            if ".relative." in path or ".layer_bias." in path:
                parameter.normal_(std=0.5)
    return model


def bert_like(stock):
    """A stock BERT with the weights of a RoBERTa, whose layers are the same."""
    sizes = {key: value for key, value in stock.config.to_dict().items() if key != "model_type"}
    bert = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    bert.load_state_dict(stock.base_model.state_dict(), strict=False)
    return bert


@pytest.mark.parametrize("name", IN_ATTENTION)
def test_layers_compute_what_a_family_with_a_file_does(name):
    """With the same weights and draws, padded and not, in evaluation and in training."""
    stock = test_rows.build("roberta")
    generated, by_file = switched(stock, name).base_model, switched(bert_like(stock), name)
    by_file.load_state_dict(generated.state_dict(), strict=False)
    ids, mask = texts(), torch.ones(2, 12).long()
    mask[1, 9:] = 0
    for training in (False, True):
        states = []
        for model in (generated, by_file):
            torch.manual_seed(8)
            result = model.train(training)(ids.masked_fill(mask == 0, PAD), attention_mask=mask)
            states.append(result.last_hidden_state[mask.bool()])
        torch.testing.assert_close(*states)
    evaluation = generated.eval()(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    draws = generated.config.position_config.random
    assert draws != torch.allclose(states[0], evaluation)


@types
@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_padding_on_either_side_changes_nothing(name, family):
    model, ids = switched(test_rows.build(family), name), texts(12)
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    right = ids.masked_fill(mask == 0, PAD)
    left, left_mask = (torch.cat((t[:, 9:], t[:, :9]), 1) for t in (right, mask))
    expected, close = output(model, ids[1:, :9])[0], {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(output(model, right, mask)[1, :9], expected, **close)
    torch.testing.assert_close(output(model, left, left_mask)[1, 3:], expected, **close)


@types
@pytest.mark.parametrize("family", DECODERS)
def test_generation_equals_teacher_forcing(name, family):
    """Greedy with a cache, of texts padded on the left; with beams; with a cache of fixed size."""
    model = switched(test_rows.build(family), name)
    model.generation_config.eos_token_id = None
    ids = texts(8)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    ids = ids.masked_fill(mask == 0, PAD)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
    options |= {"input_ids": ids, "attention_mask": mask}
    out = model.generate(**options, **WITH_LOGITS)
    whole = torch.cat((mask, torch.ones(2, 6).long()), 1)
    forced = output(model, out.sequences, whole)[:, 7:-1]
    torch.testing.assert_close(torch.stack(out.logits, 1), forced, atol=1e-4, rtol=1e-4)
    beams = model.generate(**options, num_beams=2)
    assert torch.equal(model.generate(**options, num_beams=2, use_cache=False), beams)
    if type(model)._can_compile_fullgraph:
        fixed = model.generate(**options, cache_implementation="static", disable_compile=True)
        assert torch.equal(fixed, out.sequences)


@types
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_runs_layers_again_with_the_same_positions(name, reentrant):
    model = switched(test_rows.build("gpt2"), name).train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        losses = []
        for seed in (1, 2):  # two forwards before a backward
            torch.manual_seed(seed)
            losses.append(model(texts(), use_cache=False).logits.square().mean())
        sum(losses).backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for path, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][path], gradient, msg=path)


@types
@pytest.mark.parametrize("family", ["roberta", "opt", "clip_vision_model"])
def test_models_are_copied_pickled_saved_and_switched_back(name, family, tmp_path):
    inputs, result = texts(), output
    stock = (test_grids if family in test_grids.MODELS else test_rows).build(family)
    if family in test_grids.MODELS:
        inputs, result = test_grids.images(24, 40), test_grids.output
    model = switched(stock, name)
    expected = result(model, inputs)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert torch.equal(result(other, inputs), expected)
    back = hf_models.switch(model, {"type": "nopos"}).eval()
    once = hf_models.switch(copy.deepcopy(stock), {"type": "nopos"}).eval()
    assert torch.equal(result(back, inputs), result(once, inputs))
    assert not torch.allclose(result(back, inputs), expected)


@types
@pytest.mark.parametrize("family", IMAGES)
def test_patches_are_at_their_places(name, family):
    """A part of an image that moves by whole patches is seen at another place, unless all moves:
    what is the same everywhere in the image does not depend on size for rope and biases alone."""
    model = switched(test_grids.build(family), name, max_local_shift=0.0, max_global_scale=1.0)
    pixels = test_grids.images(32, 48)
    expected = test_grids.output(model, pixels)
    swapped = pixels.clone()
    swapped[..., :8, :8], swapped[..., :8, 24:32] = pixels[..., :8, 24:32], pixels[..., :8, :8]
    assert not torch.allclose(test_grids.output(model, swapped), expected, atol=1e-4)
    # one image alone is as in a batch
    torch.testing.assert_close(test_grids.output(model, pixels[:1]), expected[:1])


def test_relative_distances_of_patches_equal_a_family_with_a_file():
    """ViT-MSN is a ViT with other heads: the same weights give the same states."""
    stock = test_grids.build("vit_msn")
    config = transformers.ViTConfig(**test_grids.SIZES, layer_norm_eps=stock.config.layer_norm_eps)
    vit = transformers.ViTModel(config, add_pooling_layer=False).eval()
    pixels = test_grids.images(24, 40)
    for name in TYPES:
        generated = switched(stock, name)
        by_file = switched(vit, name)
        by_file.load_state_dict(generated.base_model.state_dict())
        expected = by_file(pixels).last_hidden_state
        actual = generated.base_model.eval()(pixels).last_hidden_state
        torch.testing.assert_close(actual, expected, msg=name)


@types
@pytest.mark.parametrize("family", ["nllb-moe"])
def test_sources_and_targets_have_positions_in_self_attention_only(name, family):
    model = switched(test_sinusoids.build(family), name)
    ids = torch.randint(5, 60, (2, 9))
    model.generation_config.eos_token_id = None
    options = {"input_ids": ids, "max_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
    cached = model.generate(**options, num_beams=2)
    assert torch.equal(model.generate(**options, num_beams=2, use_cache=False), cached)
    out = model.generate(**options, **WITH_LOGITS)
    forced = model(input_ids=ids, decoder_input_ids=out.sequences[:, :-1]).logits
    torch.testing.assert_close(torch.stack(out.logits, 1), forced, atol=1e-4, rtol=1e-4)
    for path, module in model.named_modules():
        has_positions = hasattr(module, "layer_bias")
        assert has_positions == (path.split(".")[-1] == "self_attn"), path


@pytest.mark.parametrize("family", COMPUTES_ITSELF)
def test_attention_without_the_interface_is_refused(family):
    with pytest.raises(ValueError, match="does not look its attention function up.*such as 'cape'"):
        hf_models.switch(test_rows.build(family), {"type": "rope"})


def test_a_model_that_hides_patches_is_refused():
    with pytest.raises(ValueError, match="hides or reorders tokens"):
        hf_models.switch(test_grids.build("vit_mae"), {"type": "rope"})


def test_layers_without_positions_see_none():
    stock, ids = test_rows.build("roberta"), texts()
    first = switched(stock, "rope", layers="first")
    assert len(first.layer_paths) == 1
    none = hf_models.switch(copy.deepcopy(stock), {"type": "nopos"}).eval()
    every = switched(stock, "rope")
    outputs = [output(model, ids) for model in (first, none, every)]
    assert not torch.allclose(outputs[0], outputs[1])
    assert not torch.allclose(outputs[0], outputs[2])


@pytest.mark.parametrize("type_name", ["rope", "alibi"])
def test_positions_in_attention_depend_on_distances_alone(type_name):
    """More frames before and behind are further tubelets, which keep the others where they are; two
    tubelets that change places change the output."""
    model = test_video.switched(test_video.build("vivit"), type=type_name)
    clip = test_video.videos(8)
    assert model(clip).logits.isfinite().all()
    swapped = clip.clone()
    swapped[:, :2], swapped[:, 4:6] = 2 * clip[:, 4:6], clip[:, :2]
    both = clip.clone()
    both[:, :2], both[:, 4:6] = clip[:, :2], 2 * clip[:, 4:6]
    assert not torch.allclose(model(swapped).logits, model(both).logits, atol=1e-5)
    layer, seen = model.get_submodule(model.layer_paths[0]), []
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["facts"].positions.key), with_kwargs=True
    )
    for frames in (4, 8):
        model(test_video.videos(frames))
    few, many = seen  # [1, tubelets, 3]
    middle = many.shape[1] // 2 - few.shape[1] // 2
    inner = many[:, middle : middle + few.shape[1]]
    assert torch.equal(few, inner)  # seconds from the middle

"""Models of videos: frames x rows x columns, time in seconds from the middle of the video."""

import math

import pytest
import torch
import transformers

import hf_models
from cape_plugins import Draw
from tests.support.expected import IN_ATTENTION, acts_in_attention, types_whose
from tests.support.generated import drawn, switched

FRAMES, SIZE, PATCH = 4, 16, 8
STACK = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SIZES = {**STACK, "hidden_size": 24, "image_size": SIZE, "num_frames": FRAMES, "num_labels": 3}
DECODER = {"decoder_hidden_size": 12, "decoder_num_hidden_layers": 1}
DECODER |= {"decoder_num_attention_heads": 2, "decoder_intermediate_size": 16}


def videomae(**fields):
    return transformers.VideoMAEConfig(**{**SIZES, **fields}, patch_size=PATCH, **DECODER)


def vivit(**fields):
    return transformers.VivitConfig(**{**SIZES, **fields}, tubelet_size=[2, PATCH, PATCH])


def timesformer(**fields):
    return transformers.TimesformerConfig(**{**SIZES, **fields}, patch_size=PATCH)


# the class, its configuration, and the frames of a position
MODELS = {
    "videomae": (transformers.VideoMAEForVideoClassification, videomae, 2),
    "vivit": (transformers.VivitForVideoClassification, vivit, 2),
    "timesformer": (transformers.TimesformerForVideoClassification, timesformer, 1),
}
EACH = pytest.mark.parametrize("name", MODELS)
CAPE = {"type": "cape", "max_global_shift": 2.0, "max_global_scale": 1.5}


def build(name, **fields):
    model_class, config, _ = MODELS[name]
    return drawn(model_class(config(**fields)))


def build_masked():
    return drawn(transformers.VideoMAEForPreTraining(videomae()))


def videos(frames=FRAMES, height=SIZE, width=SIZE, number=2):
    torch.manual_seed(1)
    return torch.randn(1, frames, 3, height, width).repeat(number, 1, 1, 1, 1)


def added(model, inputs, number=0, **arguments):
    """``[1 or B, frames, rows, columns, C]``, what a seam adds to the tubelets."""
    seam = [seam for seam in model.seams() if hasattr(seam, "embed_patches")][number]
    seen, stock = [], seam.embed_patches
    seam.embed_patches = lambda grid, *args: seen.append((stock(grid, *args), grid)) or seen[0][0]
    try:
        model(inputs, **arguments)
    finally:
        del seam.embed_patches
    ((embedding, grid),) = seen
    return embedding.unflatten(1, grid)


def sinusoids(coords, width):
    """Of ``[..., 3]`` x, y and time, worked out apart from the library."""
    k = torch.arange(1, width // 2 + 1)
    height = 2 * torch.frac(k * (math.sqrt(5) - 1) / 2) - 1
    radius = (1 - height**2).sqrt()
    waves = torch.stack((radius * k.cos(), radius * k.sin(), height / 2))
    phase = coords @ (math.pi * 10 ** (2 * k / width) * waves)
    return torch.stack((phase.cos(), phase.sin()), -1).flatten(-2)


def coordinates(frames, rows, columns, seconds):
    times = (torch.arange(frames) - (frames - 1) / 2) * seconds
    axes = times, torch.linspace(-1, 1, rows), torch.linspace(-1, 1, columns)
    return torch.stack(torch.meshgrid(*axes, indexing="ij")[::-1], -1)


def test_stock_type_of_joint_attention_is_the_stock_model():
    stock = build("timesformer", attention_type="joint_space_time")
    model = switched(stock, type="abspos")
    assert torch.equal(model(videos()).logits, stock(videos()).logits)
    assert switched(stock, **CAPE)(videos(6)).logits.isfinite().all()


def test_a_model_without_a_table_of_frames_is_refused():
    with pytest.raises(ValueError, match="has no part that knows positions"):
        switched(build("timesformer", attention_type="space_only"), **CAPE)


def test_a_fixed_table_is_resized_to_the_video():
    stock = build("videomae")
    model = switched(stock, type="abspos")
    seam, seen = model.videomae.embeddings.position_embeddings, []
    rows = seam.rows
    seam.rows = lambda: seen.append(rows()) or seen[0]
    model(videos(8, 16, 24))
    image = stock.videomae.embeddings.position_embeddings[0].T.reshape(1, 24, 2, 2, 2)
    expected = torch.nn.functional.interpolate(image, (4, 2, 3), mode="trilinear")
    torch.testing.assert_close(seen[0][0], expected.flatten(2)[0].T)


@EACH
def test_tubelets_stand_at_their_seconds(name):
    """Those of the second video are moved by a draw."""
    frames_of_one = MODELS[name][2]
    model = switched(build(name), **CAPE, max_local_shift=0.0).train()
    shift = torch.tensor([[[0.0, 0.0, 0.0]], [[0.1, -0.2, 1.5]]])
    draw = Draw(shift, torch.tensor([1.0, 1.2]).view(2, 1, 1), batch_size=2)
    actual = added(model, videos(), draw=draw)
    # every fourth frame of 30 a second
    coords = coordinates(FRAMES // frames_of_one, 2, 2, frames_of_one * 4 / 30)
    torch.testing.assert_close(actual[0], sinusoids(coords, 24), rtol=0, atol=1e-4)
    moved = (coords + torch.tensor([0.1, -0.2, 1.5])) * 1.2
    torch.testing.assert_close(actual[1], sinusoids(moved, 24), rtol=0, atol=2e-4)


@EACH
def test_more_frames_reach_further_and_keep_their_seconds(name):
    frames_of_one = MODELS[name][2]
    model = switched(build(name), type="sinpos", seconds_per_frame=0.5)
    short, long = added(model, videos()), added(model, videos(3 * FRAMES))
    assert long.shape[1] == 3 * short.shape[1]
    first = short.shape[1]  # the same middle
    torch.testing.assert_close(long[:, first : 2 * first], short, rtol=0, atol=1e-4)
    seconds = 0.5 * frames_of_one
    expected = sinusoids(coordinates(3 * FRAMES // frames_of_one, 2, 2, seconds), 24)
    torch.testing.assert_close(long[0], expected, rtol=0, atol=2e-4)


@EACH
def test_without_a_rate_each_video_spans_one_square(name):
    model = switched(build(name), type="sinpos", seconds_per_frame=0)
    actual = added(model, videos(3 * FRAMES))
    frames = actual.shape[1]
    expected = sinusoids(coordinates(frames, 2, 2, 2 / (frames - 1)), 24)
    torch.testing.assert_close(actual[0], expected, rtol=0, atol=1e-4)


FREE = types_whose(lambda row: not (acts_in_attention(row) or row.counts), "video")
TYPES = [(name, type_name) for name in MODELS for type_name in FREE]
# without the stock tables of ViViT and TimeSformer, for which stock code decides
TYPES += [("videomae", type_name) for type_name in types_whose(lambda row: row.counts, "video")]


@pytest.mark.parametrize(("name", "type_name"), TYPES)
def test_videos_of_any_size(name, type_name):
    model = switched(build(name), type=type_name)
    for frames, height, width in ((2, 8, 8), (12, 16, 16), (4, 24, 40), (6, 40, 24)):
        inputs = videos(frames, height, width)
        assert model.train()(inputs).logits.isfinite().all()
        logits = model.eval()(inputs).logits
        assert logits.isfinite().all()
        torch.testing.assert_close(logits[0], logits[1])


@EACH
def test_a_video_without_a_tubelet_is_refused(name):
    model = switched(build(name), **CAPE)
    with pytest.raises(ValueError, match=r"4 frames of 7 x 16 pixels is smaller than a tubelet"):
        model(videos(height=7))
    if MODELS[name][2] > 1:
        with pytest.raises(ValueError, match=r"video of 1 frames .* Give more frames"):
            model(videos(1))


@pytest.mark.parametrize("type_name", IN_ATTENTION)
def test_positions_in_attention_need_layers_that_see_all_tubelets(type_name):
    """VideoMAE hides tubelets from its layers in pretraining, TimeSformer divides attention."""
    for name in ("videomae", "timesformer"):
        with pytest.raises(ValueError, match="no layer takes them"):
            switched(build(name), type=type_name)


@pytest.mark.parametrize("type_name", ["abspos", "cape"])
def test_layers_of_divided_attention_see_the_frames_of_the_video(type_name):
    """A model that was made for as many frames has the same layers."""
    model = switched(build("timesformer"), type=type_name)
    larger = build("timesformer")
    larger.config.num_frames = 6
    seen = []
    handle = model.timesformer.encoder.register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    actual = model(videos(6)).logits
    handle.remove()
    if type_name == "abspos":
        torch.testing.assert_close(seen[0], model.timesformer.embeddings(videos(6)))
    hidden = larger.timesformer.encoder(seen[0])[0]
    expected = larger.classifier(larger.timesformer.layernorm(hidden)[:, 0])
    torch.testing.assert_close(actual, expected)


def test_checkpointed_layers_see_the_frames_of_the_video():
    gradients = []
    for is_on in (False, True):
        model = switched(build("timesformer"), type="sinpos").train()
        if is_on:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(videos(6), draw=Draw(batch_size=2)).logits.square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def masked(tubelets, number=2):
    mask = torch.zeros(number, tubelets, dtype=torch.bool)
    mask[0, : tubelets // 2] = mask[1, ::2] = True
    return mask


def test_a_masked_tubelet_has_its_place_in_encoder_and_decoder():
    """The decoder has visible tubelets first, each with the position of its place in the video."""
    model, inputs, mask = switched(build_masked(), type="sinpos"), videos(8), masked(16)
    encoded, decoded = [], []
    model.videomae.encoder.register_forward_pre_hook(lambda _, args: encoded.append(args[0]))
    model.decoder.register_forward_pre_hook(lambda _, args: decoded.append(args[0]))
    assert model(inputs, bool_masked_pos=mask).loss.isfinite()
    projected = model.videomae.embeddings.patch_embeddings.projection(inputs.transpose(1, 2))
    content, coords = projected.flatten(2).transpose(1, 2), coordinates(4, 2, 2, 8 / 30)
    for side, width, first in (("encoder", 24, encoded[0]), ("decoder", 12, decoded[0])):
        places = sinusoids(coords, width).flatten(0, 2)
        for video, of_video in enumerate(mask):
            if side == "encoder":
                expected = content[video][~of_video] + places[~of_video]
            else:
                # every hidden token holds the same vector, beside its position
                expected = model.mask_token[0] + places[of_video]
                first = first[:, -int(of_video.sum()) :]
            torch.testing.assert_close(first[video], expected, rtol=0, atol=1e-4)


def test_encoder_and_decoder_of_masked_videos_share_the_draw():
    model, mask, draws = switched(build_masked(), **CAPE).train(), masked(8), []
    for seam in model.seams():
        if hasattr(seam, "embed_patches"):
            stock = seam.embed_patches
            seam.embed_patches = lambda grid, draw, like, stock=stock: (
                draws.append(draw) or stock(grid, draw, like)
            )
    model(videos(), bool_masked_pos=mask)
    encoder_draw, decoder_draw = draws
    assert encoder_draw is decoder_draw
    assert encoder_draw.shift.shape == (2, 1, 3)
    model = switched(build_masked(), **CAPE, max_local_shift=0.0).train()
    coords = coordinates(2, 2, 2, 8 / 30)
    draw = Draw(torch.tensor([[[0.0, 0.0, 0.7]], [[0.3, 0.0, 0.0]]]), batch_size=2)
    for number, width in enumerate((24, 12)):
        actual = added(model, videos(), number, bool_masked_pos=mask, draw=draw)
        for embedding, shift in zip(actual, draw.shift, strict=True):
            expected = sinusoids(coords + shift[0], width)
            torch.testing.assert_close(embedding, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["vivit", "timesformer"])
def test_class_tokens_get_their_rows(name):
    """A table of zeros but for the row of the class token is not lost."""
    stock, inputs = build(name), videos()
    embeddings = getattr(stock, name).embeddings
    with torch.no_grad():
        embeddings.position_embeddings[:, 1:].zero_()
        if name == "timesformer":
            embeddings.time_embeddings.zero_()
    torch.testing.assert_close(switched(stock, type="nopos")(inputs).logits, stock(inputs).logits)


@EACH
def test_each_video_has_a_draw_in_training_alone(name):
    model, inputs = switched(build(name), **CAPE), videos()
    still = model(inputs).logits
    assert torch.equal(model(inputs).logits, still)
    moved = model.train()(inputs).logits
    assert not torch.allclose(moved[0], moved[1], atol=1e-3)
    torch.testing.assert_close(model.eval()(inputs).logits, still)


def test_a_fixed_table_comes_back_when_the_model_is_switched_again():
    """VideoMAE's table is a plain attribute."""
    stock, inputs = build("videomae"), videos(4)  # as many frames as the table
    model = switched(switched(stock, **CAPE), type="abspos")
    assert torch.equal(model(inputs).logits, stock(inputs).logits)


@EACH
def test_a_stock_checkpoint_is_loaded_without_a_warning(name, tmp_path, capsys):
    stock = build(name)
    if name != "videomae":  # the row of the class token goes with the table
        with torch.no_grad():
            getattr(stock, name).embeddings.position_embeddings[:, 0].zero_()
    stock.save_pretrained(tmp_path)
    model = transformers.AutoModelForVideoClassification.from_pretrained(
        tmp_path, position_embedding=CAPE
    )
    assert torch.equal(model.eval()(videos(6)).logits, switched(stock, **CAPE)(videos(6)).logits)
    assert "UNEXPECTED" not in capsys.readouterr().err


@pytest.mark.parametrize("name", [*MODELS, "masked"])
def test_a_users_model_is_compared_with_its_stock_model(name):
    rows = hf_models.check_family(build_masked() if name == "masked" else build(name))
    assert not [row for row in rows if row.failed]
    names = {row.name: row.status for row in rows}
    assert names["cape: training draws positions"] == "ok"

"""Pictures of fairseq checkpoints: embeddings that are read from a file equal the embeddings that
the model adds."""

import argparse

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY

from cape_plugins import PositionEncoder
from cape_plugins.checkpoints.stack import read_stack
from cape_plugins.pictures.views import relative_views
from tests.support.fairseq_models import FIRST_WORD, START, build, load, make_dictionary
from tests.support.fairseq_speech import CTC, S2T, SEQ2SEQ, SIZES, TYPES, make_model

pytest.importorskip("matplotlib")

LENGTH = 70  # beyond the tables of tiny models, which then wrap around


def rows_of(stack, size):
    with torch.no_grad():
        return stack.encoder.eval()(stack.positions(size))[0]


def saved(path, model, settings):
    """A checkpoint as fairseq-train writes it, without optimizer."""
    torch.save({"args": None, "cfg": {"model": settings}, "model": model.state_dict()}, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["abspos", "cape", "lm", "stock"])
def test_what_is_read_is_what_the_model_adds(name, trained, corpus):
    path = trained(name)
    data = corpus.lm if name == "lm" else corpus.binary
    model, _ = load(path, data)
    tokens = torch.full((1, LENGTH), FIRST_WORD)
    sides = ("decoder",) if name == "lm" else ("encoder", "decoder")
    for side in sides:
        stack = read_stack(path, side)
        with torch.no_grad():
            expected = getattr(model, side).embed_positions(tokens)[0]
        assert torch.allclose(rows_of(stack, LENGTH), expected, atol=1e-5), side
        if name not in ("stock", "lm"):
            assert stack.config == model.position_config
        assert float(stack.encoder.rows_and_step(stack.positions(1))[0]) == START
    assert read_stack(path).name.startswith(f"{path.parent.name}/checkpoint_last.pt")
    if name == "lm":
        with pytest.raises(ValueError, match="--side encoder.*allowed: decoder"):
            read_stack(path, "encoder")


def test_relative_embeddings_come_from_the_layers(tmp_path):
    settings = {"position_embedding": "relpos", "position_relative_context": 2}
    settings |= {"encoder_embed_dim": 32, "decoder_embed_dim": 32}
    model = build(**settings)
    path = saved(tmp_path / "x.pt", model, argparse.Namespace(**settings))
    for side in ("encoder", "decoder"):
        views = relative_views(read_stack(path, side))
        layers = getattr(model, side).layers
        assert [view.state for view in views] == [f"layer {n}, keys" for n in range(len(layers))]
        for view, layer in zip(views, layers, strict=True):
            keys = layer.self_attn.relative.keys.detach()[0]
            count = 3 if side == "decoder" else 5  # it never looks to the right
            assert view.embedding.tolist() == keys[:count].tolist()
            assert view.places[:, 0].tolist() == [-2, -1, 0, 1, 2][:count]
    assert read_stack(path, "decoder").name == f"{tmp_path.name}/x.pt, decoder"


@pytest.mark.parametrize(
    ("arch", "name"),
    [(CTC, "abspos"), (CTC, "shape"), (S2T, "cape"), (S2T, "abspos"), (SEQ2SEQ, "cape")],
)
def test_speech_models_are_read_in_seconds_or_steps(arch, name, tmp_path):
    """Frames in seconds, whether the encoder counts seconds or steps."""
    words = make_dictionary()
    task = argparse.Namespace(source_dictionary=words, target_dictionary=words)
    model = make_model(task, arch, name).eval()
    settings = argparse.Namespace(arch=arch, **SIZES, **TYPES[name])
    ARCH_CONFIG_REGISTRY[arch](settings)
    path = saved(tmp_path / "x.pt", model, settings)
    outputs = {}

    def noting(side):
        return lambda module, args, output: outputs.setdefault(side, output[0].detach())

    for module_name, module in model.named_modules():
        if isinstance(module, PositionEncoder):
            module.register_forward_hook(noting(module_name.partition(".")[0]))
    frames, previous = torch.randn(1, 60, 8), torch.full((1, 5), FIRST_WORD)
    with torch.no_grad():
        model(src_tokens=frames, src_lengths=torch.tensor([60]), prev_output_tokens=previous)
    for side, expected in outputs.items():
        rows = rows_of(read_stack(path, side), len(expected))
        assert torch.allclose(rows, expected, atol=1e-5), side
    stack = read_stack(path)
    stride = 4 if arch == S2T else 3
    assert len(outputs["encoder"]) == 60 / stride
    assert stack.spacing == pytest.approx(0.01 * stride)
    assert stack.config.domain == "audio"

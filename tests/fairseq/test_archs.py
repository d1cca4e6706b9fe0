"""Proves that every runnable architecture of the Transformer and language-model families has a
``cape_`` twin that builds, trains and evaluates; and that the twin without augmentation computes
the same as the stock architecture."""

import pytest
import torch
from fairseq.models import ARCH_MODEL_INV_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.models.nat import FairseqNATModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel

import fairseq_user_dir
from cape_plugins import ENCODINGS, TYPES
from fairseq_user_dir.attention import PositionSelfAttention
from fairseq_user_dir.embedding import TokenPositionEmbedding
from fairseq_user_dir.models import NOT_RUNNABLE
from tests.support.expected import IN_ATTENTION
from tests.support.fairseq_models import (
    SAMPLED,
    START,
    arguments,
    batch,
    build,
    build_lm,
    configure,
    decoder_input,
    differences,
    loss_of,
    random_numbers_untouched,
    record,
    step_by_step,
    switched_off,
    train,
)
from tests.support.triangle import Triangle, add_triangle

FAMILIES = (TransformerModel, TransformerLanguageModel)
STOCK_MODELS = {
    name: model
    for name, model in MODEL_REGISTRY.items()
    if issubclass(model, FAMILIES) and not name.startswith("cape_") and name not in NOT_RUNNABLE
}
SEQ2SEQ = [
    arch
    for name, model in STOCK_MODELS.items()
    if issubclass(model, TransformerModel)
    for arch in ARCH_MODEL_INV_REGISTRY[name]
]
LANGUAGE_MODELS = ARCH_MODEL_INV_REGISTRY["transformer_lm"]


def test_each_stock_arch_has_a_twin_unless_it_does_not_run():
    assert fairseq_user_dir.CLASSES.keys() == STOCK_MODELS.keys()
    speech = ("cape_ctc_transformer", "cape_seq2seq_transformer", "cape_s2t_transformer")
    twins = {arch for arch in ARCH_MODEL_REGISTRY if arch.startswith("cape_")}
    twins -= {arch for name in speech for arch in ARCH_MODEL_INV_REGISTRY[name]}
    assert twins == {
        f"cape_{arch}" for name in STOCK_MODELS for arch in ARCH_MODEL_INV_REGISTRY[name]
    }
    # a stock model that begins to run must not be left out; one that is new is not overlooked
    assert len(SEQ2SEQ) >= 26
    assert len(LANGUAGE_MODELS) >= 20
    for name in NOT_RUNNABLE:
        assert f"cape_{name}" not in MODEL_REGISTRY


def stock_model_of(arch):
    return next(name for name in STOCK_MODELS if arch in ARCH_MODEL_INV_REGISTRY[name])


def build_seq2seq(arch, **settings):
    needed = {"pooler_dropout": 0.0, "dropout": 0.1} if "bart" in arch else {}
    return build(arch, **{**needed, **settings})


def forward(model, seed=0):
    """The outputs of one batch, as a list of float tensors."""
    source, previous = batch(seed)
    lengths = source.ne(1).sum(1)
    if not isinstance(model, FairseqNATModel):
        return [model(source, lengths, previous)[0]]
    target = torch.tensor(
        [[0, 5, 6, 7, 8, 2], [0, 9, 10, 11, 2, 1], [0, 6, 7, 8, 9, 2], [0, 5, 7, 2, 1, 1]]
    )
    noisy = target.masked_fill(torch.arange(6) == 2, 3)
    parts = model(source, lengths, noisy, target).values()
    tensors = [part.get("out") for part in parts if isinstance(part, dict)]
    return [t for t in tensors if t is not None and t.is_floating_point()]


def total(outputs):
    return sum(output.float().softmax(-1)[..., 0].sum() for output in outputs)


def first_positions(recorder, tokens):
    """``[calls, B]`` the coordinate of the first token in each recorded call."""
    first = tokens.ne(1).int().argmax(1)
    return torch.stack([coords[torch.arange(len(first)), first, 0] for coords in recorder.seen])


@pytest.mark.parametrize("arch", SEQ2SEQ)
def test_cape_arch_trains_with_one_shift_a_pair_and_none_in_evaluation(arch):
    model = build_seq2seq(f"cape_{arch}", position_source_bos=False, position_max_local_shift=0)
    assert isinstance(model, fairseq_user_dir.CLASSES[stock_model_of(arch)])
    source_side, target_side = record(model.encoder), record(model.decoder)
    total(forward(model.train())).backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert gradients.isfinite().all()
    assert gradients.any()
    # one shift per sentence pair, however often a model calls its decoder
    source, previous = batch()
    shift = first_positions(source_side, source) - START
    assert shift.shape == (1, 4)
    assert shift.abs().min() > 0
    decoder_shift = first_positions(target_side, previous) - START
    assert torch.allclose(decoder_shift, shift.expand_as(decoder_shift))
    with random_numbers_untouched():
        first, second = (model.eval().encoder(source, source.ne(1).sum(1)) for _ in range(2))
    assert torch.equal(first["encoder_out"][0], second["encoder_out"][0])


@pytest.mark.parametrize("name", IN_ATTENTION)
@pytest.mark.parametrize("arch", {stock_model_of(arch): arch for arch in SEQ2SEQ}.values())
def test_types_in_attention_train_in_each_model(arch, name):
    """In all layers of both stacks; training moves positions, and evaluation does not."""
    scaled = "max_global_scale" in TYPES[name].options
    options = {"position_max_global_scale": 1.4} if scaled else {}
    off = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    model = build_seq2seq(f"cape_{arch}", position_embedding=name, **options, **off).train()
    for stack in (model.encoder, model.decoder):
        attentions = [layer.self_attn for layer in stack.layers]
        assert all(isinstance(attention, PositionSelfAttention) for attention in attentions)
    total(forward(model)).backward()
    gradients = [
        p.grad for n, p in model.named_parameters() if ".relative." in n or ".layer_bias." in n
    ]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(map(torch.any, gradients)) == ENCODINGS[TYPES[name].encoding].learned
    source, _ = batch()
    for training in (True, False):
        model.train(training)
        first, second = (model.encoder(source, source.ne(1).sum(1)) for _ in range(2))
        same = torch.equal(first["encoder_out"][0], second["encoder_out"][0])
        assert same == (not (training and scaled))


@pytest.mark.parametrize("arch", SEQ2SEQ)
def test_twin_equals_stock(arch):
    stock = build_seq2seq(arch)
    name = "abspos" if hasattr(stock.encoder.embed_positions, "weight") else "cape"
    results = []
    for model in (
        stock,
        build_seq2seq(f"cape_{arch}", position_embedding=name, **switched_off(name)),
    ):
        model.train()
        torch.manual_seed(2)
        outputs = forward(model)
        total(outputs).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((model.state_dict(), dict(enumerate(outputs)), gradients))
    for ours, theirs in zip(*results, strict=True):
        assert differences(ours, theirs) == []


def build_language_model(arch, *words, **more):
    if "wiki103" in arch or "gbw" in arch:  # the vocabulary has 24 words
        words += ("--adaptive-softmax-cutoff", "8,16")
    if "wiki103" in arch:
        words += ("--adaptive-input-cutoff", "8,16")
    return build_lm(*words, arch=arch, **more)


@pytest.mark.parametrize("arch", LANGUAGE_MODELS)
def test_language_model_arch_trains_and_equals_stock(arch):
    """Trains with cape, and equals the stock arch without augmentation."""
    stock = build_language_model(arch)
    assert stock.decoder.embed_dim == 32
    plain = "abspos" if hasattr(stock.decoder.embed_positions, "weight") else "sinpos"
    twin = build_language_model(f"cape_{arch}", "--position-embedding", plain)
    assert list(twin.state_dict()) == list(stock.state_dict())
    assert differences(dict(twin.named_parameters()), dict(stock.named_parameters())) == []
    previous = decoder_input()
    assert torch.equal(twin.eval()(previous)[0], stock.eval()(previous)[0])

    read = arguments if "gpt" in arch else configure  # much slower
    model = build_language_model(f"cape_{arch}", read=read).train()
    assert model.position_config.type == "cape"
    recorder = record(model.decoder)
    total([model(previous)[0]]).backward()
    assert model.decoder.layers[0].fc1.weight.grad.abs().max() > 0
    shift = first_positions(recorder, previous)[0] - START
    assert len(set(shift.tolist())) == len(shift)
    with random_numbers_untouched():
        assert torch.equal(model.eval()(previous)[0], model(previous)[0])


@pytest.mark.parametrize("name", SAMPLED)
def test_target_longer_than_its_draft_shares_the_draw_of_the_source(name):
    """Levenshtein's decoder reads a draft, with tokens left out, and then the whole target."""
    settings = {"position_embedding": name, "position_source_scale": "1"}
    model = build_seq2seq("cape_levenshtein_transformer", **settings)
    source_side, target_side = record(model.encoder), record(model.decoder)
    source = torch.tensor([[0, 5, 2], [0, 6, 2]])
    target = torch.tensor([[0, 5, 6, 7, 8, 9, 10, 11, 2], [0, 9, 10, 11, 5, 6, 7, 8, 2]])
    draft = target[:, [0, 3, 8]]
    model(source, torch.tensor([3, 3]), draft, target)
    (of_source,) = source_side.seen
    assert [coords.shape[1] for coords in target_side.seen] == [3, 9, 9]
    for coords in target_side.seen:
        assert torch.equal(coords[:, :3], of_source)


def test_a_model_takes_an_encoding_that_this_package_has_never_seen(monkeypatch):
    """The model is trained, and decodes what it has learned."""
    add_triangle(monkeypatch)
    cfg = configure("--position-embedding", "triangle", "--position-max-offset", 5)
    assert cfg.model.position_embedding == "triangle"
    model = build(position_embedding="triangle", position_max_offset=5)
    seam = model.encoder.embed_positions
    assert isinstance(seam, TokenPositionEmbedding)
    assert isinstance(seam.encoder.encoding, Triangle)
    before = loss_of(model.eval(), 0).item()
    assert loss_of(train(model), 0) != loss_of(model, 0)  # random in training
    assert loss_of(model.eval(), 0).item() < before
    (tokens, lengths), words = batch(), decoder_input(lengths=(6, 6, 6, 6))
    encoder_out = model.encoder(tokens, lengths)
    whole, _ = model.decoder(words, encoder_out)
    steps, _ = step_by_step(model.decoder, words, encoder_out=encoder_out)
    torch.testing.assert_close(steps, whole, atol=1e-5, rtol=1e-4)

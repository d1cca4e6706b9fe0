"""ADMIN: formula, profiling, and the ways in which fairseq runs a layer."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from fairseq_user_dir.admin import attach_admin, profile_admin
from tests.support.admin import attached, batch, build, loss_of, omegas, run, scatter_omegas


def test_layers_compute_the_formula_of_the_paper():
    model = attached().eval()
    encoder, decoder = model.encoder.layers[0], model.decoder.layers[1]
    x, memory = torch.randn(5, 3, 16), torch.randn(4, 3, 16)

    def attend(attention, query, keys):
        return attention(query, keys, keys)[0]

    def feed_forward(layer, x):
        return layer.fc2(torch.relu(layer.fc1(x)))

    w = encoder.admin.omega
    h = encoder.self_attn_layer_norm(attend(encoder.self_attn, x, x) + w[0] * x)
    expected = encoder.final_layer_norm(feed_forward(encoder, h) + w[1] * h)
    torch.testing.assert_close(encoder(x, None), expected)
    swapped = encoder.final_layer_norm(feed_forward(encoder, h) + w[0] * h)
    assert not torch.allclose(expected, swapped, atol=1e-3)  # the comparison can fail

    w = decoder.admin.omega
    h = decoder.self_attn_layer_norm(attend(decoder.self_attn, x, x) + w[0] * x)
    h = decoder.encoder_attn_layer_norm(attend(decoder.encoder_attn, h, memory) + w[1] * h)
    expected = decoder.final_layer_norm(feed_forward(decoder, h) + w[2] * h)
    torch.testing.assert_close(decoder(x, memory)[0], expected)


def test_unprofiled_omegas_change_nothing():
    stock, model = build().eval(), build().eval()
    attach_admin(model)
    torch.testing.assert_close(run(model, batch()), run(stock, batch()), atol=1e-6, rtol=1e-6)
    scatter_omegas(model)
    assert not torch.allclose(run(model, batch()), run(stock, batch()), atol=1e-3)


def test_without_cross_attention_there_are_two_sublayers():
    model = build(no_cross_attention=True)
    attach_admin(model)
    assert len(model.decoder.layers[0].admin.omega) == 2
    profile = profile_admin(model, *batch(), seed=3)
    assert len(profile.decoder) == 4
    assert model.decoder.layers[0].admin.omega[1].mean().item() == pytest.approx(profile.decoder[1])


def observe(layer):
    """Lists of the residuals (layer inputs and layer-norm outputs) and of the branches (what leaves
    the dropout module) of a layer, which its next forward fills."""
    residuals, branches = [], []
    layer.register_forward_pre_hook(lambda _, args: residuals.append(args[0]))
    for norm in (layer.self_attn_layer_norm, getattr(layer, "encoder_attn_layer_norm", None)):
        if norm is not None:
            norm.register_forward_hook(lambda _, args, out: residuals.append(out))
    layer.dropout_module.register_forward_hook(lambda _, args, out: branches.append(out))
    return residuals, branches


def check_recurrence(model, profile, seed):
    """Compares constants and omegas with those computed from the activations of the model."""
    model = copy.deepcopy(model).train()
    stacks = [model.encoder.layers, model.decoder.layers]
    seen = [[observe(layer) for layer in layers] for layers in stacks]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        run(model, batch())
    for constants, layers, flows in zip(profile, stacks, seen, strict=True):
        s, expected = 1.0, []
        for layer, (residuals, branches) in zip(layers, flows, strict=True):
            for r, f, omega in zip(residuals, branches, layer.admin.omega, strict=True):
                expected.append(s)
                torch.testing.assert_close(omega.detach(), torch.full((16,), s), atol=0, rtol=1e-5)
                f, r = f.numpy().astype("float64"), r.numpy().astype("float64")
                s = math.sqrt(((s * r) ** 2).mean() - (s * r).mean() ** 2 + f.var())
        assert constants[0] == 1.0
        assert constants == pytest.approx(expected, rel=1e-5)


def test_profile_follows_the_recurrence():
    model = build(dropout=0.2)
    attach_admin(model)
    profile = profile_admin(model, *batch(), seed=3)
    assert [len(constants) for constants in profile] == [4, 6]
    assert profile.encoder == sorted(profile.encoder)  # variances add up
    check_recurrence(model, profile, seed=3)
    with torch.no_grad():
        model.decoder.layers[1].admin.omega[2].mul_(1.001)
    with pytest.raises(AssertionError):
        check_recurrence(model, profile, seed=3)


def test_profile_has_dropout_from_its_seed_only():
    def constants(seed, dropout, ambient):
        model = build(dropout=dropout)
        attach_admin(model)
        torch.manual_seed(ambient)
        return profile_admin(model.eval(), *batch(), seed=seed)

    assert constants(3, 0.3, ambient=1) == constants(3, 0.3, ambient=2)
    assert constants(3, 0.3, ambient=1) != constants(4, 0.3, ambient=1)
    assert constants(3, 0.0, ambient=1) == constants(4, 0.0, ambient=1)


def test_profile_leaves_random_numbers_modes_and_gradients_alone():
    model = attached(dropout=0.3)
    model.eval()
    model.decoder.layers[0].train()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(8)
    state = torch.get_rng_state()
    first = profile_admin(model, *batch(), seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert profile_admin(model, *batch(), seed=3) == first, "whatever the omegas found"


def test_profile_measures_layers_that_layer_drop_would_skip():
    constants = []
    for probability in (0.0, 0.9):
        model = build(encoder_layerdrop=probability, decoder_layerdrop=probability, dropout=0.0)
        attach_admin(model)
        constants.append(profile_admin(model, *batch(), seed=3))
    assert constants[0] == constants[1]
    for _ in range(5):
        loss_of(model.train(), batch()).backward()  # any subset of the layers runs


def test_failed_profile_leaves_the_omegas_as_they_were():
    model = attached()
    before = {name: omega.clone() for name, omega in omegas(model).items()}
    with torch.no_grad():
        model.encoder.layers[1].fc2.weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"--admin-init: profiling gave .*(inf|nan).* for 10"):
        profile_admin(model, *batch(), seed=3)
    for name, omega in omegas(model).items():
        assert torch.equal(omega, before[name])
    assert model.encoder.layers[0].residual_connection == model.encoder.layers[0].admin.combine


def after_backward(model, loss):
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def gradients(model):
    torch.manual_seed(4)
    model.train().zero_grad()
    return after_backward(model, loss_of(model, batch()))


def assert_same_gradients(actual, expected):
    torch.testing.assert_close(actual[0], expected[0], atol=1e-6, rtol=1e-5)
    assert actual[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(actual[1][name], value, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("offload", [False, True])
def test_recomputed_activations_give_the_same_gradients(offload):
    plain = attached(dropout=0.2)
    recomputing = attached(dropout=0.2, checkpoint_activations=True, offload_activations=offload)
    assert hasattr(recomputing.encoder.layers[0], "precheckpoint_forward")
    expected = gradients(plain)
    assert_same_gradients(gradients(recomputing), expected)
    with torch.no_grad():
        recomputing.encoder.layers[1].admin.omega[1].mul_(1.1)
    with pytest.raises(AssertionError):
        assert_same_gradients(gradients(recomputing), expected)


@pytest.mark.parametrize(("sublayer", "recompute"), [("encoder_attn", True), ("fc2", False)])
def test_exception_inside_a_layer_leaves_no_trace(sublayer, recompute):
    """Raised in another forward, before the backward of the first; the batch after it, too."""
    model = attached(dropout=0.0, checkpoint_activations=recompute)
    expected = gradients(model)
    model.zero_grad()
    loss = loss_of(model, batch())

    def fail(*_):
        raise MemoryError

    hook = getattr(model.decoder.layers[1], sublayer).register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        run(model, batch())
    hook.remove()
    assert_same_gradients(after_backward(model, loss), expected)
    assert_same_gradients(gradients(model), expected)


@pytest.mark.parametrize(
    ("duplicate", "recompute"),
    [(copy.deepcopy, True), (lambda model: pickle.loads(pickle.dumps(model)), False)],
)
def test_copies_are_independent_and_states_carry_the_weights(duplicate, recompute):
    model = attached(dropout=0.0, checkpoint_activations=recompute).eval()
    expected = run(model, batch())
    double = duplicate(model)
    assert torch.equal(run(double, batch()), expected)
    other = attached(seed=2, dropout=0.0)
    other.load_state_dict(model.state_dict())
    assert torch.equal(run(other.eval(), batch()), expected)
    scatter_omegas(model, seed=1)
    assert not torch.allclose(run(model, batch()), expected, atol=1e-3)
    assert torch.equal(run(double, batch()), expected)
    scatter_omegas(double, seed=2)
    assert not torch.allclose(run(double, batch()), expected, atol=1e-3)
    assert_same_gradients(gradients(duplicate(model)), gradients(model))


UNSUITABLE = [
    ({"encoder_normalize_before": True}, "encoder.layers.0 .*--encoder-normalize-before is"),
    ({"decoder_normalize_before": True}, "decoder.layers.0 .*--decoder-normalize-before is"),
    ({"scale_resids": True}, "decoder.layers.0 .*--scale-resids is True"),
    ({"arch": "nonautoregressive_transformer"}, "NATransformerModel is non-autoregressive"),
]


@pytest.mark.parametrize(("options", "message"), UNSUITABLE)
def test_unsuitable_models_are_refused_untouched(options, message):
    model = build(**options)
    keys = set(model.state_dict())
    with pytest.raises(ValueError, match=f"--admin-init: {message}"):
        attach_admin(model)
    assert set(model.state_dict()) == keys


def test_other_layers_and_calls_in_another_order_are_refused():
    model = build()
    with pytest.raises(ValueError, match="no ADMIN weights"):
        profile_admin(model, *batch(), seed=3)
    with pytest.raises(ValueError, match="already"):
        attach_admin(attached())
    with pytest.raises(ValueError, match="--admin-init: ModuleDict has no stack encoder.layers"):
        attach_admin(nn.ModuleDict({"decoder": model.decoder}))
    model.decoder.layers.insert(1, nn.Linear(16, 16))
    with pytest.raises(ValueError, match=r"decoder\.layers\.1 is a Linear.*--base-layers"):
        attach_admin(model)
    assert not hasattr(model.encoder.layers[0], "admin")

"""ADMIN under recomputation, exceptions, copies and half precision."""

import copy
import pickle

import pytest
import torch

from fairseq_user_dir.admin import (
    attach_admin,
    profile_admin,
)
from tests.support.admin import (
    attached,
    batch,
    build,
    loss_of,
    omegas,
    run,
)

# ------------------------------------------------------------- the ways in which layers are run


def gradients(model, data, seed=4):
    torch.manual_seed(seed)
    model.train().zero_grad()
    loss = loss_of(model, data)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


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
    expected = gradients(plain, batch())
    assert_same_gradients(gradients(recomputing, batch()), expected)
    with torch.no_grad():
        recomputing.encoder.layers[1].admin.omega[1].mul_(1.1)
    with pytest.raises(AssertionError):
        assert_same_gradients(gradients(recomputing, batch()), expected)


def test_profile_is_the_same_with_recomputed_activations():
    plain, recomputing = build(), build(checkpoint_activations=True)
    attach_admin(plain)
    attach_admin(recomputing)
    expected = profile_admin(plain, *batch(), seed=3)
    actual = profile_admin(recomputing, *batch(), seed=3)
    assert [*actual.encoder, *actual.decoder] == pytest.approx(
        [*expected.encoder, *expected.decoder], rel=1e-5
    )


@pytest.mark.parametrize(("place", "recompute"), [("encoder_attn", True), ("fc2", False)])
def test_exception_inside_a_layer_leaves_no_trace(place, recompute):
    """Raised in another forward, before the backward of the first; the batch after it, too."""
    model = attached(dropout=0.0, checkpoint_activations=recompute)
    expected = gradients(model, batch())
    model.zero_grad()
    loss = loss_of(model, batch())

    def fail(*_):
        raise MemoryError

    hook = getattr(model.decoder.layers[1], place).register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        run(model, batch())
    hook.remove()
    loss.backward()
    assert_same_gradients(
        (loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}), expected
    )
    assert_same_gradients(gradients(model, batch()), expected)


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
    with torch.no_grad():
        for omega in omegas(model).values():
            omega.mul_(2.0)
    assert not torch.allclose(run(model, batch()), expected, atol=1e-3)
    assert torch.equal(run(double, batch()), expected)
    with torch.no_grad():
        for omega in omegas(double).values():
            omega.zero_()
    assert not torch.allclose(run(double, batch()), expected, atol=1e-3)
    assert_same_gradients(gradients(duplicate(model), batch()), gradients(model, batch()))


def test_half_precision_runs_in_half_precision():
    model = attached().to(torch.bfloat16).eval()
    assert run(model, batch()).dtype == torch.bfloat16

"""Proves that the optimizer radam is the optimizer of Liu et al. test_commands.py trains with radam
in half precision."""

from argparse import Namespace

import numpy as np
import pytest
import torch
from fairseq import optim

import fairseq_user_dir  # noqa: F401 registers radam
from fairseq_user_dir.host.errors import SettingsError


def reference_steps(weight, gradients, rate, betas, eps, decay):
    """Algorithm 2 of Liu et al. (2020), with decoupled weight decay, in float64."""
    first, second = betas
    m = v = np.zeros_like(weight)
    longest = 2 / (1 - second) - 1
    for t, gradient in enumerate(gradients, 1):
        m = first * m + (1 - first) * gradient
        v = second * v + (1 - second) * gradient**2
        weight = weight - rate * decay * weight
        corrected = m / (1 - first**t)
        length = longest - 2 * t * second**t / (1 - second**t)
        if length > 5:
            rectified = (length - 4) * (length - 2) * longest
            rectified = np.sqrt(rectified / ((longest - 4) * (longest - 2) * length))
            adapted = np.sqrt(1 - second**t) / (np.sqrt(v) + eps)
            weight = weight - rate * rectified * corrected * adapted
        else:
            weight = weight - rate * corrected
    return weight


def make(*weights, **options):
    """As fairseq makes it from the words of a command line."""
    settings = {"lr": [0.05], "adam_betas": "(0.8, 0.98)", "adam_eps": 1e-2, "weight_decay": 0.1}
    settings |= options
    return optim.build_optimizer(Namespace(optimizer="radam", **settings), weights)


def test_steps_follow_the_paper():
    """12 steps: the first five are not adapted, the others are."""
    rng = np.random.default_rng(3)
    start, gradients = rng.normal(size=7), rng.normal(size=(12, 7))
    weight = torch.nn.Parameter(torch.tensor(start))
    optimizer = make(weight)
    for count, gradient in enumerate(gradients, 1):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
        expected = reference_steps(start, gradients[:count], 0.05, (0.8, 0.98), 1e-2, 0.1)
        np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adam_betas": "(0.9)"}, r"--adam-betas '\(0.9\)' .* two numbers from 0 to less than 1"),
        ({"adam_betas": "__import__('os')"}, "--adam-betas"),
        ({"adam_eps": -1.0}, "--adam-eps -1 .* >= 0"),
        ({"weight_decay": float("nan")}, "--weight-decay nan .* >= 0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(SettingsError, match=message):
        make(torch.nn.Parameter(torch.ones(2)), **options)


def test_all_parameters_may_be_one_tensor():
    """What fairseq asks before it flattens them for --fp16; the steps are the same."""
    rng = torch.Generator().manual_seed(1)
    parts = [torch.nn.Parameter(torch.randn(n, generator=rng)) for n in (3, 4)]
    flat = torch.nn.Parameter(torch.cat([part.detach() for part in parts]))
    apart, together = make(*parts), make(flat)
    assert together.supports_flat_params
    for _ in range(8):
        flat.grad = torch.randn(7, generator=rng)
        for part, gradient in zip(parts, flat.grad.split([3, 4]), strict=True):
            part.grad = gradient.clone()
        apart.step()
        together.step()
    assert torch.equal(torch.cat([part.detach() for part in parts]), flat.detach())

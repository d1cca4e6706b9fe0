"""Small models and batches for the tests of ADMIN."""

import argparse

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from torch.nn import functional as F

from fairseq_user_dir.admin import ProfilingBatch, attach_admin
from tests.support.fairseq_models import VOCABULARY, Task


def build(arch="transformer_tiny", seed=1, **options):
    """A stock model; encoder and decoder options as in its arguments."""
    args = argparse.Namespace(
        encoder_embed_dim=16, encoder_ffn_embed_dim=24, max_source_positions=64,
        max_target_positions=64, tokens_per_sample=64, arch=arch, **options,
    )  # fmt: skip
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(seed)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, Task())


def batch(rows=6, source=9, target=7, seed=5):
    """Left-padded source, and decoder input; every row shorter than the one before."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(4, VOCABULARY, (rows, source), generator=generator)
    prev = torch.randint(4, VOCABULARY, (rows, target), generator=generator)
    src[:, -1] = prev[:, 0] = 2
    for row in range(rows):
        src[row, : row // 2] = 1
        prev[row, target - row // 2 :] = 1
    return ProfilingBatch(src, prev)


def run(model, data):
    src, prev = data
    return model(src, src.ne(1).sum(1), prev)[0]


def loss_of(model, data):
    return F.cross_entropy(run(model, data).transpose(1, 2), data.prev_output_tokens)


def omegas(model):
    return {name: p for name, p in model.named_parameters() if ".admin." in name}


def scatter_omegas(model, seed=9):
    """Omegas with another value in every channel, so that a mix-up of two shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for omega in omegas(model).values():
            omega.copy_(0.5 + torch.rand(omega.shape, generator=generator))


def attached(seed=1, **options):
    model = build(seed=seed, **options)
    attach_admin(model)
    scatter_omegas(model)
    return model

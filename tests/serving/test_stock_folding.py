"""What a stock model of fairseq lacks, folded into its parameters: the same outputs by a copy."""

import pytest
import torch

from fairseq_user_dir.admin import attach_admin
from fairseq_user_dir.serving.folding import folded
from tests.support.admin import scatter_omegas
from tests.support.fairseq_models import PAD, VARIANTS, batch, build


# what takes the weight at the entry, and what the stack adds
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cape", {}),
        ("nopos", {}),
        ("relpos", {"share_all_embeddings": True}),
        ("abspos", {"layernorm_embedding": True}),
        ("shape", {"decoder_input_dim": 24, "decoder_output_dim": 24}),
        ("rfs", {}),
    ],
)
def test_folded_copy_computes_the_same(name, options):
    model = build(**{**VARIANTS[name], **options})
    attach_admin(model)
    scatter_omegas(model)
    before = {key: value.clone() for key, value in model.eval().state_dict().items()}
    copied = folded(model, 70, 70)
    source, previous = batch()
    inputs = (source, source.ne(PAD).sum(1), previous)
    torch.testing.assert_close(copied(*inputs)[0], model(*inputs)[0], atol=1e-5, rtol=0)
    pointers = {value.data_ptr() for value in model.state_dict().values() if value.numel()}
    assert not pointers & {value.data_ptr() for value in copied.state_dict().values()}
    assert not [key for key in copied.state_dict() if ".admin." in key]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_residual_weights_that_cannot_be_folded_are_refused():
    model = build(**VARIANTS["cape"])
    attach_admin(model)
    with torch.no_grad():
        model.decoder.layers[1].admin.omega[2][5] = 0.0
    with pytest.raises(ValueError, match=r"decoder.layers.1 has a residual weight of ADMIN that"):
        folded(model, 20, 20)

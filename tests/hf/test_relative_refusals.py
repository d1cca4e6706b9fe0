"""Attention functions and places of weights with which relative positions would be wrong."""

import pytest
import torch
from accelerate import cpu_offload

from tests.support.hf import FAMILIES, answer, batch


@pytest.mark.parametrize("family", ["marian", "bert"])
@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_attention_without_a_whole_mask_is_refused(family, name):
    model = FAMILIES[family].build({"type": "relpos", "relative_context": 3})
    expected = answer(model(**batch(family)))
    model.config._attn_implementation = name
    with pytest.raises(ValueError, match=rf"{name}.*allowed: eager, sdpa.*set_attn_impl"):
        model(**batch(family))
    model.set_attn_implementation("sdpa")
    assert torch.equal(answer(model(**batch(family))), expected)


@torch.no_grad()
@pytest.mark.parametrize("family", ["marian", "vit"])
def test_offloaded_tables_are_refused(family):
    model = FAMILIES[family].build({"type": "relpos", "relative_context": 3})
    cpu_offload(model, execution_device="cpu")
    with pytest.raises(ValueError, match=r"device 'meta'.*allowed: cpu.*without offloading"):
        model(**batch(family))

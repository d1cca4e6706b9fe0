"""Models that torch.compile compiles in parts, because something between them breaks the graph."""

import pytest
import torch

from tests.support.hf import FAMILIES, VARIANTS, batch, loss

FAMILY = "bert"


def model_in_training():
    return FAMILIES[FAMILY].build(VARIANTS[FAMILY]["cape"], num_hidden_layers=1).train()


def losses(call):
    torch.manual_seed(1)
    return torch.stack([loss(call(**batch(FAMILY))).detach() for _ in range(3)])


@pytest.mark.slow
def test_broken_graph_keeps_the_draws_and_compiles_no_binding():
    """Compiled on its own, each module and value that is bound would be another program."""
    model = model_in_training()
    expected = losses(model)

    def broken(module, given, output):
        torch._dynamo.graph_break()

    model.bert.embeddings.LayerNorm.register_forward_hook(broken)
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    actual = losses(torch.compile(model, backend="eager"))
    torch.testing.assert_close(actual, expected)
    assert len(set(actual.tolist())) == 3
    frames = [m.co_filename or "" for m in torch._dynamo.utils.get_compilation_metrics()]
    assert len(frames) > 3
    assert not [name for name in frames if name.endswith("binding.py")]

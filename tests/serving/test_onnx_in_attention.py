"""``cape-plugins export onnx`` of types that act in attention: graphs of each kind of stack, at
sizes that the export has not seen."""

import re

import pytest

import hf_models
from tests.hf import test_rows
from tests.support.hf import OF_FAMILY, VARIANTS, config_of
from tests.support.onnx_graphs import export_saved, small

pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.slow

# An export takes seconds: each type and each kind of encoder is exported once, and with the cache
# of a decoder, in one graph, the types that compute more than a constant bias. test_onnx.py has a
# decoder with cross-attention.
DECODER, ENCODERS = "marian", ("vit", "speech_ctc", "bert")
ENCODING_OF = {name: config_of(DECODER, name).encoding for name in VARIANTS[DECODER]}
NAMES = [name for name, encoding in ENCODING_OF.items() if encoding.in_attention]
COUNT = max(len(NAMES), len(ENCODERS))
CASES = [(ENCODERS[n % len(ENCODERS)], NAMES[n % len(NAMES)]) for n in range(COUNT)]
CASES += [("gpt2", name) for name in NAMES if ENCODING_OF[name].learned or ENCODING_OF[name].turns]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_graphs_of_any_size(family, name, tmp_path, capsys):
    if family in OF_FAMILY:
        model = small(family, name)
    else:
        model = hf_models.switch(
            test_rows.build(family, num_hidden_layers=1), OF_FAMILY[DECODER][name]
        )
    out = export_saved(model, tmp_path, "--check", "--opset", "18")
    report = capsys.readouterr().out
    differences = re.findall(r"differs by at most (\S+) from the model in (\d+) batches", report)
    graphs = list(out.glob("*.onnx"))
    assert len(differences) == len(graphs)
    assert all(float(difference) < 1e-5 for difference, _ in differences)
    assert all(int(batches) >= 4 for _, batches in differences)
    for graph in graphs:
        assert not any(trace in graph.read_bytes() for trace in (b".py", b"stack_trace"))

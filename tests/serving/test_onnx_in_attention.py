"""``cape-plugins export onnx`` of types that act in attention: graphs of each kind of stack, at
sizes that the export has not seen."""

import re

import pytest

from tests.support.hf import OF_FAMILY, config_of
from tests.support.onnx_graphs import export_saved, small

pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.slow

# An export takes seconds: each type and each kind of encoder is exported once, and with caches of
# a decoder the types that compute more than a constant bias.
CACHED, ENCODERS = "marian", ("vit", "speech_ctc", "bert")
NAMES = [name for name in OF_FAMILY[CACHED] if config_of(CACHED, name).encoding.in_attention]
COUNT = max(len(NAMES), len(ENCODERS))
CASES = [(ENCODERS[n % len(ENCODERS)], NAMES[n % len(NAMES)]) for n in range(COUNT)]
CASES += [
    (CACHED, name)
    for name in NAMES
    if (encoding := config_of(CACHED, name).encoding).turns or encoding.learned
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_graphs_of_any_size(family, name, tmp_path, capsys):
    out = export_saved(small(family, name), tmp_path, "--check")
    differences = re.findall(r"differs by at most (\S+) from", capsys.readouterr().out)
    assert len(differences) == len(list(out.glob("*.onnx")))
    assert all(float(difference) < 1e-5 for difference in differences)

"""``cape-plugins export onnx`` of types that act in attention: graphs of each kind of stack, at
sizes that the export has not seen."""

import re

import pytest

from tests.support.hf import OF_FAMILY, config_of
from tests.support.onnx_graphs import export_saved, small

pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.slow
CASES = [
    (family, name)
    for family in ("vit", "marian", "speech_ctc", "bert")
    for name in OF_FAMILY[family]
    if config_of(family, name).encoding.in_attention
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_graphs_of_any_size(family, name, tmp_path, capsys):
    out = export_saved(small(family, name), tmp_path, "--check")
    differences = re.findall(r"differs by at most (\S+) from", capsys.readouterr().out)
    assert len(differences) == len(list(out.glob("*.onnx")))
    assert all(float(difference) < 1e-5 for difference in differences)

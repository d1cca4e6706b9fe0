"""``cape-plugins export onnx`` of types that act in attention: graphs of each kind of stack, at
sizes that the export has not seen."""

import re

import pytest

from tests.support.hf import OF_FAMILY, config_of
from tests.support.onnx_graphs import export_saved, small

pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.slow

ALL_TYPES = "marian"  # has an encoder and a decoder; the others are exported with some of the types
CASES = [
    (family, name)
    for family in ("vit", ALL_TYPES, "speech_ctc", "bert")
    for name in OF_FAMILY[family]
    if (encoding := config_of(family, name).encoding).in_attention
    and (family == ALL_TYPES or encoding.turns or encoding.learned)
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_graphs_of_any_size(family, name, tmp_path, capsys):
    out = export_saved(small(family, name), tmp_path, "--check")
    differences = re.findall(r"differs by at most (\S+) from", capsys.readouterr().out)
    assert len(differences) == len(list(out.glob("*.onnx")))
    assert all(float(difference) < 1e-5 for difference in differences)

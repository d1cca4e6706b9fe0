"""The runner of transformers' own tests."""

from importlib.metadata import version

from tests.hf_common import run


def test_source_distribution_where_the_repository_is_out_of_reach(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "BUILD", tmp_path)
    unpacked = tmp_path / f"transformers-{version('transformers')}"
    unpacked.mkdir()
    assert run.fetch((tmp_path / "nowhere").as_uri()) == unpacked
    assert "nowhere" in capsys.readouterr().err
    target, lacking = run.prepare(unpacked)
    assert target.exists()
    assert lacking == ["generation", "exporters"]
    assert run.prepare(unpacked)[1] == lacking  # what stands in for them is not taken for tests

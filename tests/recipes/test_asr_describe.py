"""Statistics of manifests: seconds and words of recordings, and hops without padding."""

import pytest

pytest.importorskip("soundfile")
import numpy as np

from recipes.asr import describe
from recipes.lab.steps import CommandError
from tests.support.fairseq_speech import durations, write_manifest
from tests.support.tables import read_csv


@pytest.fixture
def manifests(tmp_path):
    return [
        write_manifest(tmp_path, split, durations(count, count), count)
        for split, count in (("train", 40), ("single", 1))
    ]


def run(manifests, output, *words):
    describe.main([*map(str, manifests), "--output", str(output), *words])
    return read_csv(output / "corpus.csv"), read_csv(output / "hops.csv")


def test_statistics_are_numpys(manifests, tmp_path, capsys):
    (train, single), _ = run(manifests, tmp_path / "out")
    seconds = np.array(durations(40, 40))
    words = [len(line.split("\t")[2].split()) for line in manifests[0].read_text().splitlines()[1:]]
    assert (train["set"], train["recordings"]) == ("train", "40")
    for column, value in {
        "hours": seconds.sum() / 3600,
        "seconds_mean": seconds.mean(),
        "seconds_deviation": seconds.std(ddof=1),
        "words_mean": np.mean(words),
        "words_deviation": np.std(words, ddof=1),
    }.items():
        assert float(train[column]) == pytest.approx(value, abs=1e-4), column
    assert float(single["seconds_deviation"]) == 0, "of a single recording"
    shown = f"{seconds.mean():.2f} ± {seconds.std(ddof=1):.2f}"
    assert shown in capsys.readouterr().out
    assert shown in (tmp_path / "out/corpus.md").read_text()


def test_hops_are_those_of_batches_without_padding(manifests, tmp_path):
    """All recordings in one batch have the hop of their share of the mean; each in a batch of its
    own has 10 ms."""
    assert describe.make_parser().parse_args(["x"]).batch_seconds == 240, "on each GPU (Fig. 14)"
    _, alone = run(manifests, tmp_path / "alone", "--batch-seconds", "0.1")
    assert [(row["set"], row["hop_ms"]) for row in alone] == [("train", "10"), ("single", "10")]
    assert [float(row["percent"]) for row in alone] == [100, 100]
    _, together = run(manifests[:1], tmp_path / "together", "--batch-seconds", "1000")
    shares = {int(row["hop_ms"]): float(row["percent"]) for row in together}
    assert sum(shares.values()) == pytest.approx(100, abs=0.01)
    assert len(shares) > 3
    # batches are cut where hops would leave 5 to 20 ms
    assert min(shares) >= 5
    assert max(shares) <= 20
    mean = sum(hop * share for hop, share in shares.items()) / 100
    assert mean == pytest.approx(10, abs=0.5)
    assert (tmp_path / "together/hops.png").stat().st_size > 1000


def test_a_manifest_given_twice_is_refused(manifests, tmp_path):
    with pytest.raises(CommandError, match="give each manifest once"):
        run([manifests[0], manifests[0]], tmp_path / "out")

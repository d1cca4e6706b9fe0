"""Manifests of speech, their statistics, and longer test sets by joining utterances."""

import numpy as np
import pytest

pytest.importorskip("soundfile")
import soundfile

from cape_plugins.speech.manifest import Utterance
from recipes.asr import describe, stretch
from recipes.asr.manifest import read_manifest, write_manifest
from recipes.lab.steps import CommandError
from tests.support import fairseq_speech
from tests.support.fairseq_speech import durations
from tests.support.speech_data import rows
from tests.support.tables import read_csv


def test_manifest_is_read_as_written(tmp_path):
    entries = [
        Utterance("a-1", str(tmp_path / "data/wavs/1.wav"), "one two", 1.23456),
        Utterance("a-2", str(tmp_path / "elsewhere/2.wav"), 'a "quoted" word', 0.5),
    ]
    path = tmp_path / "data" / "train.tsv"
    write_manifest(path, entries)
    assert [row[1] for row in rows(path)[1:]] == ["wavs/1.wav", str(tmp_path / "elsewhere/2.wav")]
    read = read_manifest(path)
    assert read == [entries[0]._replace(seconds=1.2346), entries[1]]
    assert [path.name for path in path.parent.iterdir()] == ["train.tsv"]
    # columns of others, in another order, with the line ends of Windows
    table = "tgt_text\tspeaker\tid\tseconds\taudio\r\nhi\tann\tx\t1.5\tx.wav\r\n"
    path.write_bytes(table.encode("utf-8-sig"))
    assert read_manifest(path) == [Utterance("x", str(path.parent / "x.wav"), "hi", 1.5)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such manifest"),
        ("id\n", "has the columns id and 0 lines below; needed: audio and tgt_text"),
        ("id\taudio\ttgt_text\na\ta.wav\tx\n", "line 2: a.wav: no such file"),
        ("id\taudio\tseconds\ttgt_text\na\ta.wav\t1\n", "(1 without a text). line 2: a.wav"),
        ("id\taudio\tseconds\ttgt_text\na\ta.wav\tlong\tx\n", "line 2: seconds 'long'"),
    ],
)
def test_bad_manifests_are_refused(content, message, tmp_path):
    path = tmp_path / "test.tsv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CommandError) as error:
        stretch.main([str(path), "--seconds", "10"])
    assert message in str(error.value).replace(f"{tmp_path}/a.wav", "a.wav")


def test_names_with_tabs_are_refused(tmp_path):
    with pytest.raises(CommandError, match="tab or line break"):
        write_manifest(tmp_path / "x.tsv", [Utterance("a", str(tmp_path / "a\tb.wav"), "x", 1.0)])
    assert not list(tmp_path.iterdir())


@pytest.fixture
def test_set(tmp_path):
    """Two chapters, taking turns, whose utterances are constants of 1 to 5 s at 8 kHz."""
    entries = []
    for n in range(1, 6):
        for chapter in ("84-1", "84-2"):
            path = tmp_path / "wavs" / f"{chapter}-{n}.wav"
            path.parent.mkdir(exist_ok=True)
            soundfile.write(path, np.full(8000 * n, 0.1 * n), 8000, subtype="PCM_16")
            text = f"{chapter[-1]} {n}"
            entries.append(Utterance(f"{chapter}-{n:04}", path, text, float(n)))
    write_manifest(tmp_path / "test.tsv", entries)
    return tmp_path / "test.tsv"


def test_utterances_of_a_chapter_are_joined(test_set, capsys):
    stretch.main([str(test_set), "--seconds", "6", "12.5"])
    folder = test_set.parent
    header, *lines = rows(folder / "test_6s.tsv")
    assert header == ["id", "audio", "seconds", "tgt_text"]
    joined = [("6.0000", "c 1 c 2 c 3"), ("4.0000", "c 4"), ("5.0000", "c 5")]
    assert lines == [
        [f"84-{c}-{n:04}", f"audio/test_6s/84-{c}-{n:04}.flac", seconds, text.replace("c", c)]
        for c in "12"
        for n, (seconds, text) in enumerate(joined)
    ]
    longer = read_manifest(folder / "test_12.5s.tsv")
    assert [entry.seconds for entry in longer] == [10.0, 5.0] * 2
    samples, rate = soundfile.read(longer[2].audio)
    assert rate == 16000
    assert len(samples) == 160000
    middles = [round(float(samples[t * 8000]), 2) for t in (1, 4, 9, 16)]  # half seconds
    assert middles == [0.1, 0.2, 0.3, 0.4]
    lines = capsys.readouterr().out.splitlines()
    counts = {"test": "10", "test_6s": "6", "test_12.5s": "4"}
    assert [tuple(line.split()[:2]) for line in lines[1:]] == [*counts.items()]
    assert lines[2].split()[-2:] == ["5.00", "6.00"]  # mean, longest


def test_gaps_count_towards_the_duration(test_set):
    stretch.main([str(test_set), "--seconds", "6.5", "--gap", "0.5"])
    first, second, *_ = read_manifest(test_set.parent / "test_6.5s.tsv")
    assert (first.text, second.text) == ("1 1 1 2", "1 3")  # 1 + 0.5 + 2 + 0.5 + 3 are too long
    assert first.seconds == 3.5
    samples, _ = soundfile.read(first.audio)
    assert np.abs(samples[16500:23500]).max() < 1e-3
    assert samples[15500] > 0.09
    assert samples[24500] > 0.19


def test_any_group_joins_across_chapters(test_set, tmp_path):
    out = tmp_path / "longer"
    stretch.main([str(test_set), "--seconds", "100", "--any-group", "--output", str(out)])
    (entry,) = read_manifest(out / "test_100s.tsv")
    text = " ".join(f"{c} {n}" for n in range(1, 6) for c in "12")
    assert entry == ("test-0000", str(out / "audio/test_100s/test-0000.flac"), text, 30.0)


def test_ids_without_groups_are_refused(test_set):
    entries = [e._replace(id=f"x{n}") for n, e in enumerate(read_manifest(test_set))]
    write_manifest(test_set, entries)
    with pytest.raises(CommandError, match="are of the same talk.* give --any-group"):
        stretch.main([str(test_set), "--seconds", "6"])


def test_stretched_set_is_reused(test_set, capsys):
    command = [str(test_set), "--seconds", "6"]
    stretch.main(command)
    table, audio = (test_set.parent / n for n in ("test_6s.tsv", "audio/test_6s/84-1-0000.flac"))
    modified = audio.stat().st_mtime_ns
    before = capsys.readouterr().out
    stretch.main(command)
    reused = f"reused: {test_set.parent}/audio/test_6s was made with these settings\n"
    assert capsys.readouterr().out == reused + before
    assert audio.stat().st_mtime_ns == modified
    with pytest.raises(CommandError, match=r"other settings \(gap 0.0, now 1.0\); .*--output"):
        stretch.main([*command, "--gap", "1"])
    content = table.read_text()
    table.unlink()  # as after an interruption
    stretch.main(command)
    assert table.read_text() == content
    write_manifest(test_set, read_manifest(test_set)[:-1])
    with pytest.raises(CommandError, match="other settings .manifest"):
        stretch.main(command)


@pytest.fixture
def manifests(tmp_path):
    return [
        fairseq_speech.write_manifest(tmp_path, split, durations(count, count), count)
        for split, count in (("train", 40), ("single", 1))
    ]


def described(manifests, output, *words):
    describe.main([*map(str, manifests), "--output", str(output), *words])
    return read_csv(output / "corpus.csv"), read_csv(output / "hops.csv")


def test_statistics_are_numpys(manifests, tmp_path, capsys):
    (train, single), _ = described(manifests, tmp_path / "out")
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


def test_hops_equal_the_hops_of_batches_without_padding(manifests, tmp_path):
    """All recordings in one batch have the hop of their share of the mean; each in a batch of its
    own has 10 ms. A manifest that is named twice is refused."""
    assert describe.make_parser().parse_args(["x"]).batch_seconds == 240, "on each GPU (Fig. 14)"
    _, alone = described(manifests, tmp_path / "alone", "--batch-seconds", "0.1")
    assert [(row["set"], row["hop_ms"]) for row in alone] == [("train", "10"), ("single", "10")]
    assert [float(row["percent"]) for row in alone] == [100, 100]
    _, together = described(manifests[:1], tmp_path / "together", "--batch-seconds", "1000")
    shares = {int(row["hop_ms"]): float(row["percent"]) for row in together}
    assert sum(shares.values()) == pytest.approx(100, abs=0.01)
    assert len(shares) > 3
    assert {*shares} <= {*range(5, 21)}, "batches are cut where hops would leave 5 to 20 ms"
    mean = sum(hop * share for hop, share in shares.items()) / 100
    assert mean == pytest.approx(10, abs=0.5)
    assert (tmp_path / "together/hops.png").stat().st_size > 1000
    with pytest.raises(CommandError, match="give each manifest once"):
        described([manifests[0], manifests[0]], tmp_path / "out")

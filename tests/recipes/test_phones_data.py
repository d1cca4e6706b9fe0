"""Data of phone classification: TIMIT's and Praat's labels, labels of frames, folders, and
speech of espeak-ng."""

import hashlib
import re
import shutil
from itertools import chain, pairwise
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("soundfile")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("espeakng_loader")
import soundfile
import torch

from recipes.lab.steps import CommandError
from recipes.lab.synthesis import VOICES, Phone, Synthesizer
from recipes.phones import data, pictures, run
from recipes.phones.data import BANDS, LabelError

LONG = """File type = "ooTextFile"
Object class = "TextGrid"

xmin = 0
xmax = 1.5
tiers? <exists>
size = 3
item []:
    item [1]:
        class = "IntervalTier"
        name = "words"
        xmin = 0
        xmax = 1.5
        intervals: size = 1
        intervals [1]:
            xmin = 0
            xmax = 1.5
            text = "say ""3 7"" <exists>"
    item [2]:
        class = "TextTier"
        name = "clicks"
        xmin = 0
        xmax = 1.5
        points: size = 1
        points [1]:
            number = 0.25
            mark = "x"
    item [3]:
        class = "IntervalTier"
        name = "Phones"
        xmin = 0
        xmax = 1.5
        intervals: size = 3
        intervals [1]:
            xmin = 0
            xmax = 0.5
            text = ""
        intervals [2]:
            xmin = 0.5
            xmax = 7.5e-1
            text = "AH0"
        intervals [3]:
            xmin = 0.75
            xmax = 1.5
            text = "ʃ"
"""
# Praat's short form: the values alone, one a line
VALUES = [line.partition(" = ")[2] or line for line in LONG.replace("tiers? ", "").splitlines()[3:]]
SHORT = "\n".join(
    ['File type = "ooTextFile"\n"TextGrid"\n', *(v.strip() for v in VALUES if v.strip()[-1] != ":")]
)
PHONES = [Phone(0.0, 0.5, "sil"), Phone(0.5, 0.75, "AH"), Phone(0.75, 1.5, "ʃ")]


def test_timit_counts_samples(tmp_path):
    text = "0 3050 h#\n3050 4559 sh\n4559 5723 ix\n\n"
    assert data.parse_phn(text, 16000)[1] == Phone(3050 / 16000, 4559 / 16000, "sh")
    (tmp_path / "SA1.PHN").write_text(text)
    phones = data.read_labels(tmp_path / "SA1.PHN", 8000)
    assert [phone.name for phone in phones] == ["sil", "sh", "ix"]
    assert phones[1].start == 3050 / 8000


@pytest.mark.parametrize(
    ("text", "encoding"),
    [(LONG, "utf-8"), (SHORT, "utf-8-sig"), (LONG, "utf-16"), (SHORT, "utf-16-be")],
)
def test_text_grids_of_any_encoding_are_read(tmp_path, text, encoding):
    path = tmp_path / "a.TextGrid"
    mark = "\ufeff" if encoding == "utf-16-be" else ""  # Praat on a Mac of old
    path.write_bytes((mark + text).encode(encoding))
    assert data.read_labels(path, 16000) == PHONES
    assert data.read_labels(path, 16000, "WORDS") == [Phone(0.0, 1.5, 'say "3 7" <exists>')]


def test_tiers_are_chosen_by_name():
    words, phones = data.parse_text_grid(LONG)
    assert [words.name, phones.name] == ["words", "Phones"]
    assert data.choose_tier([words, phones]) is phones
    assert data.choose_tier([words]) is words
    speaker = phones._replace(name="Anna - phones")
    assert data.choose_tier([words, speaker]) is speaker
    assert data.choose_tier([words, phones], "words") is words
    with pytest.raises(LabelError, match="no tiers are 'x'; the TextGrid has 'words', 'Phones'"):
        data.choose_tier([words, phones], "x")
    with pytest.raises(LabelError, match="2 tiers are 'for phones'"):
        data.choose_tier([words, words])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.phn", "0 100\n", "line 1, '0 100', is not: first sample, last sample, label"),
        ("a.phn", "", "no phone"),
        ("a.phn", "0 100 a\n50 200 b\n", "overlaps"),
        ("a.phn", "0 100 a\n200 150 b\n", "ends before it starts"),
        ("a.TextGrid", SHORT.replace("ooTextFile", "ooBinaryFile"), "not a TextGrid"),
        ("a.TextGrid", SHORT[: SHORT.index("7.5e-1")], "ends too early"),
        ("a.TextGrid", SHORT.replace('"AH0"\n', ""), "no interval"),
        ("a.TextGrid", SHORT.replace("<exists>\n3", "<absent>\n"), "without tiers"),
        ("a.TextGrid", SHORT.replace("IntervalTier", "OtherTier"), "unknown class 'OtherTier'"),
    ],
)
def test_labels_that_cannot_be_used(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(LabelError, match=re.escape(message)):
        data.read_labels(tmp_path / name, 1000)


def test_a_frame_has_the_phone_at_its_centre():
    """Centres are at 12.5, 22.5, 32.5 ... ms; an end belongs to the next phone."""
    phones = [Phone(0.0125, 0.0225, "a"), Phone(0.0225, 0.04, "b"), Phone(0.05, 0.0624, "c")]
    assert data.frame_labels(phones, 7) == ["a", "b", "b", "sil", "c", "sil", "sil"]
    # centres at 20, 40 and 60 ms
    assert data.frame_labels(phones, 3, hop=0.02, window=0.04) == ["a", "sil", "c"]
    assert data.frame_labels([], 2) == ["sil", "sil"]


def write_recording(folder, name, rate=16000, suffix=".wav", seconds=0.5, container="WAV"):
    """Noise with the phones a and b, each of half the recording."""
    folder.mkdir(parents=True, exist_ok=True)
    count = int(seconds * rate)
    noise = np.random.default_rng(0).normal(0, 0.1, count)
    soundfile.write(folder / f"{name}{suffix}", noise, rate, "PCM_16", format=container)
    text = f"0 {count // 2} a\n{count // 2} {count} b\n"
    (folder / f"{name.partition('.')[0]}.PHN").write_text(text)


def test_folder_of_the_shape_of_timit(tmp_path):
    """Splits by folder, NIST headers, any letter case, .WAV.wav, labels in samples of the file."""
    for number in range(4):
        write_recording(tmp_path / "TRAIN" / f"DR{number}", "SA1", suffix=".WAV", container="NIST")
    write_recording(tmp_path / "TRAIN" / "DR5", "SA2.WAV")  # SA2.WAV.wav
    write_recording(tmp_path / "test" / "DR1", "SI3", rate=8000)
    corpus = data.read_folder(tmp_path)
    assert [len(items) for items in corpus.splits.values()] == [4, 1, 1]
    (test,) = corpus.splits["test"]
    assert test.name == "test/DR1/SI3.wav"
    assert corpus.classes == ["a", "b", "sil"]
    assert test.features.shape == (48, BANDS)
    # 8 kHz: the change at sample 2000 is at 0.25 s, between the centres of frames 23 and 24
    assert test.labels.tolist() == [0] * 24 + [1] * 24
    assert not corpus.skipped


def test_other_folders_are_split_reproducibly(tmp_path):
    for number in range(20):
        write_recording(tmp_path / "corpus", f"r{number}", seconds=0.1 + number / 100)
    first, second = data.read_folder(tmp_path), data.read_folder(tmp_path)
    assert [len(items) for items in first.splits.values()] == [17, 1, 2]
    names = [item.name for items in first.splits.values() for item in items]
    assert len(set(names)) == 20
    assert names == [item.name for items in second.splits.values() for item in items]
    assert first.fingerprint() == second.fingerprint()
    write_recording(tmp_path / "corpus", "r3", seconds=0.5)
    assert data.read_folder(tmp_path).fingerprint() != first.fingerprint()


def test_what_cannot_be_used_is_counted(tmp_path):
    # the last three: labels of another recording, or in other units
    labels = {"strange": "a b c", "binary": "\0\1", "late": "0 8000 a\n8000 24000 b"}
    labels |= {"early": "0 2000 a", "before": "-800 8000 a"}
    for name in ("good0", "good1", "good2", "broken", "unlabelled", "mute", *labels):
        write_recording(tmp_path, name)
    for name, text in labels.items():
        (tmp_path / f"{name}.PHN").write_text(text)
    (tmp_path / "broken.wav").write_bytes(b"RIFF nothing")
    write_recording(tmp_path, "short", seconds=0.01)
    (tmp_path / "unlabelled.PHN").unlink()
    (tmp_path / "unheard.TextGrid").write_text(SHORT, "utf-8")
    soundfile.write(tmp_path / "mute.wav", np.zeros(8000), 16000)
    corpus = data.read_folder(tmp_path)
    assert sum(map(len, corpus.splits.values())) == 3
    reasons = dict(sorted(line.split(": ", 1) for line in corpus.skipped))
    expected = {
        "before.wav": "starts before the recording",
        "binary.wav": "binary.PHN: line 1 holds a byte 0",
        "broken.wav": "cannot be decoded",
        "early.wav": "labels end at 0.12 s, the recording at 0.50 s",
        "late.wav": "labels end at 1.50 s, the recording at 0.50 s",
        "mute.wav": "silence from beginning to end",
        "short.wav": "at least 400",
        "strange.wav": "first sample",
        "unheard.TextGrid": "no recording of this name",
        "unlabelled.wav": "no labels of this name",
    }
    assert reasons.keys() == expected.keys()
    for name, reason in expected.items():
        assert reason in reasons[name]


def test_folders_that_cannot_be_used(tmp_path):
    write_recording(tmp_path / "few/train", "a")
    for name in "bc":
        write_recording(tmp_path / "few/test", name)
    with pytest.raises(CommandError, match="nothing is left for training"):
        data.read_folder(tmp_path / "few")
    shutil.rmtree(tmp_path / "few")
    with pytest.raises(CommandError, match="no such folder"):
        data.read_folder(tmp_path / "nothing")
    with pytest.raises(CommandError, match="0 recordings .* with labels .* can be used"):
        data.read_folder(tmp_path)
    for name in "abc":
        write_recording(tmp_path, name, seconds=1.5)
        (tmp_path / f"{name}.PHN").unlink()
        (tmp_path / f"{name}.TextGrid").write_text(SHORT, "utf-8")
    with pytest.raises(CommandError, match="no tiers are 'tones'; .* 'words', 'Phones'"):
        data.read_folder(tmp_path, "tones")
    assert data.read_folder(tmp_path, "phones").classes == ["AH", "sil", "ʃ"]


def test_a_folder_goes_through_the_whole_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pictures, "save", Mock())
    for number in range(6):
        write_recording(tmp_path / "speech", f"r{number}", seconds=1.5 + number / 10)
        (tmp_path / "speech" / f"r{number}.PHN").unlink()
        (tmp_path / "speech" / f"r{number}.TextGrid").write_text(SHORT, "utf-8")
    write_recording(tmp_path / "speech", "unlabelled")
    (tmp_path / "speech" / "unlabelled.PHN").unlink()
    words = f"--data {tmp_path}/speech --epochs 1 --layers 1 --dim 8 --similarity-length 20"
    run.main([*words.split(), "--work", f"{tmp_path}/work", "--output", f"{tmp_path}/out"])
    assert "1 files left out, such as unlabelled.wav: no labels" in capsys.readouterr().err
    page = (tmp_path / "out" / "results.md").read_text("utf-8")
    assert "speech; train 4 utterances" in page
    assert "3 classes: AH sil ʃ" in page
    assert "**Left out**: 1 files, [why](left_out.txt)" in page
    assert (tmp_path / "out/left_out.txt").read_text().startswith("unlabelled.wav: no labels")
    # the command stands there as it was typed, and nothing else names a folder of the machine
    (command,) = (line for line in page.splitlines() if "recipes.phones.run" in line)
    assert str(tmp_path) not in page.replace(command, "")


def test_each_band_is_normalised():
    features = data.label("noise", torch.randn(16000).cumsum(0) / 100, []).features
    assert features.shape == (98, BANDS)
    assert torch.allclose(features.mean(0), torch.zeros(BANDS), atol=1e-5)
    assert torch.allclose(features.std(0, correction=0), torch.ones(BANDS), atol=1e-4)


def test_noise_has_the_level_that_is_drawn():
    speech = np.sin(np.arange(16000) / 10).astype(np.float32)
    noise = data.add_noise(speech, np.random.default_rng(1)) - speech
    ratio = 10 * np.log10((speech**2).mean() / (noise**2).mean())
    assert ratio == pytest.approx(np.random.default_rng(1).uniform(0, 20), abs=0.2)


def test_speech_is_reproducible_and_splits_differ():
    first, second = data.synthetic((4, 3, 3)), data.synthetic((4, 3, 3))
    assert first.fingerprint() == second.fingerprint() != data.synthetic((4, 3, 3), 1).fingerprint()
    assert [len(items) for items in first.splits.values()] == [4, 3, 3]
    utterances = [*chain(*first.splits.values())]
    assert len({item.name.partition(" ")[2] for item in utterances}) > 7
    assert all(len(item.features) == len(item.labels) for item in utterances)


def test_the_words_have_the_phones_of_the_thesis():
    between = "treasure out the among lazy azure"  # espeak-ng links these words
    phones = Synthesizer().speak(f"{' '.join(data.WORDS)} {between}").phones
    names = {data.ESPEAK.get(phone.name, phone.name) for phone in phones}
    expected = (
        "aa ae ah ao aw ay b ch d dh eh er ey f g hh ih iy jh k l m n ng ow oy p r s sh sil t th "
        "uh uw v w y z zh"
    )
    assert names == set(expected.split())


def test_phones_stand_where_the_sound_is():
    """Phones follow each other and end with the speech; pauses are silent, vowels are loud."""
    speech = Synthesizer().speak("four, two", speed=120)
    names = [phone.name for phone in speech.phones if phone.name[0] != "_"]
    assert names == ["f", "o@", "t", "u:"]
    for phone, following in pairwise(speech.phones):
        assert phone.start < phone.end == following.start
    assert speech.phones[-1].end == pytest.approx(len(speech.waveform) / 16000, abs=1e-3)

    def loudness(name):
        phone = next(p for p in speech.phones if p.name == name)
        part = speech.waveform[int(phone.start * 16000) : int(phone.end * 16000)]
        return float(np.sqrt((part**2).mean()))

    assert loudness("u:") > 20 * loudness("_:")


@pytest.mark.slow
def test_speech_is_the_same_in_another_process(run_cli):
    """Covers all voices, also those with noise."""
    code = (
        "import hashlib; from recipes.lab.synthesis import VOICES, Synthesizer; s = Synthesizer(); "
        "print([hashlib.md5(s.speak('one two', v).waveform).hexdigest() for v in VOICES])"
    )
    other, synthesizer = run_cli("python", "-c", code).stdout.strip(), Synthesizer()
    speech = [synthesizer.speak("one two", voice).waveform for voice in VOICES]
    assert other == str([hashlib.md5(waveform).hexdigest() for waveform in speech])


BAD = {"speed": 5, "pitch": 100, "voice": "klingon-opera", "text": " "}


@pytest.mark.parametrize(("name", "value"), BAD.items())
def test_bad_arguments_are_refused(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        Synthesizer().speak(**{"text": "one", name: value})

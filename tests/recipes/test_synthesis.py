"""Synthetic speech of espeak-ng."""

import hashlib
import re
from itertools import pairwise

import numpy as np
import pytest

from recipes.lab.synthesis import VOICES, Synthesizer, make_speech


def test_speech_is_reproducible():
    first, second = make_speech(1, 5, (1, 6)), make_speech(1, 5, (1, 6))
    assert all(np.array_equal(a.waveform, b.waveform) for a, b in zip(first, second, strict=True))
    assert [a[::2] for a in first] == [b[::2] for b in second]
    assert [a.text for a in make_speech(2, 5, (1, 6))] != [a.text for a in first]


def test_phones_stand_where_the_sound_is():
    """Phones follow each other and end with the speech; pauses are silent, vowels are loud."""
    speech = Synthesizer().speak("four, two", speed=120)
    assert [phone.name for phone in speech.phones if phone.name[0] not in "_"] == [
        *("f", "o@", "t", "u:"),
    ]
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


@pytest.mark.parametrize(
    "bad", [{"speed": 5}, {"pitch": 100}, {"voice": "klingon-opera"}, {"text": " "}]
)
def test_bad_arguments_are_refused(bad):
    (name, value), *_ = bad.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        Synthesizer().speak(**{"text": "one", **bad})

"""Speech of espeak-ng (from the `espeakng-loader` wheel) with exact times of phones."""

import ctypes
import random
import shutil
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from cape_plugins.speech.audio import resample
from cape_plugins.speech.features import SAMPLING_RATE
from recipes.lab.steps import CommandError

# espeak-ng/speak_lib.h
_SYNCHRONOUS, _PHONEME_EVENTS = 2, 1
_RATE, _PITCH, _UTF8 = 1, 3, 1
_END, _PHONEME = 0, 7

VOICES = ("en-us", "en-us+m1", "en-us+m3", "en-us+m7", "en-us+f1", "en-us+f2", "en-us+f4")
SPEEDS = (150, 230)  # words per minute
PITCHES = (20, 80)  # of 0 to 99
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Phone(NamedTuple):
    """A phone with its times in seconds; pauses have the name ``_:``."""

    start: float
    end: float
    name: str


class Speech(NamedTuple):
    """Spoken text; the phones cover the waveform from the first sound on."""

    text: str
    waveform: np.ndarray  # [samples] float32 in -1 to 1, at 16 kHz
    phones: list[Phone]


class _Event(ctypes.Structure):
    _integers = ("type", "identifier", "text_position", "length", "audio_position", "sample")
    _fields_ = (
        *((name, ctypes.c_int) for name in _integers),
        ("user_data", ctypes.c_void_p),
        ("name", ctypes.c_char * 8),  # of a phone
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


class Synthesizer:
    """espeak-ng in its initial state. The library has states (of random numbers, of the flutter of
    the voice) that no function resets. Each synthesizer therefore loads a separate copy of the
    library, so the same calls give the same samples."""

    def __init__(self) -> None:
        try:
            import espeakng_loader
        except ImportError:
            raise CommandError(
                "the built-in speech needs espeak-ng; pip install espeakng-loader, or give your "
                "data by --data, --dataset or --train-file"
            ) from None
        with tempfile.TemporaryDirectory() as folder:
            self._library = ctypes.CDLL(shutil.copy(espeakng_loader.get_library_path(), folder))
        data = espeakng_loader.get_data_path().encode()
        self.native_rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data, _PHONEME_EVENTS)
        # otherwise the clock seeds the noise of breath
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(0))
        self._samples: list[np.ndarray] = []
        self._phones: list[tuple[int, str]] = []
        # a reference, so that the callback exists as long as the library uses it
        self._callback = _Callback(self._collect)
        self._library.espeak_SetSynthCallback(self._callback)

    def _collect(self, samples: Sequence[int], count: int, events: Sequence[_Event]) -> int:
        if count > 0:
            self._samples.append(np.ctypeslib.as_array(samples, (count,)).copy())
        for event in events:
            if event.type == _END:
                break
            if event.type == _PHONEME:
                self._phones.append((event.sample, event.name.decode()))
        return 0

    def speak(self, text: str, voice: str = "en-us", speed: int = 175, pitch: int = 50) -> Speech:
        """Speaks at 80 to 450 words per minute and a pitch of 0 to 99; refuses other values."""
        if not 80 <= speed <= 450 or not 0 <= pitch <= 99:
            why = f"speed={speed}, pitch={pitch}: allowed: 80 to 450 words per minute and 0 to 99."
            raise ValueError(why)
        if self._library.espeak_SetVoiceByName(voice.encode()):
            raise ValueError(f"voice={voice!r} is unknown to espeak-ng, such as 'en-us+f1'.")
        self._library.espeak_SetParameter(_RATE, speed, 0)
        self._library.espeak_SetParameter(_PITCH, pitch, 0)
        if not text.strip():
            raise ValueError(f"text={text!r} has no words to speak; give words.")
        self._samples, self._phones = [], []
        encoded = text.encode()
        self._library.espeak_Synth(encoded, len(encoded) + 1, 0, 1, 0, _UTF8, None, None)
        native = np.concatenate(self._samples).astype(np.float32) / 32768
        starts = [sample / self.native_rate for sample, _ in self._phones]
        ends = [*starts[1:], len(native) / self.native_rate]
        names = [name.strip("',") for _, name in self._phones]  # without marks of stress
        phones = [phone for phone in map(Phone, starts, ends, names) if phone.end > phone.start]
        waveform = resample(torch.from_numpy(native), self.native_rate, SAMPLING_RATE).numpy()
        return Speech(text, waveform, phones)


def make_speech(
    seed: int, count: int, lengths: tuple[int, int], words: Sequence[str] = DIGITS
) -> list[Speech]:
    """Texts of `lengths` (fewest, most) words, read by random voices. The same `seed` gives the
    same speech."""
    rng = random.Random(seed)
    synthesizer = Synthesizer()
    speech = []
    for _ in range(count):
        text = " ".join(rng.choice(words) for _ in range(rng.randint(*lengths)))
        voice = {"speed": rng.randint(*SPEEDS), "pitch": rng.randint(*PITCHES)}
        speech.append(synthesizer.speak(text, rng.choice(VOICES), **voice))
    return speech

"""A small phone classifier, and speech that it can learn."""

import torch

from cape_plugins import PositionConfig
from recipes.phones.data import BANDS, Corpus, Example
from recipes.phones.model import Sizes
from recipes.phones.train import Experiment, Training

SIZES = Sizes(dim=8, layers=2, heads=4, ffn=16, dropout=0.0)
# relative contexts as long as the utterances here
OPTIONS = {"relpos": {"relative_context": 20}}


def config(name):
    return PositionConfig(name, "audio", **OPTIONS.get(name, {}))


def make_corpus(seed=0, count=(6, 2, 3), length=20, classes=3):
    """Each class has its mean; the frames of a class follow each other."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, BANDS, generator=generator)
    splits = {}
    for split, number in zip(("train", "dev", "test"), count, strict=True):
        splits[split] = []
        for index in range(number):
            labels = torch.randint(classes, (length // 4,), generator=generator)
            labels = labels.repeat_interleave(4)
            noise = torch.randn(length, BANDS, generator=generator)
            splits[split].append(Example(f"{split}{index}", centres[labels] + noise, labels))
    return Corpus(list("abcdefgh")[:classes], splits, "made up")


def make_experiment(corpus, training=None, work=None):
    return Experiment(corpus, SIZES, training or Training(1, 0.05, 0.001), work, "cpu")

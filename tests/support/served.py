"""Tiny translation models of the Hugging Face families, with their tokenizers."""

from __future__ import annotations

import json
import math
import random

import torch
from sentencepiece import SentencePieceProcessor
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    BartTokenizer,
    M2M100Tokenizer,
    MarianTokenizer,
    MBartTokenizer,
    PegasusTokenizer,
)

from recipes.lab.subwords import SentencePiece
from recipes.mt.number_lists import spell
from tests.support.hf import FAMILIES

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # numbers 0 to 3


def pairs(seed, size, shortest, longest):
    """English and German lists of numbers."""
    rng = random.Random(seed)
    lists = [
        [rng.randint(0, 99) for _ in range(rng.randint(shortest, longest))] for _ in range(size)
    ]
    return [(spell(numbers, "en") + ".", spell(numbers, "de") + ".") for numbers in lists]


class Corpus:
    """Lists of one or two numbers, and pieces of them."""

    def __init__(self, folder):
        self.folder = folder
        self.pairs = pairs(0, 400, 1, 2)
        self.text = folder / "train.txt"
        self.text.write_text("\n".join(line for pair in self.pairs for line in pair), "utf-8")
        self.spm = folder / "pieces.model"
        SentencePiece.train([self.text], self.spm, 60)
        processor = SentencePieceProcessor(model_file=str(self.spm))
        names = map(processor.id_to_piece, range(processor.get_piece_size()))
        self.pieces = [name for name in names if name not in SPECIAL]

    def tokenizer(self, family):
        return getattr(self, f"_{family}")()

    def _vocabulary(self):
        path = self.folder / "vocabulary.json"
        tokens = [*SPECIAL, *self.pieces]
        path.write_text(json.dumps({token: i for i, token in enumerate(tokens)}), "utf-8")
        return str(path)

    def _marian(self):
        """With other pieces on the target side."""
        target = self.folder / "target.model"
        if not target.exists():
            SentencePiece.train([self.text], target, 40)
        vocabulary = self._vocabulary()
        return MarianTokenizer(source_spm=str(self.spm), target_spm=str(target), vocab=vocabulary)

    def _m2m_100(self):
        return M2M100Tokenizer(self._vocabulary(), str(self.spm), src_lang="en", tgt_lang="de")

    def _mbart(self):
        """That cuts texts where it is not told otherwise, as many that are saved after training."""
        codes = [("en_XX", 0.0), ("de_DE", 0.0)]
        vocabulary = [*self._ranked(), *codes]
        tokenizer = MBartTokenizer(vocab=vocabulary, src_lang="en_XX", tgt_lang="de_DE")
        tokenizer.backend_tokenizer.enable_truncation(200)
        return tokenizer

    def _ranked(self):
        ranked = [(piece, -1.0 - i / 10) for i, piece in enumerate(self.pieces)]
        return [*((token, 0.0) for token in SPECIAL), *ranked]

    def _pegasus(self):
        return PegasusTokenizer(vocab=self._ranked(), offset=2)

    def _bart(self):
        trained = ByteLevelBPETokenizer()
        trained.train([str(self.text)], 320, special_tokens=list(SPECIAL), show_progress=False)
        parts = json.loads(trained.to_str())["model"]
        merges = [tuple(merge) for merge in parts["merges"]]
        return BartTokenizer(vocab=parts["vocab"], merges=merges)


def build(family, tokenizer, settings, **sizes):
    """A model for a tokenizer, which is not trained: many translations end by themselves, none has
    the same two tokens twice or a token that is no word; sentences may be longer than learned
    tables."""
    numbers = {name: getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    start = numbers["eos"] if family in ("m2m_100", "bart") else numbers["pad"]
    if family == "mbart":  # a translation starts with the code of its language
        start = tokenizer.convert_tokens_to_ids("de_DE")
    special = {f"{name}_token_id": number for name, number in numbers.items()}
    special |= {"decoder_start_token_id": start, "forced_eos_token_id": None}
    words = 1 + max(*tokenizer.get_vocab().values(), *tokenizer.convert_tokens_to_ids(["__zu__"]))
    sizes = {"vocab_size": words, "max_position_embeddings": 40, "init_std": 0.3, **sizes}
    model = FAMILIES[family].build(settings, **{**special, **sizes})
    with torch.no_grad():
        if family == "m2m_100":  # which has no bias
            end = model.get_output_embeddings().weight[numbers["eos"]]
            model.get_decoder().layer_norm.bias += 4 * end / end.square().sum()
        else:
            bias = model.final_logits_bias.normal_(std=0.3)
            bias[0, model.config.eos_token_id] = math.log(words)  # as likely as all others together
    token_ids = {*tokenizer.get_vocab().values()} - {*tokenizer.all_special_ids}
    banned = {*range(words)} - token_ids - {model.config.eos_token_id}
    model.generation_config.update(
        bad_words_ids=[[number] for number in sorted(banned)],
        max_length=None,
        no_repeat_ngram_size=2,
    )
    return model

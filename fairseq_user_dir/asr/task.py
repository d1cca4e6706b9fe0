"""fairseq task for speech recognition from recordings."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fairseq.tasks import LegacyFairseqTask, register_task
from torch import nn

from cape_plugins.settings.arguments import int_at_least, positive
from cape_plugins.speech.features import HOP_SECONDS, spec_augment
from cape_plugins.speech.manifest import Utterance
from fairseq_user_dir.asr.ctc_model import CapeCtcTransformerModel
from fairseq_user_dir.asr.data import SpeechDataset
from fairseq_user_dir.asr.decoding import CtcGenerator
from fairseq_user_dir.asr.manifest import named_recordings, read_config, read_manifest
from fairseq_user_dir.asr.text import (
    DICTIONARY,
    SUBWORD_MODEL,
    Targets,
    TextDictionary,
    save,
)
from fairseq_user_dir.embedding import process_generator

logger = logging.getLogger(__name__)

MEL_BINS = 80


def _hop(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.001 <= value <= 0.1:
        raise argparse.ArgumentTypeError(
            f"{text} is not allowed; allowed: 0.001 to 0.1 seconds, such as 0.01"
        )
    return value


@register_task("cape_asr")
class CapeAsrTask(LegacyFairseqTask):
    """Recordings and texts from manifests, in padded batches or without padding. Recordings need no
    text in generation; fairseq-interactive reads paths of recordings, one a line.

    ``--max-tokens`` counts frames: ``--max-tokens 12000`` are 120 seconds at a hop of 10 ms.
    """

    scorer = "cape_wer"  # scorer of fairseq-generate, unless --scoring names another

    @staticmethod
    def add_args(parser: argparse.ArgumentParser) -> None:
        """Adds the flags of data, SpecAugment and decoding."""
        add = parser.add_argument
        add("data", help="folder with manifests train.tsv, valid.tsv ... with the columns audio "
            "and tgt_text; generation needs only audio")  # fmt: skip
        add(
            "--config-yaml",
            default="config.yaml",
            help="configuration file of fairseq's S2T data, in the data folder; read if it exists",
        )
        add("--subword-model", metavar="FILE", help="sentencepiece model (default: spm.model of "
            "the data folder; without this file, units are letters)")  # fmt: skip
        add("--padding-free", action="store_true", help="train on batches without padding: "
            "the hop differs by recording, surplus frames are skipped (CAPE App. C.3)")  # fmt: skip
        add("--hop-seconds", type=_hop, default=HOP_SECONDS, help="distance between frames; a "
            "longer distance makes inference faster and less accurate (default: 0.01)")  # fmt: skip
        add("--max-source-positions", type=positive, default=10**6, metavar="N",
            help="leave out recordings of more than N frames (default: 1000000)")  # fmt: skip
        add("--max-target-positions", type=positive, default=4096, metavar="N",
            help="leave out texts of more than N units (default: 4096)")  # fmt: skip
        add("--no-spec-augment", action="store_true", help="do not mask features in training")
        add("--spec-augment-start", type=int_at_least, default=0, metavar="UPDATE",
            help="first update in which features are masked (default: 0)")  # fmt: skip
        add("--frequency-masks", type=int_at_least, default=2, metavar="N",
            help="number of masks over frequencies (default: 2)")  # fmt: skip
        add("--frequency-mask-width", type=int_at_least, default=30, metavar="BINS",
            help="largest width of a mask over frequencies (default: 30)")  # fmt: skip
        add("--time-masks", type=int_at_least, default=10, metavar="N",
            help="number of masks over time (default: 10)")  # fmt: skip
        add("--time-mask-width", type=int_at_least, default=50, metavar="FRAMES",
            help="largest length of a mask over time; also limited to a tenth of the recording "
            "(default: 50)")  # fmt: skip
        add("--ctc-beam", type=positive, default=1, metavar="N",
            help="beam size of flashlight-text; 1 decodes by the best path "
            "(default: 1)")  # fmt: skip
        add("--ctc-lm", metavar="FILE", help="n-gram model, ARPA or binary of KenLM; a model "
            "of words with --ctc-lexicon, otherwise a model of units")  # fmt: skip
        add("--ctc-lexicon", metavar="FILE", help="file with a word and its units on each line")
        add("--ctc-lm-weight", type=float, default=1.0,
            help="factor on the score of the language model (default: 1.0)")  # fmt: skip
        add("--ctc-word-score", type=float, default=0.0,
            help="score added for each word of the lexicon (default: 0.0)")  # fmt: skip

    def __init__(
        self, args: Any, dictionary: TextDictionary, targets: Targets, config: Mapping[str, Any]
    ) -> None:
        super().__init__(args)
        self.dictionary, self.targets, self.config = dictionary, targets, config
        self.needs_texts = False
        # One iterator for all epochs. fairseq would drop the iterator of each epoch, which refers
        # to itself, so Python frees the iterator only later. Worker processes that are forked
        # before may free it, too: they would end processes that are not theirs, and print "can only
        # test a child process".
        self.cfg = argparse.Namespace(rebuild_batches=args.padding_free)

    @classmethod
    def setup_task(cls, args: Any, **kwargs: Any) -> CapeAsrTask:
        """Reads the dictionary. If there is no dictionary, makes one from the subword model or from
        the letters of the training texts.

        Raises:
            ValueError: if no dictionary can be made, or a file is missing.
        """
        config = read_config(args.data, args.config_yaml)
        subword_model = args.subword_model or config.get("subword_model")
        default_path = os.path.join(args.data, SUBWORD_MODEL)
        if subword_model is None and os.path.isfile(default_path):
            subword_model = default_path
        targets = Targets(subword_model)
        path = os.path.join(args.data, config.get("vocab_filename", DICTIONARY))
        if not os.path.isfile(path):
            names = (getattr(args, "train_subset", None) or "train").split(",")
            paths = [os.path.join(args.data, f"{name}.tsv") for name in names]
            if not os.path.isfile(paths[0]):
                raise ValueError(
                    f"{path}: no such dictionary, and no manifest {paths[0]} to make one from; "
                    "copy the dictionary (and spm.model) of training, or give the data folder."
                )
            root = config.get("audio_root")
            texts = [line.text for train in paths for line in read_manifest(train, root)]
            save(targets.dictionary(texts), path)
            logger.info("made %s", path)
        dictionary = TextDictionary.load(path)
        logger.info("dictionary: %d units", len(dictionary))
        return cls(args, dictionary, targets, config)

    def build_model(self, args: Any, from_checkpoint: bool = False) -> nn.Module:
        """See fairseq."""
        bins = getattr(args, "input_feat_per_channel", None)
        args.input_feat_per_channel = bins or self.config.get("input_feat_per_channel", MEL_BINS)
        self.mel_bins, args.input_channels = args.input_feat_per_channel, 1
        args.tgt_dict_size = len(self.dictionary)
        args.dictionary_digest = self._check_dictionary(getattr(args, "dictionary_digest", None))
        model = super().build_model(args, from_checkpoint)
        _check_pair(model, args)
        return model

    def build_criterion(self, args: Any) -> Any:
        """See fairseq. Training and validation, which have a criterion, need texts."""
        self.needs_texts = True
        return super().build_criterion(args)

    def _check_dictionary(self, stored_digest: str | None) -> str:
        """Compares the digest of the units and their order with the digest that a checkpoint
        stores. A checkpoint would load with any dictionary of the same size, and the model would
        then write nonsense."""
        digest = hashlib.sha256("\n".join(self.dictionary.symbols).encode()).hexdigest()[:16]
        if stored_digest not in (None, digest):
            raise ValueError(
                f"{self.args.data}: the checkpoint was trained with other units than this "
                "dictionary has, or in another order; give the folder with the dict.txt of "
                "training."
            )
        return digest

    def load_dataset(
        self, split: str, combine: bool = False, task_cfg: Any | None = None, **kwargs: Any
    ) -> None:
        """Reads ``SPLIT.tsv``, or ``one.tsv`` and ``two.tsv`` for the split ``one,two``; with
        `combine` also ``SPLIT1.tsv`` ...; see fairseq. `task_cfg` holds the settings of a
        checkpoint that is evaluated, and is None in training."""
        args = task_cfg or self.args
        bins = getattr(args, "input_feat_per_channel", None)
        names = []
        for name in split.split(","):
            names.append(name)
            numbered = (f"{name}{number}" for number in itertools.count(1))
            if combine:
                names += itertools.takewhile(
                    lambda part: os.path.isfile(self._path(part)), numbered
                )
        root = self.config.get("audio_root")
        training = task_cfg is None and split == getattr(self.args, "train_subset", "train")
        texts = training or self.needs_texts
        utterances = [
            line for name in names for line in read_manifest(self._path(name), root, texts)
        ]
        without_text = sum(not utterance.text for utterance in utterances)
        if without_text:
            logger.warning(
                "%s: %d of %d recordings have no text; they are transcribed, not scored",
                split,
                without_text,
                len(utterances),
            )
        self.datasets[split] = SpeechDataset(
            utterances,
            self.dictionary,
            self.targets,
            self.args.hop_seconds,
            bins or self.config.get("input_feat_per_channel", MEL_BINS),
            training=training,
            padding_free=self.args.padding_free,
            seed=getattr(self.args, "seed", 1),
        )

    def get_interactive_tokens_and_lengths(
        self, lines: Sequence[str], encode_fn: Any
    ) -> tuple[list[Utterance], list[float]]:
        """See fairseq. Returns the recordings at the paths that fairseq-interactive reads, and
        their durations in seconds."""
        recordings = named_recordings(lines)
        return recordings, [recording.seconds for recording in recordings]

    def build_dataset_for_inference(
        self, src_tokens: list[Utterance], src_lengths: list[float], **kwargs: Any
    ) -> SpeechDataset:
        """See fairseq. Makes a dataset from the result of
        :meth:`get_interactive_tokens_and_lengths`."""
        return SpeechDataset(
            src_tokens,
            self.dictionary,
            self.targets,
            self.args.hop_seconds,
            self.mel_bins,
            shared=False,  # fairseq-interactive makes one dataset for each line
        )

    def _path(self, name: str) -> str:
        return os.path.join(self.args.data, f"{name}.tsv")

    @property
    def source_dictionary(self) -> None:
        """None: recordings have no dictionary."""

    @property
    def target_dictionary(self) -> TextDictionary:
        """Letters or subwords."""
        return self.dictionary

    def max_positions(self) -> tuple[int, int]:
        """Largest numbers of frames and of units in a sample."""
        return self.args.max_source_positions, self.args.max_target_positions

    def get_batch_iterator(self, dataset: Any, **kwargs: Any) -> Any:
        """See fairseq. Only worker processes prefetch batches: the prefetching thread of fairseq
        aborts a finished training if the thread still computes while the interpreter ends
        ("terminate called without an active exception"). Iterators are stored for sets that are
        read again, not for each line of fairseq-interactive."""
        kwargs["data_buffer_size"] = 0
        if all(dataset is not other for other in self.datasets.values()):
            kwargs["disable_iterator_cache"] = True
        return super().get_batch_iterator(dataset, **kwargs)

    def train_step(
        self,
        sample: dict[str, Any],
        model: nn.Module,
        criterion: nn.Module,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
    ) -> tuple[Any, Any, Any]:
        """Draws the masks of SpecAugment from the number of the update, so that resuming is exact.
        The masks are drawn here because only this method gets the number of the update, on which
        ``--spec-augment-start`` depends."""
        args = self.args
        if not args.no_spec_augment and update_num >= args.spec_augment_start:
            sample = {**sample, "net_input": self._masked(sample["net_input"])}
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def _masked(self, net_input: dict[str, Any]) -> dict[str, Any]:
        args, features = self.args, net_input["src_tokens"].clone()
        generator = process_generator(features.device)
        for row, length in zip(features, net_input["src_lengths"].tolist(), strict=True):
            row[:length] = spec_augment(
                row[:length],
                frequency_masks=args.frequency_masks,
                frequency_width=args.frequency_mask_width,
                time_masks=args.time_masks,
                time_width=args.time_mask_width,
                generator=generator,
            )
        return {**net_input, "src_tokens": features}

    def build_generator(self, models: Any, args: Any, **kwargs: Any) -> Any:
        """CTC decoding for CTC models, fairseq's beam search for models with a decoder."""
        settings = self.args
        ctc = [isinstance(model, CapeCtcTransformerModel) for model in models]
        if any(ctc) != all(ctc):
            raise ValueError(
                "--path names CTC models and models with decoder; give one kind, whose "
                "probabilities can be averaged."
            )
        if not all(ctc):
            if settings.ctc_beam != 1 or settings.ctc_lm or settings.ctc_lexicon:
                raise ValueError(
                    "--ctc-beam, --ctc-lm and --ctc-lexicon are for CTC models; this model has a "
                    "decoder, whose beam is set by --beam."
                )
            return super().build_generator(models, args, **kwargs)
        args.beam = settings.ctc_beam  # fairseq-generate shows the beam with the score
        return CtcGenerator(
            self.dictionary,
            beam=settings.ctc_beam,
            lm=settings.ctc_lm,
            lexicon=settings.ctc_lexicon,
            lm_weight=settings.ctc_lm_weight,
            word_score=settings.ctc_word_score,
        )

    def inference_step(
        self,
        generator: Any,
        models: Any,
        sample: dict[str, Any],
        prefix_tokens: Any | None = None,
        constraints: Any | None = None,
    ) -> Any:
        """See fairseq; fairseq-interactive passes on only features and lengths."""
        net_input = sample["net_input"]
        if "hop_nanoseconds" not in net_input:
            hop = torch.full_like(net_input["src_lengths"], round(self.args.hop_seconds * 1e9))
            sample = {**sample, "net_input": {**net_input, "hop_nanoseconds": hop}}
        with torch.no_grad():
            return generator.generate(
                models, sample, prefix_tokens=prefix_tokens, constraints=constraints
            )


def _check_pair(model: nn.Module, args: Any) -> None:
    """Raises ValueError for a criterion or metric that does not fit the kind of model."""
    ctc = isinstance(model, CapeCtcTransformerModel)
    criterion = getattr(args, "criterion", None)
    if ctc and criterion not in (None, "cape_ctc"):
        raise ValueError(
            f"--criterion {criterion} is not for CTC models; allowed with --arch {args.arch}: "
            "cape_ctc."
        )
    if not ctc and criterion == "cape_ctc":
        raise ValueError(
            f"--criterion cape_ctc needs a CTC model such as cape_ctc_transformer; with --arch "
            f"{getattr(args, 'arch', None)} allowed: label_smoothed_cross_entropy."
        )
    metric = getattr(args, "best_checkpoint_metric", None)
    if not ctc and metric in ("wer", "ler"):
        raise ValueError(
            f"--best-checkpoint-metric {metric} is measured by --criterion cape_ctc; allowed for "
            "models with decoder: loss."
        )

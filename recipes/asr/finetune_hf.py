"""Speech recognition with any position embedding, trained on short recordings, tested on long ones.

    python recipes/asr/finetune_hf.py                     # built-in speech of espeak-ng, by CTC
    accelerate launch recipes/asr/finetune_hf.py --dataset FOLDER --max-seconds 15 \\
        --position-embedding cape --model-config sizes.json
    accelerate launch recipes/asr/finetune_hf.py --dataset openslr/librispeech_asr \\
        --dataset-config clean --train-split train.100 --position-embedding cape \\
        --model facebook/s2t-small-librispeech-asr

Data are a hub name, a folder of audio files with texts, or csv, tsv, json, jsonl or parquet files.
A Whisper model is trained and tested without padding to 30 s. Without --model a CTC model is
trained from scratch on letters, or on subwords with --vocab-size.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, so that it also runs under `accelerate launch`
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers
from transformers import Seq2SeqTrainingArguments, WhisperProcessor

import hf_models
from cape_plugins.speech.audio import AudioError
from cape_plugins.speech.ctc import outputs_needed
from cape_plugins.speech.ctc_decoder import build_decoder
from cape_plugins.speech.manifest import LeftOut, Unusable, Utterance
from cape_plugins.utils.files import writing
from cape_plugins.utils.texts import first_line
from hf_models import CapeSpeech2TextConfig, CapeSpeechConfig, CapeSpeechForCTC, CapeWhisperConfig
from hf_models.families.speech_ctc import CORPORA
from recipes.asr.data import (
    Collator,
    Labelled,
    Recordings,
    SpeechTrainer,
    add_recording_args,
    given_recordings,
    synthetic,
)
from recipes.asr.manifest import report_left_out
from recipes.asr.report import METRICS, Text, by_duration, in_training
from recipes.lab.command_line import add_shared, number, of_papers, positive, settings_to_compare
from recipes.lab.data import fingerprint, has_data
from recipes.lab.hf_checkpoints import load_model, make_config, read_beside, read_config
from recipes.lab.hf_training import batches, make_parser, parse, report, share, train_all
from recipes.lab.steps import OTHER_OUTPUT, CommandError, run_main, step, write_lines
from recipes.lab.subwords import SentencePiece
from recipes.lab.tables import Row

COMPARED = ("abspos", "sinpos", "cape")
POSITIONS = "position_embedding"  # field of a configuration
DIGIT_MODEL = {
    "d_model": 96,
    "encoder_layers": 3,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "layer_norm": "pre",
    **dict.fromkeys(("feature_dropout", "activation_dropout", "attention_dropout"), 0.0),
}
DIGIT_TRAINING = (
    "--max_steps 800 --per_device_train_batch_size 32 --learning_rate 2e-3 "
    "--warmup_steps 120 --lr_scheduler_type cosine --weight_decay 0.05"
)
DIGIT_MASKS = {"frequency_width": 20, "time_masks": 2}
SECONDS = (1, 2, 4, 8, 16, 32, 64)  # upper ends of bins of durations


def is_seq2seq(args: argparse.Namespace) -> bool:
    """True for models with a decoder, False for CTC; ``--model`` or ``--model-config`` decides."""
    if args.model:
        if args.preset:
            why = "has no effect on the checkpoint of --model; leave one of the two options out"
            raise CommandError(f"--preset {args.preset} {why}")
        config = read_config(args.model, CapeSpeechConfig, CapeSpeech2TextConfig, CapeWhisperConfig)
        return not isinstance(config, CapeSpeechConfig)
    model_type = (args.model_config or {}).get("model_type", CapeSpeechConfig.model_type)
    seq2seq = {"cape_speech_ctc": False, "cape_speech_to_text": True, "speech_to_text": True}
    if model_type not in seq2seq:
        why = f"model_type {model_type!r} is not allowed; allowed: {', '.join(seq2seq)}"
        raise CommandError(f"--model-config: {why}")
    return seq2seq[model_type]


def model_sizes(args: argparse.Namespace, builtin: bool, seq2seq: bool) -> dict[str, Any]:
    """Fields of the configuration of a model from scratch."""
    if args.preset and seq2seq:
        raise CommandError(f"--preset {args.preset} is for CTC models; leave the option out")
    sizes = DIGIT_MODEL if builtin and not seq2seq else {}
    if args.preset:
        paper = CORPORA[args.preset]
        sizes = {name: paper[name] for name in paper if name != POSITIONS}
    return {**sizes, **(args.model_config or {})}


def positions_of_paper(preset: str | None) -> dict[str, Any]:
    """The paper's settings of the types for a corpus."""
    if not preset:
        return {}
    return {**of_papers("relpos_wsj"), "cape": CORPORA[preset][POSITIONS]}


def make_processor(
    folder: Path, texts: Sequence[str], vocab_size: int | None, seq2seq: bool, sizes: Any
) -> transformers.ProcessorMixin:
    """Makes a processor with a feature extractor and a tokenizer of letters, or of `vocab_size`
    sentencepiece subwords, from the training text."""
    vocab_size = vocab_size or (1000 if seq2seq else None)
    made_of = {"vocab_size": vocab_size, "seq2seq": seq2seq, "text": fingerprint(texts)}

    def make(partial: Path) -> None:
        _vocabulary(partial, texts, vocab_size, seq2seq)

    step(folder, made_of, make, remedy=OTHER_OUTPUT)
    names, pieces = str(folder / "vocab.json"), str(folder / "spm.model")
    if seq2seq:
        tokenizer = transformers.Speech2TextTokenizer(names, pieces)
        extractor = transformers.Speech2TextFeatureExtractor()
        return transformers.Speech2TextProcessor(extractor, tokenizer)
    if vocab_size:
        tokenizer = hf_models.CapeSpeechTokenizer(pieces)
    else:
        tokenizer = transformers.Wav2Vec2CTCTokenizer(names, bos_token=None, eos_token=None)
    config = make_config(CapeSpeechConfig, sizes)
    times = (config.sampling_rate, config.hop_seconds, config.window_seconds)
    extractor = hf_models.CapeSpeechFeatureExtractor(config.num_mel_bins, *times)
    return transformers.Wav2Vec2Processor(extractor, tokenizer)


def at_natural_length(processor: WhisperProcessor, language: str | None) -> WhisperProcessor:
    """Stops the processor of a Whisper model from padding to 30 s, and sets its language to
    `language`."""
    stock = processor.feature_extractor.to_dict() | {"return_attention_mask": True}
    processor.feature_extractor = hf_models.CapeWhisperFeatureExtractor.from_dict(stock)
    if language:
        try:
            processor.tokenizer.set_prefix_tokens(language=language, task="transcribe")
        except (ValueError, TypeError) as error:
            raise CommandError(f"--language {language}: {first_line(error)}") from None
    return processor


def labels_of(processor: Any, text: str) -> list[int]:
    """Token ids of a text; without the first id if the model puts this id before the labels."""
    ids = processor.tokenizer(text=text).input_ids
    return ids[1:] if isinstance(processor, WhisperProcessor) else ids


def _vocabulary(folder: Path, texts: Sequence[str], vocab_size: int | None, seq2seq: bool) -> None:
    names = ["<pad>", "<unk>", "|", *sorted({*"".join(texts)} - {" ", "|"})]
    if vocab_size:
        special = ("bos", "eos", "pad", "unk") if seq2seq else ("pad", "unk")
        ids = {f"{name}_id": index for index, name in enumerate(special)}
        write_lines(folder / "text", texts)
        model = SentencePiece.train([folder / "text"], folder / "spm.model", vocab_size, **ids)
        (folder / "text").unlink()
        size = model.processor.get_piece_size()
        names = [model.processor.id_to_piece(index) for index in range(size)]
    with writing(folder / "vocab.json") as file:
        json.dump({name: index for index, name in enumerate(names)}, file)


def build_model(path: str | None, settings: Any, sizes: Any, tokenizer: Any, seq2seq: bool) -> Any:
    if isinstance(tokenizer, transformers.WhisperTokenizer):
        whisper = hf_models.CapeWhisperForConditionalGeneration
        model = load_model(whisper, path, settings, natural_length=True)
        if tokenizer.language and hasattr(model.generation_config, "lang_to_id"):
            model.generation_config.language = tokenizer.language
            model.generation_config.task = tokenizer.task
        return model
    seq2seq_class = hf_models.CapeSpeech2TextForConditionalGeneration
    model_class = seq2seq_class if seq2seq else CapeSpeechForCTC
    if path:
        return load_model(model_class, path, settings)
    token_fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if seq2seq:
        start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        token_fields |= {"bos_token_id": start, "eos_token_id": end, "decoder_start_token_id": end}
    else:
        # batches without padding may have fewer outputs than labels
        sizes = {"ctc_zero_infinity": True, **sizes}
    config = make_config(
        model_class.config_class, {**sizes, **token_fields}, position_embedding=settings
    )
    return model_class(config)


def fitting(data: Labelled, model: Any) -> Labelled:
    """Leaves out recordings that CTC cannot align: they have more labels (and blanks between equal
    labels) than outputs."""
    config, alignable, left_out = model.config, [], LeftOut()
    for item, ids in zip(data.recordings.items, data.labels, strict=True):
        frames = int((item.seconds - config.window_seconds) / config.hop_seconds) + 1
        labels = torch.tensor([ids], dtype=torch.long)
        with left_out.counting():
            if outputs_needed(labels, labels >= 0) > model._get_feat_extract_output_lengths(frames):
                raise Unusable("with more labels than outputs of the model", item.text)
            alignable.append((item, ids))
    report_left_out("train", left_out, len(data))
    if not alignable:
        raise CommandError("no recording has enough frames for its labels; is the text right?")
    items, labels = zip(*alignable, strict=True)
    return Labelled(Recordings(items, data.recordings.rows, data.recordings.column), labels)


def recognise(
    model: Any, processor: Any, data: Recordings, batch_size: int, args: argparse.Namespace
) -> list[str | None]:
    """Returns the hypotheses of CTC or of the decoder, in the order of the data; None for
    recordings that cannot be read."""
    collate = Collator(processor.feature_extractor, args.hop_seconds)
    ctc = isinstance(model, CapeSpeechForCTC)
    decode = ctc_decoder(processor.tokenizer, args) if ctc else None

    def run(rows: Sequence[int]) -> list[str | None]:
        waveforms = {}
        for row in rows:
            try:
                waveforms[row] = data[row]
            except AudioError as error:
                print(f"test data: skipped ({error})", flush=True)
        texts = recognised([*waveforms.values()]) if waveforms else []
        text_of = dict(zip(waveforms, texts, strict=True))
        return [text_of.get(row) for row in rows]

    def recognised(waveforms: Sequence[torch.Tensor]) -> list[str]:
        batch = collate.features(waveforms).to(model.device)
        if not ctc:
            whisper = isinstance(model, hf_models.CapeWhisperForConditionalGeneration)
            limit = {} if whisper else {"max_new_tokens": 500}  # a Whisper stores its limit
            out = model.generate(**batch, num_beams=args.beam, **limit)
            return processor.batch_decode(out, skip_special_tokens=True)
        lengths = model._get_feat_extract_output_lengths(batch["attention_mask"].sum(-1))
        paths = decode(model(**batch).logits.log_softmax(-1), lengths)
        # CTC decoding has already merged repetitions; repetitions that are left belong to the text
        return [processor.tokenizer.decode(path.tokens, group_tokens=False) for path in paths]

    work = batches([item.seconds for item in data.items], batch_size)
    return share(work, run, "recognise", len(data))


def ctc_decoder(tokenizer: Any, args: argparse.Namespace) -> Any:
    """Makes the function that turns log probabilities ``[B, T, V]`` and lengths into hypotheses."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    files = {"lm": args.ctc_lm, "lexicon": args.ctc_lexicon}
    weights = {"lm_weight": args.ctc_lm_weight, "separator": "|"}
    try:
        return build_decoder(tokens, tokenizer.pad_token_id, args.ctc_beam, **files, **weights)
    except (ValueError, OSError, ImportError) as error:
        raise CommandError(str(error)) from None


def scored(items: Sequence[Utterance], hypotheses: Sequence[str | None]) -> list[Row]:
    """Error rates by duration, over the recordings that could be read."""
    pairs = zip(items, hypotheses, strict=True)
    texts = [Text(item.seconds, item.text, text) for item, text in pairs if text is not None]
    return by_duration(texts, SECONDS)


def make_options() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, "audio", COMPARED, "results/asr_hf")
    add_recording_args(parser)
    parser.add_argument(
        "--max-seconds",
        type=number(0, 1e9),
        metavar="SECONDS",
        help="leave longer recordings out of training",
    )
    parser.add_argument(
        "--vocab-size",
        type=positive,
        help="subwords of a new sentencepiece model (default: letters for CTC, otherwise 1000)",
    )
    parser.add_argument(
        "--padding-free",
        type=number(0.1, 1e6),
        metavar="SECONDS",
        help="train by CTC with batches of SECONDS of audio per process, without padding: each "
        "recording has its own hop",
    )
    parser.add_argument(
        "--no-spec-augment", action="store_true", help="do not mask features in training"
    )
    add_shared(parser, "beam", default=1)
    parser.add_argument(
        "--ctc-beam",
        type=positive,
        default=1,
        metavar="N",
        help="beam size of flashlight-text, for CTC models (default: 1, the best path)",
    )
    parser.add_argument(
        "--ctc-lm",
        metavar="FILE",
        help="n-gram model (ARPA or KenLM binary), of words with --ctc-lexicon, otherwise of units",
    )
    parser.add_argument("--ctc-lexicon", metavar="FILE", help="lines of a word with its units")
    parser.add_argument(
        "--ctc-lm-weight", type=number(-1e6, 1e6), metavar="X", default=1.0, help="(default: 1.0)"
    )
    parser.add_argument(
        "--preset",
        choices=CORPORA,
        help="a CTC model from scratch, as in CAPE Appendix C.2: 36 layers; dropout, layer drop, "
        "learned table and scale of cape for this corpus; --model-config changes fields",
    )
    parser.add_argument(
        "--hop-seconds",
        type=number(0.001, 0.1),
        metavar="SECONDS",
        help="hop of the frames in the test of a CTC model; a longer hop is faster (default: the "
        "hop of the model)",
    )
    parser.add_argument(
        "--language",
        metavar="NAME",
        help="speech language of a multilingual Whisper (default: language of the tokenizer)",
    )
    return parser


def check_flags(args: argparse.Namespace, seq2seq: bool) -> None:
    """Refuses options of models with a decoder for CTC models, and options of CTC models for models
    with a decoder. transformers sets the hop of models with a decoder."""
    ctc_flags = args.ctc_beam != 1 or args.ctc_lm or args.ctc_lexicon
    if ctc_flags if seq2seq else args.beam != 1:
        raise CommandError("--beam is for models with a decoder, --ctc-beam for CTC models")
    ctc_alone = {"--padding-free": args.padding_free, "--hop-seconds": args.hop_seconds}
    for option, value in ctc_alone.items():
        if seq2seq and value is not None:
            why = "is for CTC models, whose features may have any hop; leave the option out"
            raise CommandError(f"{option} {value} {why}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_options()
    builtin = not has_data(parser.parse_known_args(argv)[0])
    args, training = parse(parser, DIGIT_TRAINING.split() if builtin else (), argv)
    if builtin:
        torch.set_num_threads(1)  # more threads do not speed up such a small model
    seq2seq = is_seq2seq(args)
    check_flags(args, seq2seq)
    sizes = model_sizes(args, builtin, seq2seq)
    compared = settings_to_compare(args, "audio", COMPARED, positions_of_paper(args.preset))
    if args.model:
        processor = read_beside(transformers.AutoProcessor, args.model)
        if isinstance(processor, WhisperProcessor):
            processor = at_natural_length(processor, args.language)
    splits = synthetic() if builtin else given_recordings(args)
    if args.max_seconds is not None:
        short = [item for item in splits["train"].items if item.seconds <= args.max_seconds]
        if not short:
            why = "no training recording is that short"
            raise CommandError(f"--max-seconds {args.max_seconds}: {why}")
        splits["train"].items = short
    texts = [item.text for item in splits["train"].items]
    if not args.model:
        folder = args.output / "processor"
        with training.main_process_first():  # the main process writes files for the other processes
            processor = make_processor(folder, texts, args.vocab_size, seq2seq, sizes)
    if not seq2seq:
        ctc_decoder(processor.tokenizer, args)  # finds mistakes in the options before the training
    labels = [labels_of(processor, text) for text in texts]
    train_set = Labelled(splits["train"], labels)

    def make_trainer(settings: Any, run_args: Seq2SeqTrainingArguments) -> SpeechTrainer:
        model = build_model(args.model, settings, sizes, processor.tokenizer, seq2seq)
        data = train_set if seq2seq else fitting(train_set, model)
        collate = Collator(processor.feature_extractor)
        trainer = SpeechTrainer(model, run_args, collate, data, processing_class=processor)
        trainer.batch_seconds = args.padding_free
        trainer.frames_last = isinstance(processor, WhisperProcessor)
        masks = DIGIT_MASKS if builtin else {}
        trainer.masks = None if args.no_spec_augment else masks
        return trainer

    test, rows = splits["test"].items, []
    made_of = splits["train"].fingerprint()
    for columns, trainer in train_all(compared, args, training, make_trainer, made_of):
        batch_size = training.per_device_eval_batch_size
        hypotheses = recognise(trainer.model, processor, splits["test"], batch_size, args)
        rows += [columns | row for row in scored(test, hypotheses)]
        if training.process_index == 0:
            pairs = zip(test, hypotheses, strict=True)
            lines = (f"{item.text}\t{text or ''}" for item, text in pairs)
            path = Path(trainer.args.output_dir, "hypotheses.tsv")
            write_lines(path, ["reference\thypothesis", *lines])
    trained = in_training(rows, SECONDS, max(train_set.seconds))
    report(args, "Speech recognition", rows, "duration", METRICS, trained=trained)


if __name__ == "__main__":
    run_main(main)

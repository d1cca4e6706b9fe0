"""Speech recognition by fairseq's commands, and inputs that they refuse."""

import re

import pytest

pytest.importorskip("soundfile")
import jiwer
import numpy as np
import torch
from fairseq import scoring
from fairseq.data import Dictionary
from omegaconf import OmegaConf

from fairseq_user_dir.host.errors import SettingsError
from tests.support.fairseq_models import (
    USER_DIR,
    differences,
    lines,
    load,
    parameters,
    run_here,
    run_ranks,
)
from tests.support.fairseq_speech import durations, write_manifest

SMALL = (
    *("--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 16, "--encoder-layers", 1),
    *("--encoder-attention-heads", 2, "--dropout", 0.1),
)
TASK = ("--user-dir", USER_DIR, "--task", "cape_asr", "--cpu")
PADDING_FREE_CAPE = ("--padding-free", "--position-embedding", "cape")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("speech")
    for seed, (split, count) in enumerate((("train", 24), ("valid", 5), ("test", 11))):
        write_manifest(path, split, durations(count, seed), seed)
    return path


def train_words(folder, save_dir, *extra, arch="cape_ctc_transformer_tiny"):
    more = () if "ctc" not in arch else ("--criterion", "cape_ctc")
    return [
        "fairseq-train", folder, *TASK, "--arch", arch, *SMALL, *more, "--optimizer", "adam",
        "--lr", 0.01, "--max-tokens", 500, "--save-dir", save_dir, "--no-progress-bar",
        "--num-workers", 0, "--seed", 5, *extra,
    ]  # fmt: skip


def generate(folder, checkpoint, *extra):
    """Nothing about positions, hops, batches or scores: the task chooses its scorer."""
    return run_here(
        "fairseq-generate", folder, *TASK, "--path", checkpoint, "--gen-subset", "test",
        "--max-tokens", 2000, "--num-workers", 0, *extra,
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("checkpoint")
    run_here(*train_words(folder, out, *PADDING_FREE_CAPE, "--max-update", 12))
    return out / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def plain(folder, checkpoint):
    """What is printed without a beam."""
    return generate(folder, checkpoint)


@pytest.fixture(scope="module")
def short_hops(folder, checkpoint):
    return generate(folder, checkpoint, "--hop-seconds", 0.014, "--scoring", "bleu")


@pytest.mark.slow
def test_resumed_training_ends_alike(folder, tmp_path, checkpoint):
    """Stopped in the middle of an epoch: positions, masks, hops, skipped frames, dropout."""
    for updates in (5, 12):
        words = (*PADDING_FREE_CAPE, "--max-update", updates)
        log = run_here(*train_words(folder, tmp_path, *words))
    assert "Loaded checkpoint" in log
    assert not differences(parameters(checkpoint), parameters(tmp_path / "checkpoint_last.pt"))


@pytest.mark.slow
def test_two_processes_share_the_batches_of_one(run_cli, folder, tmp_path):
    """Without random numbers in the model, two processes learn the same as one process with two
    batches per update, also over the end of an epoch; and both processes end, although their data
    loaders have loaded ahead. How ranks resume is tested in test_resume.py."""
    words = ("--padding-free", "--position-embedding", "sinpos", "--dropout", 0, "--max-update", 9)
    words += ("--optimizer", "sgd", "--lr", 0.1, "--frequency-masks", 0, "--time-masks", 0)
    run_here(*train_words(folder, tmp_path / "one", *words, "--update-freq", 2))
    run_ranks(run_cli, train_words(folder, tmp_path / "two", *words, "--num-workers", 1))
    alone, shared = (parameters(tmp_path / name / "checkpoint_last.pt") for name in ("one", "two"))
    start = parameters(tmp_path / "one/checkpoint1.pt")
    moved = max(float((alone[name] - start[name]).abs().max()) for name in alone)
    assert moved > 0.01
    for name in alone:
        assert torch.allclose(alone[name], shared[name], atol=1e-6), name


@pytest.mark.slow
def test_error_rates_are_jiwers(folder, checkpoint, plain):
    references, hypotheses = lines(plain, "T"), lines(plain, "H")
    assert len(references) == 11, "every recording is decoded"
    pairs = [(references[i][0][0], hypotheses[i][0][1]) for i in references]
    wer, ler = map(float, re.search(r"WER ([\d.]+) LER ([\d.]+)", plain).groups())
    truth, recognised = map(list, zip(*pairs, strict=True))
    assert wer == pytest.approx(100 * jiwer.wer(truth, recognised), abs=0.006)
    assert ler == pytest.approx(100 * jiwer.cer(truth, recognised), abs=0.006)
    log = run_here(
        "fairseq-validate", folder, *TASK, "--path", checkpoint, "--valid-subset", "test",
        "--max-tokens", 2000, "--num-workers", 0,
    )  # fmt: skip
    valid = re.search(r"wer ([\d.]+) \| ler ([\d.]+)", log).groups()
    assert tuple(map(float, valid)) == pytest.approx((wer, ler), abs=0.006)


def test_an_empty_hypothesis_is_scored():
    """fairseq's BLEU ended the process by a segmentation fault."""
    dictionary = Dictionary()
    words = dictionary.encode_line("a b c d e", add_if_not_exist=True).int()
    results = []
    for name in ("bleu", "cape_wer"):
        settings = scoring.SCORER_REGISTRY[name].__dataclass
        scorer = scoring.build_scorer(OmegaConf.structured(settings(_name=name)), dictionary)
        for reference, hypothesis in ("a b c d e", ""), ("", ""):
            if hasattr(scorer, "add_string"):
                scorer.add_string(reference, hypothesis)
            else:
                target = words if reference else words[-1:]
                scorer.add(target, words[:0])
                scorer.add(target, torch.full((2,), dictionary.pad()).int())
        results.append(scorer.result_string())
    assert re.search(r"= 0\.0", results[0])
    assert "WER 100.0" in results[1]


@pytest.mark.slow
def test_recordings_are_understood_by_their_paths(folder, checkpoint, short_hops, monkeypatch):
    """Paths give the same results as a manifest with texts; missing files are left out."""
    decoded = lines(short_hops, "H")
    assert "Generate test with beam=1: " in short_hops, "not the beam of models with decoder"
    recordings = [line.split("\t")[1] for line in (folder / "test.tsv").read_text().splitlines()]
    monkeypatch.chdir(folder)
    named = run_here(
        "fairseq-interactive", folder, *TASK, "--path", checkpoint, "--hop-seconds", 0.014,
        input="\n".join(["gone.wav", *recordings[1:4], "", recordings[4]]) + "\n",
    )  # fmt: skip
    by_line = lines(named, "H")
    assert list(by_line) == [1, 2, 3, 5]
    for number, expected in zip(by_line, range(4), strict=True):
        (score, text), (same_score, same_text) = by_line[number][0], decoded[expected][0]
        assert text == same_text
        assert float(score) == pytest.approx(float(same_score), abs=1e-4)
    assert "gone.wav: no such file" in named


@pytest.mark.slow
def test_another_dictionary_is_refused(folder, checkpoint, tmp_path):
    """Another dictionary of the same size, with which the checkpoint would load."""
    for path in folder.iterdir():
        if path.name != "dict.txt":
            (tmp_path / path.name).symlink_to(path)
    units = (folder / "dict.txt").read_text().splitlines()
    (tmp_path / "dict.txt").write_text("\n".join(units[::-1]) + "\n")
    with pytest.raises(ValueError, match="trained with other units"):
        load(checkpoint, tmp_path)


@pytest.mark.slow
def test_each_option_of_decoding_changes_the_result(
    folder, checkpoint, plain, short_hops, tmp_path
):
    """Hop, beam and language model; test_ctc.py tests which of them need each other."""
    names = ("<unk>", "<s>", "</s>", "a", "b", "c", "|")
    counts = f"\\data\\\nngram 1={len(names)}\nngram 2=1\n\n"
    unigrams = "\\1-grams:\n" + "".join(f"-{n}.0\t{name}\t0\n" for n, name in enumerate(names, 1))
    bigrams = "\n\\2-grams:\n-0.1\ta b\n\n\\end\\\n"
    (tmp_path / "lm.arpa").write_text(counts + unigrams + bigrams)
    models = ((), ("--ctc-lm", tmp_path / "lm.arpa"))
    beams = [generate(folder, checkpoint, "--ctc-beam", 8, *model) for model in models]
    decoded = [lines(output, "H") for output in (plain, short_hops, *beams)]
    assert all(hypotheses.keys() == decoded[0].keys() for hypotheses in decoded)
    assert all(hypotheses != decoded[0] for hypotheses in decoded[1:])
    assert decoded[2] != decoded[3]
    assert "BLEU4 = " in short_hops
    assert "BLEU4 = " not in plain


@pytest.mark.slow
def test_encoder_and_decoder_train_and_decode(folder, tmp_path):
    flags = (*PADDING_FREE_CAPE, "--position-decoder-embedding", "relpos", "--max-update", 3)
    run_here(*train_words(folder, tmp_path, *flags, arch="cape_seq2seq_transformer_tiny"))
    output = generate(folder, tmp_path / "checkpoint_last.pt", "--beam", 2, "--max-len-b", 9)
    assert len(lines(output, "H")) == 11


@pytest.mark.slow
def test_the_stock_task_on_features_trains_and_decodes(tmp_path):
    """Its recipe changes by one flag."""
    data = tmp_path / "data"
    (data / "features").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split in ("train", "valid", "test"):
        rows = ["id\taudio\tn_frames\ttgt_text\tspeaker"]
        for n in range(10):
            np.save(data / f"features/{split}{n}.npy", rng.normal(size=(40 + n, 80)).astype("f"))
            rows.append(f"{n}\tfeatures/{split}{n}.npy\t{40 + n}\ta b\tnobody")
        (data / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    (data / "dict.txt").write_text("a 1\nb 1\n")
    (data / "config.yaml").write_text(
        f"vocab_filename: dict.txt\ninput_feat_per_channel: 80\naudio_root: {data}\n"
    )
    task = ("--task", "speech_to_text", "--required-batch-size-multiple", 1)
    words = (*task, "--position-embedding", "cape", "--max-update", 3, "--conv-channels", 16)
    words += ("--decoder-layers", 1, "--decoder-attention-heads", 2)
    words += ("--criterion", "label_smoothed_cross_entropy")
    run_here(*train_words(data, tmp_path, *words, arch="cape_s2t_transformer_xs"))
    output = generate(data, tmp_path / "checkpoint_last.pt", *task, "--max-len-b", 5)
    assert len(lines(output, "H")) == 10


BAD = {
    "--hop-seconds 5": "5 is not allowed; allowed: 0.001 to 0.1 seconds",
    "--subword-model gone": "--subword-model gone: no such file",
    "--train-subset gone": "gone.tsv",
    "--criterion cape_ctc --arch cape_s2t_transformer_xs": "needs a CTC model",
    "--criterion cross_entropy": "--criterion cross_entropy is not for CTC models",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", BAD)
def test_bad_command_lines_stop_with_a_reason(folder, tmp_path, capsys, words):
    with pytest.raises((SettingsError, ValueError, SystemExit)) as stopped:
        run_here(*train_words(folder, tmp_path, *words.split(), "--max-update", 1))
    assert BAD[words] in f"{stopped.value}{capsys.readouterr().err}"

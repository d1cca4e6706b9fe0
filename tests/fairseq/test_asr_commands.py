"""Speech recognition through fairseq's own commands."""

import re

import pytest

pytest.importorskip("soundfile")
import jiwer
import numpy as np
import torch

from tests.support.fairseq_models import USER_DIR, differences, lines, parameters, run_ranks
from tests.support.fairseq_speech import durations, write_manifest

SMALL = (
    *("--encoder-embed-dim", 16, "--encoder-ffn-embed-dim", 16, "--encoder-layers", 1),
    *("--encoder-attention-heads", 2, "--dropout", 0.1),
)
TASK = ("--user-dir", USER_DIR, "--task", "cape_asr", "--cpu")


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
        "--num-workers", 1, "--seed", 5, *extra,
    ]  # fmt: skip


def train(run_cli, *words, check=True, **choice):
    return run_cli(*train_words(*words, **choice), check=check)


def generate(run_cli, folder, checkpoint, *extra, **kwargs):
    """Nothing about positions, hops, batches or scores: the task chooses its scorer."""
    return run_cli(
        "fairseq-generate", folder, *TASK, "--path", checkpoint, "--gen-subset", "test",
        "--max-tokens", 2000, *extra, **kwargs,
    ).stdout  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(folder, tmp_path_factory, run_cli):
    out = tmp_path_factory.mktemp("checkpoint")
    train(
        run_cli, folder, out, "--max-update", 12, "--padding-free", "--position-embedding", "cape"
    )
    return out / "checkpoint_last.pt"


@pytest.mark.slow
def test_resumed_training_ends_alike(run_cli, folder, tmp_path, checkpoint):
    """Stopped in the middle of an epoch: positions, masks, hops, skipped frames, dropout."""
    words = ("--padding-free", "--position-embedding", "cape")
    for updates in (5, 12):
        log = train(run_cli, folder, tmp_path, "--max-update", updates, *words)
    assert "Loaded checkpoint" in log.stderr + log.stdout
    assert not differences(parameters(checkpoint), parameters(tmp_path / "checkpoint_last.pt"))


@pytest.mark.slow
def test_two_processes_share_the_batches_of_one(run_cli, folder, tmp_path):
    """Without random numbers in the model, two processes learn what one learns from two batches an
    update, over the end of an epoch; interrupted in its middle, they go on as if they had not been.
    """
    words = ("--padding-free", "--position-embedding", "sinpos", "--dropout", 0)
    words += ("--optimizer", "sgd", "--lr", 0.1, "--frequency-masks", 0, "--time-masks", 0)
    train(run_cli, folder, tmp_path / "one", *words, "--update-freq", 2, "--max-update", 9)
    for name, updates in (("two", 9), ("again", 4), ("again", 9)):
        flags = (*words, "--max-update", updates)
        log, _ = run_ranks(run_cli, train_words(folder, tmp_path / name, *flags))
    assert re.search(r"Loaded checkpoint .*@ 4 updates", log)
    alone, shared, again = (
        parameters(tmp_path / name / "checkpoint_last.pt") for name in ("one", "two", "again")
    )
    assert not differences(shared, again)
    start = parameters(tmp_path / "one/checkpoint1.pt")
    moved = max(float((alone[name] - start[name]).abs().max()) for name in alone)
    assert moved > 0.01
    for name in alone:
        assert torch.allclose(alone[name], shared[name], atol=1e-6), name


@pytest.mark.slow
def test_error_rates_are_jiwers(run_cli, folder, checkpoint):
    output = generate(run_cli, folder, checkpoint)
    references, hypotheses = lines(output, "T"), lines(output, "H")
    assert len(references) == 11, "every recording is decoded"
    pairs = [(references[i][0][0], hypotheses[i][0][1]) for i in references]
    wer, ler = map(float, re.search(r"WER ([\d.]+) LER ([\d.]+)", output).groups())
    truth, recognised = map(list, zip(*pairs, strict=True))
    assert wer == pytest.approx(100 * jiwer.wer(truth, recognised), abs=0.006)
    assert ler == pytest.approx(100 * jiwer.cer(truth, recognised), abs=0.006)
    log = run_cli(
        "fairseq-validate", folder, *TASK, "--path", checkpoint, "--valid-subset", "test",
        "--max-tokens", 2000,
    )  # fmt: skip
    valid = re.search(r"wer ([\d.]+) \| ler ([\d.]+)", log.stdout + log.stderr).groups()
    assert tuple(map(float, valid)) == pytest.approx((wer, ler), abs=0.006)


EMPTY = """
import torch
from fairseq import scoring
from fairseq.data import Dictionary
from omegaconf import OmegaConf
import fairseq_user_dir

dictionary = Dictionary()
words = dictionary.encode_line("a b c d e", add_if_not_exist=True).int()
for name in "bleu", "cape_wer":
    settings = scoring.SCORER_REGISTRY[name].__dataclass
    scorer = scoring.build_scorer(OmegaConf.structured(settings(_name=name)), dictionary)
    for reference, hypothesis in ("a b c d e", ""), ("", ""):
        if hasattr(scorer, "add_string"):
            scorer.add_string(reference, hypothesis)
        else:
            target = words if reference else words[-1:]
            scorer.add(target, words[:0])
            scorer.add(target, torch.full((2,), dictionary.pad()).int())
    print(scorer.result_string())
"""


@pytest.mark.slow
def test_an_empty_hypothesis_is_scored(run_cli):
    """In a process of its own, which fairseq's BLEU ended by a segmentation fault."""
    bleu, rate = run_cli("python", "-c", EMPTY).stdout.splitlines()
    assert re.search(r"= 0\.0", bleu)
    assert "WER 100.0" in rate


@pytest.mark.slow
def test_recordings_are_understood_by_their_paths(run_cli, folder, checkpoint):
    """Like those of a manifest with texts; what is not there is left out."""
    flags = ("--hop-seconds", 0.014)
    output = generate(run_cli, folder, checkpoint, *flags)
    plain = lines(output, "H")
    assert "Generate test with beam=1: WER" in output, "not the beam of models with decoder"
    recordings = [line.split("\t")[1] for line in (folder / "test.tsv").read_text().splitlines()]
    named = run_cli(
        "fairseq-interactive", folder, *TASK, "--path", checkpoint, *flags,
        input="\n".join(["gone.wav", *recordings[1:4], "", recordings[4]]) + "\n", cwd=folder,
    )  # fmt: skip
    by_line = lines(named.stdout, "H")
    assert list(by_line) == [1, 2, 3, 5]
    for number, expected in zip(by_line, range(4), strict=True):
        (score, text), (same_score, same_text) = by_line[number][0], plain[expected][0]
        assert text == same_text
        assert float(score) == pytest.approx(float(same_score), abs=1e-4)
    assert "gone.wav: no such file" in named.stdout + named.stderr


@pytest.mark.slow
def test_another_dictionary_is_refused(run_cli, folder, checkpoint, tmp_path):
    """One of the same size, which would load."""
    for path in folder.iterdir():
        if path.name != "dict.txt":
            (tmp_path / path.name).symlink_to(path)
    units = (folder / "dict.txt").read_text().splitlines()
    (tmp_path / "dict.txt").write_text("\n".join(units[::-1]) + "\n")
    words = ("fairseq-generate", tmp_path, *TASK, "--path", checkpoint, "--gen-subset", "test")
    failed = run_cli(*words, check=False)
    assert failed.returncode
    assert "trained with other units" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.slow
def test_hop_beam_and_language_model_change_what_is_decoded(run_cli, folder, checkpoint, tmp_path):
    """Each changes what is decoded or how it is scored, and none is needed."""
    plain = lines(generate(run_cli, folder, checkpoint), "H")
    beam = ("--ctc-beam", 8)
    names = ("<unk>", "<s>", "</s>", "a", "b", "c", "|")
    counts = f"\\data\\\nngram 1={len(names)}\nngram 2=1\n\n"
    unigrams = "\\1-grams:\n" + "".join(f"-{n}.0\t{name}\t0\n" for n, name in enumerate(names, 1))
    bigrams = "\n\\2-grams:\n-0.1\ta b\n\n\\end\\\n"
    (tmp_path / "lm.arpa").write_text(counts + unigrams + bigrams)
    hop = ("--hop-seconds", 0.014, "--scoring", "bleu")
    for words in (hop, beam, (*beam, "--ctc-lm", tmp_path / "lm.arpa")):
        output = generate(run_cli, folder, checkpoint, *words)
        assert lines(output, "H").keys() == plain.keys()
        assert lines(output, "H") != plain
        assert ("BLEU4 = " in output) == ("bleu" in words)
    failed = run_cli(
        "fairseq-generate", folder, *TASK, "--path", checkpoint, "--gen-subset", "test",
        "--ctc-lm", tmp_path / "lm.arpa", check=False,
    )  # fmt: skip
    assert "--ctc-lm and --ctc-lexicon need a beam" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.slow
def test_encoder_and_decoder_train_and_decode(run_cli, folder, tmp_path):
    flags = ("--position-decoder-embedding", "relpos", "--position-embedding", "cape")
    flags += ("--padding-free", "--max-update", 3)
    train(run_cli, folder, tmp_path, *flags, arch="cape_seq2seq_transformer_tiny")
    checkpoint = tmp_path / "checkpoint_last.pt"
    output = generate(run_cli, folder, checkpoint, "--beam", 2, "--max-len-b", 9)
    assert len(lines(output, "H")) == 11


@pytest.mark.slow
def test_the_stock_task_on_features_trains_and_decodes(run_cli, tmp_path):
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
    run_cli(
        "fairseq-train", data, "--user-dir", USER_DIR, "--task", "speech_to_text", "--cpu",
        "--arch", "cape_s2t_transformer_xs", *SMALL, "--decoder-layers", 1,
        "--decoder-attention-heads", 2, "--conv-channels", 16, "--position-embedding", "cape",
        "--max-update", 3, "--optimizer", "adam", "--max-tokens", 500,
        "--save-dir", tmp_path / "out", "--criterion", "label_smoothed_cross_entropy",
    )  # fmt: skip
    output = run_cli(
        "fairseq-generate", data, "--user-dir", USER_DIR, "--task", "speech_to_text", "--cpu",
        "--path", tmp_path / "out/checkpoint_last.pt", "--max-tokens", 2000, "--max-len-b", 5,
        "--required-batch-size-multiple", 1,
    ).stdout  # fmt: skip
    assert len(lines(output, "H")) == 10


BAD = [
    (("--hop-seconds", 5), "5 is not allowed; allowed: 0.001 to 0.1 seconds"),
    (("--subword-model", "gone"), "--subword-model gone: no such file"),
    (("--train-subset", "gone"), "gone.tsv: no such manifest"),
    (("--criterion", "cape_ctc", "--arch", "cape_s2t_transformer_xs"), "needs a CTC model"),
    (("--criterion", "cross_entropy"), "--criterion cross_entropy is not for CTC models"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_command_lines_stop_with_a_reason(run_cli, folder, tmp_path, words, message):
    failed = train(run_cli, folder, tmp_path, *words, "--max-update", 1, check=False)
    assert failed.returncode
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr

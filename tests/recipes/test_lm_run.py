"""The recipe of language models of fairseq: settings, symbols and losses, and its command line."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("fairseq")
from fairseq import options
from fairseq.data import Dictionary, data_utils
from torch.nn import functional as F

from cape_plugins import TYPES, PositionConfig
from cape_plugins.settings.arguments import TYPE_ARG, given_settings
from recipes.lab.steps import CommandError
from recipes.lm import run
from recipes.lm.data import TASKS
from tests.support import fairseq_models
from tests.support.command_lines import warm_fairseq
from tests.support.plots import COLOURS, assert_lines
from tests.support.tables import read_csv

LENGTHS = ("--train-length", "128", "--test-lengths", "64", "128", "512", "1024")
# what follows from 128 and 1024: 1024 - 128 = 896
FOLLOWING = {"max_offset": 896, "max_global_shift": 896.0}
FOLLOWING |= {"relative_context": 16, "max_position": 1024}


def parsed(*words):
    """What fairseq-train understands of the flags of each model."""
    args = run.parse_arguments(["--device", "cpu", *words])
    arguments = {}
    for model in args.models:
        parser = options.get_training_parser()
        argv = ["data", *run.training_flags(args, model)]
        arguments[model.name, model.seed] = options.parse_args_and_arch(parser, argv)
    return arguments


def config(args):
    settings = {"type": getattr(args, TYPE_ARG), **given_settings(args, "text")}
    return PositionConfig.from_dict(settings, "text", "decoder")


def test_settings_follow_from_the_lengths():
    arguments = parsed(*LENGTHS)
    assert [name for name, _ in arguments] == [*TYPES]
    for (name, seed), args in arguments.items():
        options = FOLLOWING.keys() & TYPES[name].options.keys()
        if not TYPES[name].sampling:
            options -= {"max_position"}  # positions are counted
        settings = {option: FOLLOWING[option] for option in options}
        expected = PositionConfig(name, "text", "decoder", **settings)
        assert (config(args), seed) == (expected, 1)
        assert not getattr(expected, "mean_normalize", False), "shifts cover half as much then"


@pytest.mark.parametrize(
    "name", [name for name in TYPES if "draw_positions" in TYPES[name].options]
)
def test_positions_drawn_by_an_option_reach_the_longest_test(name):
    words = [f"{name}:draw_positions=uniform{more}" for more in ("", ",max_position=2000")]
    rows = [config(args) for args in parsed(*LENGTHS, "--compare", *words).values()]
    assert {row.draw_positions for row in rows} == {"uniform"}
    assert [row.max_position for row in rows] == [1024, 2000]


def test_trainings_equal_the_hugging_face_recipe():
    """Blocks, updates and schedule, read off the options of the Trainer."""
    finetune_hf = pytest.importorskip("recipes.lm.finetune_hf")
    trainer = dict(re.findall(r"--(\w+) (\S+)", f"{finetune_hf.TRAINING} {TASKS['text'].training}"))
    arguments = parsed(*LENGTHS, "--compare", "sinpos", "--seeds", "1", "2")
    first, second = arguments.values()
    assert first.seed != second.seed
    assert (first.tokens_per_sample, first.sample_break_mode) == (128, "none")
    assert first.batch_size == int(trainer["per_device_train_batch_size"])
    assert first.max_update == int(trainer["max_steps"])
    assert first.lr == [float(trainer["learning_rate"])]
    assert first.lr_scheduler == trainer["lr_scheduler_type"]
    assert first.warmup_updates == int(trainer["warmup_steps"])
    assert first.adam_betas == f"(0.9,{trainer['adam_beta2']})"
    assert first.decoder_layers == finetune_hf.MODEL["num_hidden_layers"]
    assert first.decoder_embed_dim == finetune_hf.MODEL["hidden_size"]
    assert first.decoder_ffn_embed_dim == finetune_hf.MODEL["intermediate_size"]
    assert first.decoder_attention_heads == finetune_hf.MODEL["num_attention_heads"]
    assert first.dropout == 0


def test_each_byte_has_a_symbol_that_fairseq_reads_as_itself():
    assert len({*run.SYMBOLS}) == 256
    assert all(re.fullmatch(r"[!-~]+", symbol) for symbol in run.SYMBOLS)
    assert run.symbols("a b\né") == ["a", "<0x20>", "b", "</s>", "<0xC3>", "<0xA9>"]
    special = {Dictionary().symbols[index] for index in (0, 1, 3)}  # all but the end of a line
    assert not special & {*run.SYMBOLS}


@pytest.mark.slow
def test_binarised_text_is_the_stream_of_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", warm_fairseq())
    text = "one  <pad> </s>\n\n\ttwö\r\nthree\u2028#fairseq:overwrite"
    folder = run.binarise(tmp_path / "data", text)
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    assert len(dictionary) == 256 + 3  # beginning, padding, unknown
    lines = data_utils.load_indexed_dataset(str(folder / "train"), dictionary)
    stream = np.concatenate([lines[index].numpy() for index in range(len(lines))])
    assert [dictionary[index] for index in stream] == run.symbols(f"{text}\n")


@pytest.mark.parametrize("name", TYPES)
def test_losses_belong_to_each_token_after_the_ones_before_it(name):
    settings = {**run.settings_of_types(8, 24)[name], "embedding": name}
    words = [(f"--position-{key.replace('_', '-')}", value) for key, value in settings.items()]
    model = fairseq_models.build_lm(*(word for pair in words for word in pair)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # sharp enough for losses to differ
    first, end = fairseq_models.FIRST_WORD, fairseq_models.VOCABULARY
    ids = torch.randint(first, end, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        values = run.losses(model, ids)
        assert values.shape == (2, 23)
        for position in range(1, 24):
            logits, _ = model(ids[:, :position])
            expected = -logits[:, -1].log_softmax(-1).gather(1, ids[:, position, None])[:, 0]
            torch.testing.assert_close(values[:, position - 1], expected, rtol=1e-4, atol=1e-4)


TINY = ["--", "--decoder-layers", "1", "--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16"]


@pytest.mark.slow
def test_own_text_from_training_to_figure(tmp_path, monkeypatch, run_cli):
    monkeypatch.setattr("sys.executable", warm_fairseq())
    monkeypatch.chdir(tmp_path)
    text = "all work and no play\n" * 60
    (tmp_path / "my text.txt").write_text(text)
    command = ["--train-file", "my text.txt", "--train-length", "8", "--test-lengths", "8", "24"]
    command += ["--compare", "cape:max_global_shift=5", "--updates", "40", "--limit", "2"]
    command += ["--seeds", "2", "--device", "cpu", *TINY, "--lr", "0.02"]
    run.main(command)
    out, work = tmp_path / "results/lm/fairseq", tmp_path / "build/lm/my text.txt"
    rows = read_csv(out / "scores.csv")
    assert [(row["variant"], row["seed"], row["position"]) for row in rows] == [
        ("cape:max_global_shift=5", "2", label) for label in ("0-7", "8-23")
    ]
    # the checkpoint's loss on the last tenth of the text, 126 bytes: five stretches, of which two
    # are evenly spread
    held_out = text[-126:]
    chosen = [run.symbols(held_out[start : start + 24]) for start in (0, 3 * 24)]
    checkpoint = work / "runs/cape-max_global_shift-5-seed2/checkpoint_last.pt"
    model, task = fairseq_models.load(checkpoint, work / "data/binary")
    ids = torch.tensor([list(map(task.source_dictionary.index, part)) for part in chosen])
    with torch.no_grad():
        logits, _ = model(ids)
    values = F.cross_entropy(logits[:, :-1].mT, ids[:, 1:], reduction="none")
    expected = [values[:, :7].mean().item(), values[:, 7:].mean().item()]
    assert [float(row["loss"]) for row in rows] == pytest.approx(expected, abs=2e-4)
    assert float(rows[0]["loss"]) < 5.55 - 2, "a guess is log(259)"
    page = (out / "scores.md").read_text()
    for fact in ("`--position-embedding cape --position-max-global-shift 5`", "40 updates", "0-7"):
        assert fact in page
    assert "shape max_offset 16, cape max_global_shift 16" in page
    assert str(tmp_path) not in page
    assert_lines(out / "scores.png", COLOURS[:1])
    # all is reused; what would be made otherwise is refused
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*") if path.is_file()}
    assert checkpoint in before
    run_cli("python", "-m", "recipes.lm.run", *command, cwd=tmp_path)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert read_csv(out / "scores.csv") == rows
    command[command.index("--updates") + 1] = "41"
    with pytest.raises(CommandError, match="made with other settings.* give another --work folder"):
        run.main(command)


OF_THIS_FILE = ["--train-file", __file__, "--train-length", "900000"]
BAD = [
    (["--compare", "rotary"], "--compare rotary is unknown; allowed: nopos, sinpos"),
    (["--compare", "sinpos:max_offset=1"], "position embedding sinpos:max_offset=1"),
    (["--test-lengths", "8", "4"], "--test-lengths 8 4: the numbers must increase"),
    (["--test-lengths", "1", "4"], "length 1 has no token to predict"),
    (["--train-length", "1"], "length 1 has no token to predict"),
    (["--validation-file", "a.txt"], "--validation-file needs --train-file"),
    (["--train-file", "gone.txt"], "gone.txt: No such file"),
    (["--train-length", "64", "--test-lengths", "16", "32"], "shorter than --train-length 64"),
    ([*OF_THIS_FILE, "--test-lengths", "900000"], "the training text has"),
    (["--train-file", __file__, "--test-lengths", "900000"], "the validation text has"),
    (["--device", "cuda:99"], "--device cuda:99: "),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=lambda value: str(value)[-40:])
def test_bad_input_is_refused(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((CommandError, SystemExit)) as refused:
        run.main(words)
    said = str(refused.value) + capsys.readouterr().err
    assert message in said
    assert "\n" not in said.strip().removeprefix("2")
    assert not any(tmp_path.iterdir())

"""The command convert: its report on the result, converted models that compute the same as the
stock model, and users' mistakes."""

import json
import re

import pytest
import torch

from hf_models.convert import main
from tests.hf.test_families import output, stock_batch
from tests.support.hf import FAMILIES, WITH_STOCK, batch, make


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Stock checkpoints by family, with the outputs of each."""
    root = tmp_path_factory.mktemp("stock")
    folders = {}
    for family in WITH_STOCK:
        model = FAMILIES[family].build_stock(seed=1, attn_implementation="eager")
        model.save_pretrained(root / family)
        folders[family] = root / family, outputs(model, family)
    return folders


def outputs(model, family):
    return output(model, stock_batch(family))


def converted(family, folder, target, *flags):
    assert main([str(folder), str(target), *flags]) == 0
    return FAMILIES[family].model.from_pretrained(target, attn_implementation="eager")


SCALED, DROPPED = ["--position-source-scale", "1.05"], "'abspos' -> 'cape', the learned table is"
CHANGES = [
    ("marian", "cape", SCALED, ["alpha: 1 -> 1.05", "the BOS hint: false -> true"]),
    ("marian", "sinpos", ["--position-relative-context", "3"], ["relative attention: 0 -> 3"]),
    ("vit", "cape", [], [f"position embedding {DROPPED} dropped"]),
    ("speech_to_text", "cape", [], ["mean-normalised positions: false -> true"]),
    ("vit", "abspos", [], []),
]


@pytest.mark.parametrize(("family", "name", "flags", "changes"), CHANGES)
def test_it_says_what_the_result_computes_otherwise(
    family, name, flags, changes, stock, tmp_path, capsys
):
    folder, expected = stock[family]
    model = converted(family, folder, tmp_path / "cape", "--position-embedding", name, *flags)
    said = capsys.readouterr().out
    same = torch.equal(outputs(model, family), expected)
    assert same == (not changes)
    assert ("has the same outputs as" in said) == same
    assert ("has other outputs than" in said) == (not same)
    shown = re.findall("^  (.*)", said, re.MULTILINE)
    if family == "speech_to_text":
        shown = [line.removesuffix(" (encoder)") for line in shown if "(encoder)" in line]
    assert shown == changes


def test_converted_folders_convert_again(stock, tmp_path):
    folder, _ = stock["marian"]
    for name in ("sinpos", "fire"):
        model = converted("marian", folder, tmp_path / name, "--position-embedding", name)
        folder = tmp_path / name
    assert model.config.position_embedding["type"] == "fire"
    biases = [p for n, p in model.named_parameters() if ".layer_bias." in n]
    model.train()(**batch("marian")).loss.backward()
    assert biases
    assert all(torch.isfinite(bias.grad).all() for bias in biases)


NEUTRAL = [
    ("marian", "cape", ["--position-max-global-shift", "9"]),
    ("marian", "cape", ["--position-relative-context", "3", "--position-relative-values", "true"]),
    ("vit", "abspos", ["--position-relative-context", "2"]),
    ("speech_to_text", "cape", []),
]


@pytest.mark.parametrize(("family", "name", "flags"), NEUTRAL)
def test_neutral_start_computes_what_stock_does(family, name, flags, stock, tmp_path, capsys):
    folder, expected = stock[family]
    words = ["--neutral", "--position-embedding", name, *flags]
    model = converted(family, folder, tmp_path / "cape", *words)
    assert model.config.position_embedding["type"] == name
    if flags and "relative" in flags[0]:  # another order of the sums
        torch.testing.assert_close(outputs(model, family), expected, atol=1e-5, rtol=1e-5)
        model.train()(**batch(family)).loss.backward()
        learned = [p for n, p in model.named_parameters() if ".relative." in n]
        assert any(table.grad.abs().sum() > 0 for table in learned)
    else:
        assert torch.equal(outputs(model, family), expected)
    said = capsys.readouterr().out
    if family == "speech_to_text":
        assert re.findall("^  (.*)", said, re.MULTILINE) == [model.config.stock_difference]
    else:
        assert "has the same outputs as" in said


TYPE, NO = "--position-embedding", "--neutral cannot"
IMPOSSIBLE = [
    ("marian", ["--stock"], "holds a stock MarianMTModel already"),
    ("marian", ["--neutral", TYPE, "relpos"], f"{NO} .*'sinpos' -> 'relpos'"),
    ("vit", ["--neutral", TYPE, "cape"], f"{NO} .*Choose another type, of abspos"),
    (
        "marian",
        ["--neutral", TYPE, "cape", "--position-source-scale", "2"],
        f"{NO} .*alpha: 1 -> 2. Leave out the options",
    ),
]


@pytest.mark.parametrize(("family", "flags", "message"), IMPOSSIBLE)
def test_what_is_impossible_is_refused(family, flags, message, stock, tmp_path, capsys):
    folder, _ = stock[family]
    assert main([str(folder), str(tmp_path / "cape"), *flags]) == 2
    assert re.match(f"error: .*{message}", capsys.readouterr().err.strip().splitlines()[-1])
    assert not list(tmp_path.iterdir())


def damage(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut_to(size, name):
    """What leaves the first bytes of a file."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


MISTAKES = [
    ("marian", lambda folder: damage(folder, encoder_layers=3), "weights of SRC are not complete"),
    ("marian", cut_to(500, "model.safetensors"), "weights of SRC cannot be read"),
    ("marian", cut_to(50, "config.json"), "config.json"),
    ("vit", lambda folder: damage(folder, hidden_size=48), "do not fit its config.json"),
    ("marian", lambda folder: damage(folder, encoder_attention_heads=5), "divisible"),
    ("vit", lambda folder: damage(folder, patch_size=0), "configuration of SRC"),
    ("marian", lambda folder: damage(folder, model_type="bart"), "no cape counterpart"),
]


@pytest.mark.parametrize(("family", "harm", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_damaged_folders_end_in_one_line(family, harm, message, tmp_path, capsys):
    folder = tmp_path / "SRC"
    FAMILIES[family].build_stock().save_pretrained(folder)
    harm(folder)
    capsys.readouterr()
    stock_type = "abspos" if family == "vit" else "sinpos"
    assert main([str(folder), str(tmp_path / "DST"), "--position-embedding", stock_type]) == 2
    error = capsys.readouterr().err.replace(str(folder), "SRC").strip()
    assert error.splitlines()[-1].startswith("error: ")
    assert message in error.partition("error: ")[2]
    assert [path.name for path in tmp_path.iterdir()] == ["SRC"]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: no memory")]
)
def test_a_lack_of_memory_does_not_blame_the_checkpoint(error, tmp_path, monkeypatch):
    make("marian", "sinpos").save_pretrained(tmp_path / "SRC")

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(FAMILIES["marian"].model, "from_pretrained", fail)
    with pytest.raises(type(error), match=str(error)):
        main([str(tmp_path / "SRC"), str(tmp_path / "DST")])


def test_results_of_an_old_training_are_left_behind(tmp_path):
    folder = tmp_path / "SRC"
    FAMILIES["vit"].build_stock().save_pretrained(folder)
    old = [f"{part}_results.json" for part in ("all", "eval", "train")]
    for name in (*old, "generated_predictions.txt", "preprocessor_config.json"):
        (folder / name).write_text("{}")
    converted("vit", folder, tmp_path / "DST", "--position-embedding", "abspos")
    names = sorted(path.name for path in (tmp_path / "DST").iterdir())
    assert names == ["README.md", "config.json", "model.safetensors", "preprocessor_config.json"]


@pytest.mark.parametrize("own_code", [False, True])
def test_card_says_how_the_folder_loads(own_code, stock, tmp_path):
    words = ["--neutral", *(["--self-contained"] if own_code else [])]
    converted("marian", stock["marian"][0], tmp_path / "DST", *words)
    card = (tmp_path / "DST" / "README.md").read_text()
    assert ("trust_remote_code=True" in card) == own_code
    assert ("AutoModelForSeq2SeqLM.from_pretrained(PATH" in card) == own_code
    assert ("import hf_models" in card) == (not own_code)

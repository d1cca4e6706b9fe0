"""The command convert: its report on the result, converted models that compute the same as the
stock model, and users' mistakes."""

import json
import re

import pytest
import torch

from hf_models.convert import main
from tests.support.hf import FAMILIES, WITH_STOCK, answer, batch, make


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
    """Logits of a batch without padding; images of the size of the stock model."""
    inputs = batch(family)
    inputs.pop("attention_mask", None)
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].repeat(1, 1, 2, 1)[..., :32, :32]
    with torch.no_grad():
        return answer(model.eval()(**inputs))


def converted(family, folder, target, *flags):
    assert main([str(folder), str(target), *flags]) == 0
    return FAMILIES[family].model.from_pretrained(target, attn_implementation="eager")


CHANGES = [
    (
        "marian",
        ["--position-embedding", "cape", "--position-source-scale", "1.05"],
        ["alpha: 1 -> 1.05", "the BOS hint: false -> true"],
    ),
    (
        "marian",
        ["--position-embedding", "sinpos", "--position-relative-context", "3"],
        ["relative attention: 0 -> 3"],
    ),
    (
        "vit",
        ["--position-embedding", "cape"],
        ["position embedding 'abspos' -> 'cape', the learned table is dropped"],
    ),
    (
        "speech_to_text",
        ["--position-embedding", "cape"],
        ["mean-normalised positions: false -> true"],
    ),
    ("vit", ["--position-embedding", "abspos"], []),
]


@pytest.mark.parametrize(("family", "flags", "changes"), CHANGES, ids=lambda v: str(v)[:60])
def test_it_says_what_the_result_computes_otherwise(
    family, flags, changes, stock, tmp_path, capsys
):
    folder, expected = stock[family]
    model = converted(family, folder, tmp_path / "cape", *flags)
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
    converted("marian", folder, tmp_path / "sinpos", "--position-embedding", "sinpos")
    model = converted(
        "marian", tmp_path / "sinpos", tmp_path / "fire", "--position-embedding", "fire"
    )
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


@pytest.mark.parametrize(("family", "name", "flags"), NEUTRAL, ids=lambda v: str(v)[:40])
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


IMPOSSIBLE = [
    ("marian", ["--position-embedding", "relpos"], "'sinpos' -> 'relpos'"),
    ("vit", ["--position-embedding", "cape"], "Choose another type, of abspos"),
    (
        "marian",
        ["--position-embedding", "cape", "--position-source-scale", "2"],
        "alpha: 1 -> 2. Leave out the options for this",
    ),
]


@pytest.mark.parametrize(("family", "flags", "message"), IMPOSSIBLE, ids=lambda v: str(v)[:50])
def test_what_cannot_begin_neutral_is_refused(family, flags, message, stock, tmp_path, capsys):
    folder, _ = stock[family]
    assert main([str(folder), str(tmp_path / "cape"), "--neutral", *flags]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(("error: --neutral cannot keep", "error: --neutral cannot give"))
    assert message in error
    assert not list(tmp_path.iterdir())


# ---- mistakes ------------------------------------------------------------------------------------


def damage(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:500])


def cut_configuration(folder):
    path = folder / "config.json"
    path.write_text(path.read_text()[:50])


MISTAKES = [
    ("marian", lambda folder: damage(folder, encoder_layers=3), "weights of SRC are not complete"),
    ("marian", cut_weights, "weights of SRC cannot be read"),
    ("marian", cut_configuration, "config.json"),
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


def test_stock_of_a_stock_model_is_refused(stock, tmp_path, capsys):
    folder, _ = stock["marian"]
    assert main([str(folder), str(tmp_path / "DST"), "--stock"]) == 2
    assert "holds a stock MarianMTModel already" in capsys.readouterr().err


def test_results_of_an_old_training_are_left_behind(tmp_path):
    folder = tmp_path / "SRC"
    FAMILIES["vit"].build_stock().save_pretrained(folder)
    old = [
        "all_results.json",
        "eval_results.json",
        "train_results.json",
        "generated_predictions.txt",
    ]
    for name in [*old, "preprocessor_config.json"]:
        (folder / name).write_text("{}")
    converted("vit", folder, tmp_path / "DST", "--position-embedding", "abspos")
    file_names = {path.name for path in (tmp_path / "DST").iterdir()}
    assert file_names == {
        "README.md",
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    }


@pytest.mark.parametrize("own_code", [False, True])
def test_card_says_how_the_folder_loads(own_code, stock, tmp_path):
    words = ["--neutral", *(["--self-contained"] if own_code else [])]
    converted("marian", stock["marian"][0], tmp_path / "DST", *words)
    card = (tmp_path / "DST" / "README.md").read_text()
    assert ("trust_remote_code=True" in card) == own_code
    assert ("AutoModelForSeq2SeqLM.from_pretrained(PATH" in card) == own_code
    assert ("import hf_models" in card) == (not own_code)

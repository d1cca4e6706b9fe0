"""``cape-plugins export stock`` of models trained in fairseq: what the programs of their READMEs
translate in a process in which this package cannot be imported is the same, token for token; the
folder stands alone, and failures leave nothing behind."""

import argparse
import json
import re
import resource
import shlex
import shutil
from types import SimpleNamespace

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from omegaconf import OmegaConf

from cape_plugins import TYPES, PositionConfig
from fairseq_user_dir.serving import stock_checkpoint
from fairseq_user_dir.serving.folding import folded
from fairseq_user_dir.serving.source_checkpoint import encoded, load_source, score
from tests.support.engines import export, program_of
from tests.support.fairseq_models import PAD, pad
from tests.support.fairseq_models import lines as interactive_lines
from tests.support.served_fairseq import PRE_LN, TYPE_FLAGS
from tests.support.stock import run_without_package
from tests.support.translation_models import save_fairseq, save_language_model

CAPE = TYPE_FLAGS["cape"]
NO_END, TIED = "--no-decoder-final-norm", "--share-decoder-input-output-embed"
EMBEDDING_NORM = "--layernorm-embedding"
OTHER_LAYERS = (EMBEDDING_NORM, "--no-scale-embedding", "--activation-fn", "gelu")
OTHER_LAYERS += ("--decoder-attention-heads", "4")
TABLE = 40  # rows of the tables that are written, below the 1024 of the models
# norm, flags, and the class that it becomes in Hugging Face, if there is one
MODELS = {
    "cape": ("post-LN", CAPE, "MarianMTModel"),
    "nopos": ("pre-LN", TYPE_FLAGS["nopos"], "BlenderbotForConditionalGeneration"),
    # 12 rows, and begun anew after the last
    "abspos": ("post-LN", (*TYPE_FLAGS["abspos"], EMBEDDING_NORM), "BartForConditionalGeneration"),
    "sinpos": ("pre-LN", (*TYPE_FLAGS["sinpos"], *OTHER_LAYERS), "MBartForConditionalGeneration"),
    "ADMIN": ("post-LN", CAPE, None),
}


def translations(checkpoint, lines):
    """By beam search of fairseq with this package."""
    (model,), _, task = load_model_ensemble_and_task([str(checkpoint)])
    limit = argparse.Namespace(beam=5, max_len_b=TABLE - 1)  # the stock model's limit
    generator = task.build_generator([model.eval()], limit)
    rows = [encoded(task.source_dictionary, line).tolist() for line in lines]
    sample = {"src_tokens": pad(rows, left=True), "src_lengths": torch.tensor([*map(len, rows)])}
    found = task.inference_step(generator, [model], {"net_input": sample})
    return [task.target_dictionary.string(beam[0]["tokens"]) for beam in found]


def program_of_command(out):
    """A Python program that is the command line of the README."""
    (command,) = re.findall(r"fairseq-interactive .*", (out / "README.md").read_text("utf-8"))
    start = "from fairseq_cli.interactive import cli_main; cli_main()"
    return f"import sys; sys.argv = {[*shlex.split(command), '--cpu']!r}; {start}"


@pytest.fixture(scope="module")
def exported(models, tmp_path_factory):
    """For each model: its checkpoint, its translations, and what both exports give without this
    package."""
    folder, lines = tmp_path_factory.mktemp("exported"), [*models.lines[14:26], "w1 nowhere w2"]
    results, programs = {}, []
    for name, (norm, flags, layout) in MODELS.items():
        target = folder / name
        checkpoint = models.save(f"stock-{name}", norm, *flags, admin=name == "ADMIN")
        before = checkpoint.read_bytes()
        outs = {"fairseq": export("stock", checkpoint, target / "fairseq", "--max-tokens", TABLE)}
        if layout:
            to = ("--to", "hugging-face", "--max-tokens", TABLE)
            outs["hugging-face"] = export("stock", checkpoint, target / "hf", *to)
        assert checkpoint.read_bytes() == before
        expected = translations(checkpoint, lines)
        ended = [number for number, text in enumerate(expected) if len(text.split()) < TABLE - 1]
        assert len({expected[number] for number in ended}) > 6
        results[name] = SimpleNamespace(
            checkpoint=checkpoint, outs=outs, lines=lines, expected=expected, ended=ended
        )
        programs += [(out, program_of(out), "\n".join(lines)) for out in outs.values()]
    # a text that just fits, and one token more
    ends = results["cape"].outs.values()
    texts = [" ".join(["w1"] * count) for count in (TABLE - 2, TABLE - 1)]
    programs += [(out, program_of(out), line) for out in ends for line in texts]
    out = results["cape"].outs["fairseq"]
    typed = "\n".join(f"<s> {line}" for line in lines[:6])
    programs.append((out, program_of_command(out), typed))
    checkpoint = save_language_model(models.lm_data, folder / "lm.pt", *CAPE[:2])
    scores = [sum(line) for line in score(load_source(checkpoint), lines)]
    out = export("stock", checkpoint, folder / "lm")
    programs.append((out, program_of(out), "\n".join(lines)))
    printed = iter(run_without_package(programs, folder))
    for name in MODELS:
        results[name].printed = {host: next(printed).splitlines() for host in results[name].outs}
    results["past the table"] = [next(printed) for _ in range(4)]
    results["typed"] = next(printed)
    results["lm"] = SimpleNamespace(checkpoint=checkpoint, scores=scores, printed=next(printed))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_stock_model_translates_the_same_without_this_package(name, exported):
    result, layout = exported[name], MODELS[name][-1]
    assert result.printed["fairseq"] == result.expected
    files = {path.name for path in result.outs["fairseq"].iterdir()}
    assert files == {"README.md", "model.pt", "dict.en.txt", "dict.de.txt"}
    if layout:
        out, printed = result.outs["hugging-face"], result.printed["hugging-face"]
        assert layout in (out / "config.json").read_text()
        generation = json.loads((out / "generation_config.json").read_text())
        assert (generation["suppress_tokens"], generation["min_new_tokens"]) == ([PAD], 1)
        # At the limit both hosts force an end. fairseq counts its score, transformers does not, so
        # that another text of the beam may win.
        for number in result.ended:
            assert printed[number] == result.expected[number]


@pytest.mark.slow
def test_command_line_of_the_readme_translates_the_same(exported):
    output = interactive_lines(exported["typed"], "H")
    got = [fields[0][1] for _, fields in sorted(output.items())]
    assert got == exported["cape"].expected[:6]


@pytest.mark.slow
def test_ctranslate2_converts_it_by_its_converter(exported, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    result, converted = exported["ADMIN"], tmp_path / "converted"
    out = result.outs["fairseq"]
    converter = ctranslate2.converters.FairseqConverter(str(out / "model.pt"), str(out))
    converter.convert(str(converted))
    config = json.loads((converted / "config.json").read_text())
    assert config["add_source_bos"] is False  # as the README says
    (converted / "config.json").write_text(json.dumps({**config, "add_source_bos": True}))
    translator = ctranslate2.Translator(str(converted), intra_threads=1)
    got = translator.translate_batch([line.split() for line in result.lines], beam_size=5)
    for number in result.ended:
        assert " ".join(got[number].hypotheses[0]) == result.expected[number]


@pytest.mark.slow
def test_language_model_scores_the_same_without_this_package(exported, refusal_of):
    result = exported["lm"]
    assert [*map(float, result.printed.split())] == pytest.approx(result.scores, abs=1e-4)
    assert "language model" in refusal_of("stock", result.checkpoint, "--to", "hugging-face")


@pytest.mark.slow
def test_text_past_the_table_is_an_error(exported):
    texts = exported["past the table"]
    assert ["IndexError" in text for text in texts] == [False, True, False, True]


@pytest.fixture
def checkpoint(models, tmp_path):
    return save_fairseq(models.data, tmp_path / "checkpoint.pt", *CAPE)


@pytest.mark.parametrize(
    ("flags", "options", "told"),
    [
        (("--position-relative-context", "3"), (), "relative attention (context 3)"),
        (("--arch", "transformer"), (), "is a stock TransformerModel already"),
        ((), ("--image-size", 8, 8), "--image-size 8 8 is not allowed"),
        ((), ("--max-tokens", 7), "8 or more"),
        ((), ("--data", "nowhere"), "--data DIR"),
        (("--activation-fn", "linear"), ("--to", "hugging-face"), "activation function is linear"),
        (("--encoder-normalize-before",), ("--to", "hugging-face"), "norms in other places"),
        ((*PRE_LN, NO_END), ("--to", "hugging-face"), "no norm behind its last layer"),
        ((TIED,), ("--to", "hugging-face"), "source, target and output are not one"),
    ],
)
def test_refusals(flags, options, told, models, tmp_path, refusal_of):
    flags = flags if "--arch" in flags else (*CAPE, *flags)
    path = save_fairseq(models.data, tmp_path / "checkpoint.pt", *flags, shared=TIED not in flags)
    assert told in refusal_of("stock", path, *options)


def test_separate_dictionaries_are_no_hugging_face_folder(models, tmp_path, refusal_of, export_of):
    path = save_fairseq(models.separate, tmp_path / "checkpoint.pt", *CAPE, shared=False)
    error = refusal_of("stock", path, "--to", "hugging-face")
    assert "no stock class for two dictionaries" in error
    export_of("stock", path, "--max-tokens", 8)  # of fairseq there is one


@pytest.mark.parametrize(
    "name", [name for name in TYPES if PositionConfig(name).encoding.in_attention]
)
def test_types_in_attention_are_refused(name, models, tmp_path, refusal_of):
    """With the way that takes the type."""
    path = save_fairseq(models.data, tmp_path / "checkpoint.pt", *TYPE_FLAGS[name])
    error = refusal_of("stock", path)
    assert f"position embedding {name!r} in attention, which no stock model has" in error
    way = "fairseq-generate" if PositionConfig(name).encoding.biases else "export ctranslate2"
    assert way in error


def test_a_stock_model_that_computes_otherwise_is_not_written(checkpoint, refusal_of, monkeypatch):
    def wrong(model, *rows):
        copied = folded(model, *rows)
        with torch.no_grad():
            copied.decoder.embed_positions.weight[4] += 1.0
        return copied

    monkeypatch.setattr(stock_checkpoint, "folded", wrong)
    assert "gives other logits than the model" in refusal_of("stock", checkpoint)


def test_the_file_holds_only_what_torch_loads_by_default(checkpoint, tmp_path, export_of):
    state = torch.load(checkpoint, weights_only=True)
    state["cfg"] = OmegaConf.create(
        {**state["cfg"], "criterion": argparse.Namespace(_name="legacy")},
        flags={"allow_objects": True},
    )
    state["cfg"].checkpoint.save_dir = str(tmp_path / "run")
    torch.save(state, checkpoint)
    assert b"Namespace" in checkpoint.read_bytes()
    written = (export_of("stock", checkpoint, "--max-tokens", 8) / "model.pt").read_bytes()
    assert not [name for name in (b"Namespace", b"omegaconf", b"position_") if name in written]
    assert str(tmp_path).encode() not in written


def test_languages_come_from_the_names_of_the_binarised_texts(
    models, checkpoint, tmp_path, export_of
):
    """As after fairseq-train without -s and -t, which stores neither."""
    state = torch.load(checkpoint, weights_only=False)
    shutil.copytree(models.data / "binary", tmp_path / "binary")
    (tmp_path / "binary" / "train.en-de.en.idx").touch()
    for section in (state["cfg"].task, state["cfg"].model):
        section.source_lang = section.target_lang = None
        section.data = str(tmp_path / "binary")
    torch.save(state, checkpoint)
    out = export_of("stock", checkpoint)
    assert "--source-lang en --target-lang de" in (out / "README.md").read_text(encoding="utf-8")
    _, _, task = load_model_ensemble_and_task([str(out / "model.pt")], {"data": str(out)})
    assert (task.cfg.source_lang, task.cfg.target_lang) == ("en", "de")
    assert {path.name for path in out.glob("dict*")} == {"dict.en.txt", "dict.de.txt"}


def test_dictionaries_of_another_training(models, checkpoint, tmp_path, refusal_of):
    others = tmp_path / "others"
    others.mkdir()
    for path in (models.data / "binary").glob("dict.*"):
        words = path.read_text(encoding="utf-8")
        (others / path.name).write_text(f"{words}more 1\n", encoding="utf-8")
    line = refusal_of("stock", checkpoint, "--data", others)
    assert f"does not fit the dictionaries in {others} (size mismatch for" in line
    assert "give --data DIR" in line


def test_full_disk_leaves_nothing(checkpoint, refusal_of):
    """A limit on the size of files does the same."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most))
    try:
        line = refusal_of("stock", checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert re.search(r"OUT \S+/out cannot be written \(disk full\?\)", line)

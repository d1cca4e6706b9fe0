"""Models of fairseq served by ctranslate2: the same translations and scores for every type of
position embedding; without torch, and at and beyond the limits of a folder; and what is refused."""

import json
import math
import random
import re

import pytest
import torch

from cape_plugins import TYPES, PositionConfig
from tests.support.engines import program_of, run_program
from tests.support.fairseq_models import PAD, encode, forced_scores, load
from tests.support.served_fairseq import PRE_LN, TYPE_FLAGS, draw, spell, write_dictionaries
from tests.support.translation_models import ALPHA, flags_of, save_fairseq, save_language_model

pytest.importorskip("ctranslate2")
import ctranslate2

from fairseq_user_dir.serving import ctranslate2 as exporter
from fairseq_user_dir.serving.source_checkpoint import load_source
from fairseq_user_dir.serving.source_checkpoint import translate as translate_by_fairseq

CAP = 36
LN2 = math.log(2)
RELPOS, CAPE, SINPOS, ROPE = (TYPE_FLAGS[name] for name in ("relpos", "cape", "sinpos", "rope"))
RELATIVE = ("--position-relative-context", "3", "--position-relative-values", "true")

# The engine has no learned biases of the distance, and biases in language models only.
BIASES = [name for name in TYPES if PositionConfig(name).encoding.biases]
LEARNED_BIASES = [name for name in BIASES if PositionConfig(name).encoding.learned]

# name to norm and flags
SETTINGS = {
    **{
        name: (("post-LN", "pre-LN")[number % 2], *TYPE_FLAGS[name])
        for number, name in enumerate(TYPES)
        if name not in BIASES
    },
    "turned in some layers, other base": (
        *("pre-LN", *ROPE, "--position-rotary-base", "500", "--position-layers", "not:2"),
    ),
    "turned behind the first layer": ("post-LN", *ROPE, "--position-layers", "every:2"),
    "relative behind the first layer, beside sinusoids": (
        *("post-LN", *SINPOS, *RELATIVE, "--position-layers", "every:2"),
    ),
    "relative values, clipped, first layer": (
        *("post-LN", *RELPOS, "--position-relative-values", "true", "--position-layers", "first"),
    ),
    "relative beside cape, nothing beyond": (
        *("pre-LN", *CAPE, *RELATIVE, "--position-relative-beyond", "zero"),
    ),
    "BOS and alpha of sinusoids": (
        *("post-LN", *SINPOS, "--position-source-bos", "true", "--position-source-scale", ALPHA),
    ),
    "norm of embeddings, no scale": (
        *("pre-LN", *CAPE, "--layernorm-embedding", "--no-scale-embedding"),
    ),
    "other dictionaries, decoder shared": ("post-LN", *CAPE, "--share-decoder-input-output-embed"),
    "ADMIN": ("post-LN", *CAPE),
    "sides differ": (
        *("post-LN", *CAPE, "--encoder-normalize-before", "--encoder-attention-heads", "4"),
        *("--activation-fn", "gelu_accurate", "--no-decoder-final-norm"),
    ),
}
# what the checkpoints of the tests can be besides
CHOICES = {"other dictionaries, decoder shared": {"separate": True}, "ADMIN": {"admin": True}}


def words(count, seed=3):
    (row,) = draw(random.Random(seed), 1, count, count)
    return spell(row).split()


@pytest.fixture(scope="module")
def text(models, tmp_path_factory):
    """Short and long lines to check a folder with."""
    path = tmp_path_factory.mktemp("text") / "text.en"
    path.write_text("".join(f"{line}\n" for line in models.lines[::2]), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", SETTINGS)
def test_translations_equal_fairseq(name, models, text, export_of, capsys):
    checkpoint = models.save(name, *SETTINGS[name], **CHOICES.get(name, {}))
    rows = ("--max-source-tokens", CAP, "--max-target-tokens", CAP)
    export_of("ctranslate2", checkpoint, *rows, "--check", text)
    report = re.search(r"check: (\d+) of (\d+) .* by at most (\S+?);?\s", capsys.readouterr().out)
    same, ended, difference = report.groups()
    assert same == ended
    assert int(ended) >= 15  # of 20
    assert float(difference) <= 1e-5


@pytest.mark.slow
def test_program_of_the_readme_needs_neither_torch_nor_this_package(models, run_cli, tmp_path):
    checkpoint = models.save("program", "post-LN", *CAPE)
    folder = tmp_path / "out"
    limit = ("--max-target-tokens", CAP)
    run_cli("cape-plugins", "export", "ctranslate2", checkpoint, folder, *limit, fresh=True)
    printed = run_program(program_of(folder), folder, models.text).splitlines()
    hypotheses = translate_by_fairseq(load_source(checkpoint), models.lines, CAP)
    ended = [number for number, hypothesis in enumerate(hypotheses) if hypothesis.ended]
    assert len(ended) >= 30
    assert len({printed[number] for number in ended}) > 20
    for number in ended:
        assert printed[number] == " ".join(hypotheses[number].tokens)

    # 1024 is where the engine would cut by default, and the table ends there, too
    long = tmp_path / "long.en"
    long.write_text(" ".join(words(1023)) + "\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="No position encodings are defined"):
        run_program(program_of(folder), folder, long)


@pytest.mark.parametrize("name", ["cape", "relpos"])
def test_scores_at_1200_tokens_equal_fairseq(name, models, export_of):
    checkpoint = models.save("long", "post-LN", *TYPE_FLAGS[name])
    rows = ("--max-source-tokens", 1202, "--max-target-tokens", 1201)
    translator = ctranslate2.Translator(str(export_of("ctranslate2", checkpoint, *rows)))
    source, target = words(1200), words(1200, seed=4)
    (scored,) = translator.score_batch([source], [target], max_input_length=0)
    model, task = load(checkpoint, models.data / "binary")
    wanted = forced_scores(model, task, " ".join(source), " ".join(target)) * LN2
    assert len(scored.log_probs) == 1201  # EOS, too
    torch.testing.assert_close(torch.tensor(scored.log_probs), wanted, rtol=0, atol=1e-5)


def test_table_is_used_to_its_end_and_no_further(models, cape, export_of):
    rows = ("--max-source-tokens", 12, "--max-target-tokens", 11)
    translator = ctranslate2.Translator(str(export_of("ctranslate2", cape, *rows)))
    fits, too_long = words(10), words(11)  # with BOS and EOS; start and words in the target
    assert len(translator.score_batch([fits], [fits])[0].log_probs) == 11
    for source, target in ((too_long, fits), (fits, too_long)):
        with pytest.raises(RuntimeError, match="No position encodings are defined"):
            translator.score_batch([source], [target])


def test_relative_positions_alone_have_no_limit(models, export_of):
    """And the README names the padding, which has to be forbidden."""
    checkpoint = models.save("endless", "pre-LN", *RELPOS)
    rows = ("--max-source-tokens", 4, "--max-target-tokens", 4)
    folder = export_of("ctranslate2", checkpoint, *rows)
    (scored,) = ctranslate2.Translator(str(folder)).score_batch([words(60)], [words(60)])
    assert len(scored.log_probs) == 61
    readme = (folder / "README.md").read_text("utf-8")
    assert readme.count("no table of positions") == 2
    names = json.loads((folder / "shared_vocabulary.json").read_text("utf-8"))
    assert f"`suppress_sequences=[['{names[PAD]}']]` forbids it" in readme


def test_attention_comes_from_the_layer_and_heads_that_were_aligned(models, export_of):
    """Though relative positions beside others put a layer before the first."""
    aligned = ("--arch", "cape_transformer_align", "--alignment-layer", 0, "--alignment-heads", 1)
    checkpoint = models.save("attention", "pre-LN", *CAPE, *aligned, *RELATIVE)
    translator, source = ctranslate2.Translator(str(export_of("ctranslate2", checkpoint))), words(6)
    (result,) = translator.translate_batch([source], return_attention=True, max_decoding_length=5)
    model, task = load(checkpoint, models.data / "binary")
    tokens = encode(task.source_dictionary, " ".join(source))[None]
    target = encode(task.target_dictionary, " ".join(result.hypotheses[0]))
    previous = torch.cat((target[-1:], target[:-1]))[None]
    with torch.no_grad():
        _, more = model(tokens, torch.tensor([tokens.shape[1]]), previous)
    wanted = more["attn"][0][0, : len(target) - 1, :-1]  # without EOS, and BOS is not there
    torch.testing.assert_close(torch.tensor(result.attention[0]), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in TYPES if name not in LEARNED_BIASES])
def test_language_models_score_as_in_fairseq(name, models, text, tmp_path, export_of, capsys):
    norm = ("--decoder-normalize-before",) if len(name) % 2 else ()
    flags = (*flags_of(name, "decoder"), *norm)
    checkpoint = save_language_model(models.lm_data, tmp_path / "lm.pt", *flags)
    export_of("ctranslate2", checkpoint, "--check", text)
    difference = re.search(r"differ by at most (\S+)", capsys.readouterr().out)[1]
    assert float(difference) <= 1e-5


@pytest.mark.slow
def test_language_model_continues_as_in_fairseq(models, tmp_path, export_of):
    """From BOS, and without a norm at its end."""
    more = ("--add-bos-token", "--decoder-normalize-before", "--no-decoder-final-norm")
    flags = (*flags_of("cape", "decoder"), *more)
    checkpoint = save_language_model(models.lm_data, tmp_path / "lm.pt", *flags)
    folder, text = (
        export_of("ctranslate2", checkpoint, "--max-target-tokens", 30),
        tmp_path / "text",
    )
    text.write_bytes(b"w1 w2\rw3\nw7\r\n")  # a carriage return is white space, and ends no line
    printed = run_program(program_of(folder), folder, text)

    model, task = load(checkpoint, models.lm_data)
    symbols, wanted = task.source_dictionary, []
    for line in ("w1 w2 w3", "w7"):
        tokens = [symbols.bos(), *encode(symbols, line)[:-1].tolist()]
        while len(tokens) <= 30:  # the start has no part in the length
            with torch.no_grad():
                logits, _ = model(torch.tensor([tokens]))
            tokens.append(logits[0, -1].argmax().item())
            if tokens[-1] == symbols.eos():
                break
        wanted.append(" ".join(symbols[index] for index in tokens[1:]).removesuffix(" </s>"))
    assert printed.splitlines() == wanted


@pytest.fixture(scope="module")
def cape(models, tmp_path_factory):
    """A checkpoint that can be exported."""
    return save_fairseq(models.data, tmp_path_factory.mktemp("cape") / "model.pt", *CAPE)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((*RELPOS, "--position-relative-heads", "separate"), "--position-relative-heads separate"),
        ((*CAPE, "--position-relative-context", 3), "beside --position-embedding cape"),
        (("--arch", "transformer"), "is a stock model (transformer)"),
        ((*CAPE, "--quant-noise-pq", "0.1"), "the parameter quant_noise.weight"),
        ((*CAPE, "--cross-self-attention", "--no-cross-attention"), "--cross-self-attention"),
        ((*CAPE, "--activation-fn", "tanh"), "--activation-fn tanh is not in ctranslate2"),
        ((*CAPE, *PRE_LN, "--decoder-output-dim", "16"), "--decoder-output-dim differ"),
        (("--arch", "cape_nonautoregressive_transformer", *SINPOS), "all tokens at once"),
    ],
)
def test_parts_that_the_engine_does_not_have(flags, told, models, tmp_path, refusal_of):
    shared = not {"--decoder-output-dim", "cape_nonautoregressive_transformer"} & {*flags}
    checkpoint = save_fairseq(models.data, tmp_path / "model.pt", *flags, shared=shared)
    assert told in refusal_of("ctranslate2", checkpoint)


@pytest.mark.parametrize("name", BIASES)
def test_biases_that_the_engine_does_not_have(name, models, tmp_path, refusal_of):
    flags = TYPE_FLAGS[name]
    error = refusal_of("ctranslate2", save_fairseq(models.data, tmp_path / "model.pt", *flags))
    assert f"--position-embedding {name} is not allowed" in error
    allowed = error.partition("allowed: ")[2].partition(".")[0].split(", ")
    assert sorted(allowed) == sorted(set(TYPES) - {*BIASES})
    if name not in LEARNED_BIASES:
        flags = (*flags, "--position-layers", "first")
    checkpoint = save_language_model(models.lm_data, tmp_path / "lm.pt", *flags)
    error = refusal_of("ctranslate2", checkpoint)
    assert ("--position-embedding" if name in LEARNED_BIASES else "--position-layers") in error


@pytest.mark.parametrize(
    ("arch", "task", "told"),
    [
        ("cape_s2t_transformer_s", "speech_to_text", "cannot read its inputs"),
        ("cape_bart_base", "denoising", "in the task denoising"),
    ],
)
def test_other_models_and_tasks(arch, task, told, tmp_path, refusal_of):
    cfg = {"model": {"arch": arch, "_name": arch}, "task": {"_name": task}}
    torch.save({"cfg": cfg, "model": {}}, tmp_path / "model.pt")
    assert told in refusal_of("ctranslate2", tmp_path / "model.pt")


def test_dictionaries_are_needed_and_come_from_the_training(
    models, cape, tmp_path, refusal_of, export_of
):
    """The line has no number of the operating system."""
    checkpoint = tmp_path / "model.pt"
    state = torch.load(cape, weights_only=True)
    _, task = load(cape, models.data / "binary")
    torch.save({**state, "task_state": task.state_dict()}, checkpoint)
    for source in (checkpoint, cape):
        assert "give --data DIR" in refusal_of("ctranslate2", source, "--data", tmp_path)
    for data, told in ((256 * "n", "File name too long"), (checkpoint, "Not a directory")):
        error = refusal_of("ctranslate2", cape, "--data", data)
        assert f"needs the dictionaries of its training ({told}: {data}/dict" in error
    others = write_dictionaries(tmp_path / "others", "x", "x") / "binary"
    assert "other units" in refusal_of("ctranslate2", checkpoint, "--data", others)
    export_of("ctranslate2", checkpoint)  # where they were in training


WEIGHT = "decoder.layers.1.fc1.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda weights: weights.pop(WEIGHT), rf"do not fit its settings.*{WEIGHT}"),
        (lambda weights: weights[WEIGHT][3].fill_(math.inf), f"are not all finite: {WEIGHT}"),
    ],
)
def test_weights_that_are_missing_or_no_numbers(change, told, cape, tmp_path, refusal_of):
    checkpoint, state = tmp_path / "model.pt", torch.load(cape, weights_only=True)
    change(state["model"])
    torch.save(state, checkpoint)
    error = refusal_of("ctranslate2", checkpoint)
    assert re.search(f"the weights of {checkpoint} {told}", error)


@pytest.mark.parametrize(
    ("engine", "flag"), [("ctranslate2", "--max-target-tokens"), ("stock", "--max-tokens")]
)
def test_tables_that_no_memory_holds(engine, flag, cape, refusal_of):
    """They are refused before anything of their length is made."""
    error = refusal_of(engine, cape, flag, 10**12)
    assert f"{flag} asks for a table of 1{12 * '0'} positions; allowed: up to 8388608" in error


def test_sentences_to_check_fit_the_table_and_have_words_alone(models, cape, tmp_path, refusal_of):
    text = tmp_path / "text"
    text.write_text("w1 w2\nw1 w2 w3 w4\n", encoding="utf-8")
    more = ("--check", text, "--max-source-tokens", 5)
    assert "a sentence has 6 tokens" in refusal_of("ctranslate2", cape, *more)
    text.write_text("w1 <blank>\n", encoding="utf-8")
    language_model = save_language_model(models.lm_data, tmp_path / "lm.pt", *SINPOS)
    for checkpoint in (cape, language_model):
        assert "the symbol <blank>" in refusal_of("ctranslate2", checkpoint, "--check", text)


def test_folder_that_computes_something_else(
    models, text, tmp_path, refusal_of, export_of, monkeypatch
):
    right = exporter.folded

    def wrong(model, *rows):
        copied = right(model, *rows)
        table = copied.decoder.embed_positions.weight.data
        table[2:] = table[2:].roll(1, 0)
        return copied

    monkeypatch.setattr(exporter, "folded", wrong)
    monkeypatch.setattr(exporter, "start_of", lambda source: "w1")  # of language models
    language_model = save_language_model(models.lm_data, tmp_path / "lm.pt", *SINPOS)
    checkpoint = models.save("shifted", "post-LN", *CAPE)
    more = ("--check", text, "--max-target-tokens", 48)
    for source in (checkpoint, language_model):
        assert "computes something else than the model" in refusal_of("ctranslate2", source, *more)
    # what is rounded cannot be told from what is wrong: it is reported
    export_of("ctranslate2", checkpoint, *more, "--quantization", "int8")

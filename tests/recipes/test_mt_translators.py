"""Translation models of both hosts under one interface, on tiny untrained models."""

import json
import shutil
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from transformers import AutoModelForSeq2SeqLM, MarianMTModel

import recipes
from cape_plugins import TYPES, PositionConfig, build_position_encoder, token_positions
from cape_plugins.checkpoints.families import FAMILY_ROWS
from recipes.lab.subwords import SentencePiece, SubwordNMT
from recipes.mt.analysis.arguments import open_translator
from recipes.mt.analysis.similarity import similarities
from recipes.mt.analysis.translators import Decoding, Running, batches, shifted
from recipes.mt.corpus import SEPARATOR, Segmentation, Segmented, open_segmentation
from tests.support.translation_models import TinyModels, copy_to_hugging_face, save_fairseq

RUNNING = Running(torch.device("cpu"), max_tokens=200)
GREEDY = Decoding(beam=1, max_len_a=1.0, max_len_b=2)
FAIRSEQ_START = 2  # coordinate of its first token; Marian's is 0


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return TinyModels(tmp_path_factory.mktemp("models") / "lists")


@pytest.fixture
def same_sinusoids(monkeypatch):
    """Gives Marian fairseq's frequencies; their first positions differ, too: see FAIRSEQ_START."""
    row = FAMILY_ROWS["marian"]
    sides = {name: replace(side, frequencies="fairseq") for name, side in row.sides.items()}
    monkeypatch.setitem(FAMILY_ROWS, "marian", replace(row, sides=sides))


@pytest.mark.parametrize("position", ["relpos", "cape"])
def test_hosts_give_the_same_analysis_for_the_same_weights(work, position, same_sinusoids):
    """Scores, greedy translations and similarities of encoder states, which are 1 at the same
    offset and by distance alone. Marian counts positions from 0, fairseq from
    2, which an offset makes up for."""
    ours = open_translator(work.fairseq(position), RUNNING)
    theirs = open_translator(work.hf(position), replace(RUNNING, offset=FAIRSEQ_START))
    pairs = work.pairs()[:10]
    sources = [source for source, _ in pairs]
    assert ours.source_ids(sources[0]) == theirs.source_ids(sources[0])
    for scores, other in zip(*(model.log_probabilities(pairs) for model in (ours, theirs)),
                             strict=True):  # fmt: skip
        np.testing.assert_allclose(scores, other, rtol=1e-4, atol=1e-5)
        assert scores.std() > 0.1
    hypotheses = ours.translate(sources, GREEDY)
    assert hypotheses == theirs.translate(sources, GREEDY)
    assert len(set(hypotheses)) > 2
    cosines, other = (similarities(model, sources, (0, 40)) for model in (ours, theirs))
    np.testing.assert_allclose(cosines, other, atol=1e-5)
    assert cosines.shape == (3, 2, 2)  # embeddings and two layers
    np.testing.assert_allclose(cosines[:, [0, 1], [0, 1]], 1, atol=1e-6)
    np.testing.assert_allclose(cosines[:, 0, 1], cosines[:, 1, 0], atol=1e-6)
    moved = cosines[:, 0, 1] < (0.999 if position == "cape" else 1 - 1e-6)
    assert moved.all() if position == "cape" else not moved.any()


def assert_scores(translator, work, logits_of):
    """The first target has the log-probabilities of a stock model's logits."""
    source, target = work.pairs()[0]
    (scores,) = translator.log_probabilities([(source, target)])
    ids = torch.tensor([translator.source_ids(source)])
    labels = torch.tensor([translator.target_ids(target)])
    expected = logits_of(ids, labels).log_softmax(-1).gather(2, labels[..., None])
    np.testing.assert_allclose(scores, expected[0, :, 0].detach(), atol=1e-5)


@pytest.mark.parametrize("position", ["sinpos", "abspos"])
def test_stock_checkpoints_of_fairseq_give_their_own_scores(work, tmp_path, position):
    learned = ["--encoder-learned-pos", "--decoder-learned-pos"] if position == "abspos" else []
    path = save_fairseq(work.corpus, tmp_path / "checkpoint_last.pt", "--arch", "transformer",
                        *learned)  # fmt: skip
    translator = open_translator(path, RUNNING, data=work.corpus / "binary",
                                 spm=work.corpus / "sentencepiece.model")  # fmt: skip
    assert translator.kind == f"fairseq cape_transformer {position}"
    (stock,), *_ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert not hasattr(stock.eval(), "position_config")
    assert_scores(translator, work, lambda ids, labels: stock(ids, None, labels.roll(1, 1))[0])


def test_weights_stored_in_half_precision_are_not_computed_in_it(work, tmp_path):
    shutil.copytree(work.hf("cape"), tmp_path / "half")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "half", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    with open_translator(tmp_path / "half", RUNNING).at_work() as model:
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_stock_marian_gives_its_own_scores_and_can_be_shifted(work, tmp_path):
    folder = copy_to_hugging_face(work.corpus, work.fairseq("sinpos"), tmp_path, stock=True)
    translator = open_translator(folder, RUNNING)
    stock = MarianMTModel.from_pretrained(folder)
    assert_scores(translator, work, lambda ids, labels: stock(ids, labels=labels).logits)
    assert similarities(translator, work.sources()[:1], (0, 5))[0, 0, 1] < 0.99


def test_similarity_of_embeddings_is_that_computed_by_hand(work):
    """Layer 0 of sinpos is sqrt(d) x embedding + sinusoid; the mean is over tokens, not sentences,
    whatever the batches."""
    offsets, sources = (0, 13), work.sources()
    model = open_translator(work.fairseq("sinpos"), replace(RUNNING, max_tokens=70))
    measured = similarities(model, sources, offsets)
    state = torch.load(work.fairseq("sinpos"), weights_only=True)["model"]
    words = state["encoder.embed_tokens.weight"]
    rates = torch.exp(torch.arange(16.0) * -(np.log(10000) / 15))
    cosines = []
    for source in sources:
        ids = torch.tensor(model.source_ids(source))
        at = []
        for offset in offsets:
            phase = (torch.arange(len(ids)) + FAIRSEQ_START + offset)[:, None] * rates
            at.append(32**0.5 * words[ids] + torch.cat((phase.sin(), phase.cos()), 1))
        cosines.append(torch.cosine_similarity(*at))
    assert measured[0, 0, 1] == pytest.approx(torch.cat(cosines).mean().item(), abs=1e-5)


@pytest.mark.parametrize("host", ["fairseq", "hf"])
def test_offset_reaches_incremental_decoding(work, host):
    """Every token of a greedy translation is the best one under teacher forcing."""
    sources = work.sources()[:3]
    subwords = SentencePiece(work.corpus / "sentencepiece.model")
    dictionary = Dictionary.load(str(work.corpus / "binary" / "dict.de.txt"))
    plain, moved = (open_translator(getattr(work, host)("sinpos"), replace(RUNNING, offset=offset))
                    for offset in (0, 30))  # fmt: skip
    assert plain.translate(sources, GREEDY) != moved.translate(sources, GREEDY)
    ids, prefix = moved.source_ids(sources[0]), []
    with moved.at_work() as model:
        for _ in range(4):  # tokens 3 and beyond are words
            choices = [[*prefix, token] for token in range(3, len(dictionary))]
            best = int(moved.score(model, [ids] * len(choices), choices)[:, -1].argmax())
            prefix = choices[best]
    (hypothesis,) = moved.translate(sources[:1], replace(GREEDY, max_len_a=0.0, max_len_b=4))
    assert hypothesis == subwords.decode(dictionary.string(prefix))


# a table that counts has no rows for moved positions
@pytest.mark.parametrize("name", [n for n in TYPES if not PositionConfig(n).encoding.counts])
def test_an_offset_moves_what_is_added_and_nothing_in_attention(name):
    config = PositionConfig(name)
    encoder = build_position_encoder(config, 8).eval()
    before = encoder.coordinates(token_positions(torch.ones(1, 5, dtype=torch.bool)))
    with shifted(encoder, config, 700):
        moved = encoder.coordinates(token_positions(torch.ones(1, 5, dtype=torch.bool)))
    assert (moved - before).unique().tolist() == [700.0 if config.encoding.adds else 0.0]


PACKAGES = {"fairseq": "fairseq_user_dir", "transformers": "hf_models"}


@pytest.mark.parametrize("other", PACKAGES)
def test_models_of_a_host_need_no_other_host(work, other):
    """Our packages import their own host alone (tests/test_layering.py); the recipes, which import
    either, are imported anew."""
    paths = {"transformers": work.fairseq("cape"), "fairseq": work.hf("cape")}
    # an import also sets an attribute of the package, which has to go with the module
    with mock.patch.dict(sys.modules), mock.patch.dict(vars(recipes)):
        for name in [name for name in sys.modules if name.startswith("recipes.")]:
            del sys.modules[name]
        sys.modules |= {other: None, PACKAGES[other]: None}  # not installed
        host = import_module("recipes.mt.analysis.arguments")
        running = host.Running(torch.device("cpu"))
        model = host.open_translator(paths.pop(other), running)
        (refused,) = paths.values()
        with pytest.raises(host.CommandError) as error:
            host.open_translator(refused, running)
    expected = {"transformers": "fairseq cape_transformer", "fairseq": "Hugging Face cape_marian"}
    assert model.kind == f"{expected[other]} cape"
    assert f"needs {other}, which is not installed; `make setup` installs" in str(error.value)


def test_dictionaries_are_found_after_a_move(work, tmp_path, monkeypatch):
    """The checkpoint names the folder of its training; here the whole tree is elsewhere."""
    moved = tmp_path / "elsewhere" / "lists"
    shutil.copytree(work.folder / "data", moved / "data")
    (moved / "runs").mkdir()
    shutil.copy(work.fairseq("nopos"), moved / "runs" / "checkpoint_last.pt")
    state = torch.load(moved / "runs" / "checkpoint_last.pt", weights_only=True)
    state["cfg"].task.data = "gone/lists/data/binary"
    torch.save(state, moved / "runs" / "checkpoint_last.pt")
    monkeypatch.chdir(tmp_path)
    model = open_translator(moved / "runs" / "checkpoint_last.pt", RUNNING)
    assert Path(model.task.cfg.data) == moved / "data" / "binary"


def test_separator_is_kept_where_it_is_a_word(work):
    subwords = SentencePiece(work.corpus / "sentencepiece.model")
    segmentation = Segmentation(subwords)
    joined = f"one two {SEPARATOR} three"
    assert SEPARATOR not in segmentation.encode(joined, 0).split()
    segmentation.keeps_separator = True
    pieces = segmentation.encode(joined, 0)
    assert pieces.split().count(SEPARATOR) == 1
    assert pieces.split(f" {SEPARATOR} ")[1] == subwords.encode("three")
    assert segmentation.decode(pieces) == joined


def test_segmentation_of_the_recipes_is_found(work, tmp_path):
    """Moses, then BPE, with the settings that recipes.mt.run has recorded."""
    files = [work.corpus / f"train.{code}" for code in ("en", "de")]
    bpe = SubwordNMT.train(files, tmp_path / "subwords" / "model", 20)
    settings = {"segmentation": "bpe", "aggressive_hyphens": False, "lowercase": True}
    (tmp_path / "subwords" / "settings.json").write_text(json.dumps(settings))
    segmentation = open_segmentation(tmp_path / "binary", ("en", "de"))
    assert segmentation.encode("Forty-one, TWO.", 0) == bpe.encode("forty-one , two .")
    assert segmentation.decode(bpe.encode("acht und zwanzig , zwei .")) == "acht und zwanzig, zwei."
    assert open_segmentation(tmp_path / "elsewhere" / "binary", ("en", "de")) is None


MARKED = [
    (["\u2581a", "b", "\u2581"], "\u2581a b \u2581c", "ab c"),
    (["a@@", "b", "c"], "a@@ b c d@@", "ab c d"),
    (["\u2581a", "b"], f"\u2581a b {SEPARATOR} \u2581a", f"ab {SEPARATOR} a"),
    (["a", "b"], f"a b {SEPARATOR} b", f"a b {SEPARATOR} b"),
]


@pytest.mark.parametrize(("vocabulary", "pieces", "text"), MARKED)
def test_subwords_are_joined_by_their_marks(vocabulary, pieces, text, capsys):
    segmentation = Segmented(vocabulary)
    assert segmentation.encode(pieces, 0) == pieces
    assert segmentation.plain(pieces) == segmentation.decode(pieces) == text
    assert ("scored without joining" in capsys.readouterr().out) == (vocabulary[0] == "a")


@pytest.mark.parametrize("host", ["fairseq", "hf"])
def test_half_precision_is_close_to_full(work, host):
    path, pairs = getattr(work, host)("cape"), work.pairs()[:3]
    full, half = (open_translator(path, replace(RUNNING, half=half)) for half in (False, True))
    for scores, other in zip(*(model.log_probabilities(pairs) for model in (full, half)),
                             strict=True):  # fmt: skip
        assert not np.array_equal(scores, other)
        np.testing.assert_allclose(scores, other, rtol=0.02, atol=0.1)
    assert len(half.translate([source for source, _ in pairs], GREEDY)) == 3
    cosines = similarities(half, [source for source, _ in pairs], (0, 30))
    np.testing.assert_allclose(cosines[:, 0, 0], 1, atol=1e-6)


def test_batches_hold_everything_once_and_fit():
    lengths = [3, 50, 7, 7, 1, 20, 8, 200]
    groups = batches(lengths, 60)
    assert sorted(index for rows in groups for index in rows) == list(range(8))
    sizes = [len(rows) * max(lengths[row] for row in rows) for rows in groups]
    assert sorted(sizes)[-1] == 200  # of a single row
    assert len([size for size in sizes if size <= 60]) == len(groups) - 1 == 3

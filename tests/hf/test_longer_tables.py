"""Learned tables of another size: what stays, what new rows hold, and where a size is refused."""

import json

import pytest
import torch
import transformers

import hf_models
from hf_models.checks.stock_models import tiny_stock_models
from hf_models.convert import main
from tests.hf.test_rows import MODELS, PAD, TABLE, build, output, texts
from tests.support import whisper
from tests.support.generated import switched
from tests.support.hf import BEIT, FAMILIES

LONG = 50
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL["intermediate_size"] = 16
IMAGES = {**SMALL, "image_size": 16, "patch_size": 4}
each = pytest.mark.parametrize("name", MODELS)


def table_of(model):
    """``[positions, C]`` of the first learned table of a model."""
    seam = next(iter(model.seams()))
    return seam.weight[seam.first_row :]


@each
def test_copied_rows_keep_what_short_texts_give(name):
    model = switched(build(name), type="abspos")
    longer = hf_models.extend_table(model, LONG)
    assert type(longer) is type(model)
    assert len(table_of(longer)) == LONG
    assert len(table_of(model)) == len(table_of(switched(build(name), type="abspos")))
    ids = texts(TABLE - 4)
    assert torch.equal(output(longer, ids), output(model, ids))
    assert torch.equal(table_of(longer), table_of(model)[torch.arange(LONG) % len(table_of(model))])


@each
def test_a_longer_model_is_a_stock_model_and_learns_behind_the_old_end(name, tmp_path):
    """The stock class loads the folder of a stock copy."""
    longer = hf_models.extend_table(switched(build(name), type="abspos"), LONG, "stretch:3")
    ids = texts(LONG - 2)
    loss = output(longer, ids).square().sum()
    loss.backward()
    table = next(iter(longer.seams()))
    assert (table.weight.grad[table.first_row :][TABLE : LONG - 2].abs().sum(1) > 0).all()
    longer.save_pretrained(tmp_path / "cape")
    loaded = type(longer).from_pretrained(tmp_path / "cape")
    assert torch.equal(output(loaded, ids), output(longer, ids))
    assert main([str(tmp_path / "cape"), str(tmp_path / "stock"), "--stock"]) == 0
    stock_class = getattr(transformers, MODELS[name][0])
    stock = stock_class.from_pretrained(tmp_path / "stock")
    assert type(stock) is stock_class
    assert torch.equal(output(stock, ids), output(longer, ids))


def test_stretched_rows_equal_long_clip():
    """77 rows become 248: the first 20 stay, each of the others is followed by three rows between
    it and the next (arXiv 2403.15378)."""
    config = {**MODELS["clip_text_model"][1], "max_position_embeddings": 77}
    stock = transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**config))
    model = switched(stock, type="abspos")
    old = table_of(model).detach()
    new = table_of(hf_models.extend_table(model, 248, "stretch")).detach()
    assert torch.equal(new[:20], old[:20])
    for row in range(20, 76):
        for part in range(4):
            expected = old[row] + part / 4 * (old[row + 1] - old[row])
            torch.testing.assert_close(new[20 + 4 * (row - 20) + part], expected)
    torch.testing.assert_close(new[247], old[76] + 3 / 4 * (old[76] - old[75]))


def seq2seq():
    config = transformers.BartConfig(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
        max_position_embeddings=TABLE,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).eval()


def vit():
    config = transformers.ViTConfig(**IMAGES, num_labels=3)
    return transformers.ViTForImageClassification(config).eval()


def clip():
    texts = {**SMALL, "vocab_size": 60, "max_position_embeddings": TABLE, "eos_token_id": 3}
    config = transformers.CLIPConfig(text_config=texts, vision_config=IMAGES, projection_dim=8)
    return transformers.CLIPModel(config).eval()


def siglip():
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**IMAGES)).eval()


def siglip2():
    config = transformers.Siglip2VisionConfig(**SMALL, num_patches=16, patch_size=4)
    return transformers.Siglip2VisionModel(config).eval()


def beit():
    """Has relative biases for one image size."""
    config = transformers.BeitConfig(**IMAGES, **BEIT, num_labels=3)
    return transformers.BeitForImageClassification(config).eval()


def spectrograms():
    patches = dict.fromkeys(("patch_size", "frequency_stride", "time_stride"), 4)
    config = transformers.ASTConfig(**SMALL, **patches, max_length=16, num_mel_bins=8)
    return transformers.ASTForAudioClassification(config).eval()


@pytest.mark.parametrize("family", ["bart", "marian"])
def test_one_size_extends_encoder_and_decoder(family):
    """Marian has sinusoids, so its tables are modules of this package."""
    stock = seq2seq() if family == "bart" else FAMILIES[family].build_stock()
    model = hf_models.switch(stock, {"type": "abspos"}).eval()
    longer = hf_models.extend_table(model, LONG, "copy")
    ids = texts(model.config.max_position_embeddings)
    both = {"input_ids": ids, "decoder_input_ids": ids}
    assert torch.equal(longer(**both).logits, model(**both).logits)
    tables = [table for name, table in longer.named_parameters() if "positions" in name]
    assert [len(table) for table in tables] == [LONG + 2 * (family == "bart")] * 2


@pytest.mark.parametrize(
    ("build", "size", "old", "new"),
    [
        (vit, "32", (16, 16), (32, 32)),
        (vit, "24x40", (16, 16), (24, 40)),
        (spectrograms, "48", (16, 8), (48, 8)),
        (clip, "vision_config.image_size=32", (16, 16), (32, 32)),
        (siglip, "32", (16, 16), (32, 32)),
    ],
)
def test_grids_are_resized_once_or_repeated(build, size, old, new, tmp_path):
    """A table that was resized gives what the table gives that each forward resizes; a repeated one
    gives the same patch of the old image."""
    name = "input_values" if build is spectrograms else "pixel_values"
    fields = {"vision_position_embedding": {"type": "abspos"}} if build is clip else {}
    model = hf_models.switch(build(), {"type": "abspos"}, **fields)
    lead = (2,) if build is spectrograms else (2, 3)
    inputs = torch.randn(*lead, *new)
    call = model.get_image_features if build is clip else model
    longer = hf_models.extend_table(model, size, "stretch")
    longer.save_pretrained(tmp_path)
    loaded = type(longer).from_pretrained(tmp_path)
    new_call = loaded.get_image_features if build is clip else loaded
    first = next(iter(new_call(**{name: inputs}).values()))
    assert torch.isfinite(first).all()
    if build is vit:
        torch.testing.assert_close(first, call(pixel_values=inputs).logits)
    repeated = hf_models.extend_table(model, size, "copy")
    keys = [k for k, v in model.state_dict().items() if v.shape != repeated.state_dict()[k].shape]
    assert len(keys) == 1
    small, large = (m.state_dict()[keys[0]] for m in (model, repeated))
    small, large = (table.reshape(-1, 16) for table in (small, large))
    special = len(small) - (old[0] // 4) * (old[1] // 4)
    assert torch.equal(large[:special], small[:special])
    rows, columns = (8 // 4, old[0] // 4) if build is spectrograms else (old[0] // 4, old[1] // 4)
    new_columns = new[0] // 4 if build is spectrograms else new[1] // 4
    grid, new_grid = small[special:].view(rows, columns, -1), large[special:]
    new_grid = new_grid.view(-1, new_columns, 16)
    assert torch.equal(new_grid[:rows, columns : 2 * columns], grid[:, : new_columns - columns])


def test_tables_of_packed_patches_grow_by_their_number_of_patches(tmp_path):
    model = hf_models.switch(siglip2(), {"type": "abspos"})
    longer = hf_models.extend_table(model, "num_patches=64", "copy")
    longer.save_pretrained(tmp_path)
    longer = type(longer).from_pretrained(tmp_path).eval()
    small, large = (m.embeddings.position_embedding.weight for m in (model, longer))
    assert torch.equal(large.view(2, 4, 2, 4, 16)[1, :, 1], small.view(4, 4, 16))
    # on images of four times as many patches, the quarters have the rows of the smaller image
    sizes = torch.tensor([[8, 8]])
    inputs = {"pixel_values": torch.randn(1, 64, 48), "spatial_shapes": sizes}
    inputs["pixel_attention_mask"] = torch.ones(1, 64, dtype=torch.long)
    moved = longer.embeddings(inputs["pixel_values"], sizes)
    still = hf_models.switch(longer, {"type": "nopos"}).eval()
    moved = moved - still.embeddings(inputs["pixel_values"], sizes)
    torch.testing.assert_close(moved[0].view(8, 8, 16)[4:, :4], small.view(4, 4, 16))


def test_buffers_that_end_with_the_table_follow_and_are_saved_in_stock_size(tmp_path):
    """CLAP's checkpoints hold the numbers of positions."""
    stock = next(tiny_stock_models("clap"))
    stock.model.save_pretrained(tmp_path / "stock")
    model = transformers.AutoModel.from_pretrained(
        tmp_path / "stock", position_embedding={"type": "cape"}
    ).eval()
    longer = {**stock.inputs, "input_ids": torch.randint(10, 90, (2, 100))}
    expected = model(**longer).text_embeds
    model.save_pretrained(tmp_path / "cape")
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "cape").eval()
    assert torch.equal(loaded(**longer).text_embeds, expected)
    same = hf_models.switch(stock.model, {"type": "abspos"}).eval()
    same(**longer)
    same.save_pretrained(tmp_path / "same")
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "same").eval()
    extended = hf_models.extend_table(loaded, 200)
    for each_model in (loaded, extended):
        texts_alone = each_model(**stock.inputs).text_embeds
        assert torch.equal(texts_alone, same(**stock.inputs).text_embeds)


REFUSED = [
    ("text", "cape", "50", "copy", "no learned position table"),
    ("text", "abspos", "18", "copy", "more tokens than now"),
    ("text", "abspos", "50x50", "copy", "more tokens than now"),
    ("text", "abspos", "many", "copy", "allowed: N tokens"),
    ("text", "abspos", "50", "wrap", "allowed: copy, stretch"),
    ("text", "abspos", "50", "copy:3", "allowed: copy, stretch"),
    ("text", "abspos", "50", "stretch:17", "at most 16"),
    ("text", "abspos", "vocab_size=50", "copy", "whose tables are"),
    ("vit", "abspos", "2", "copy", "whose tables are"),
    ("beit", "abspos", "32", "copy", "which are no position"),
    ("vit", "abspos", "32", "stretch:3", "'stretch:3'.*4 x 4 patches.*copy, stretch. Leave"),
    ("ast", "abspos", "48", "stretch:0", "'stretch:0'.*2 x 4 patches.*copy, stretch. Leave"),
    ("dpt", "abspos", "56x112", "copy", "takes a table of patches for a square; allowed: height"),
    ("whisper", "abspos", "400", "copy", "max_source_positions or .*give one .* as FIELD=400"),
    ("siglip2", "abspos", "num_patches=64", "stretch:3", "'stretch:3'.*allowed: copy, stretch"),
    ("siglip2", "abspos", "num_patches=60", "copy", "of 4 x 4 patches; allowed"),
    ("siglip2", "abspos", "48x32", "copy", "of 4 x 4 patches; allowed"),
    ("text", "abspos", "max_position_embeddings=48x32", "copy", "whose tables are"),
    ("siglip2", "cape", "num_patches=64", "copy", "no learned position table.*abspos"),
    ("llama", "cape", "64", "copy", "no learned position table.*leave the table size out"),
]


@pytest.mark.parametrize(("model", "name", "size", "extension", "message"), REFUSED)
def test_other_sizes_and_extensions_are_refused(model, name, size, extension, message):
    stocks = {"text": lambda: build("roberta"), "vit": vit, "beit": beit, "siglip2": siglip2}
    stocks |= {"ast": spectrograms, "dpt": lambda: next(tiny_stock_models("dpt")).model}
    stocks |= {"llama": FAMILIES["llama"].build_stock, "whisper": whisper.make_stock}
    switched_model = hf_models.switch(stocks[model](), {"type": name})
    with pytest.raises(ValueError, match=message):
        hf_models.extend_table(switched_model, size, extension)


SIZE = ["--position-table-size", str(LONG)]


@pytest.fixture
def folder(tmp_path):
    build("roberta").save_pretrained(tmp_path / "stock")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": TABLE - PAD - 1}
    (tmp_path / "stock" / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "has the same outputs as"),
        (("--neutral",), "has the same outputs as"),
        (("--position-table-extension", "stretch:5"), "from row 5 on"),
    ],
    ids=str,
)
def test_convert_extends_the_table_and_the_limit_of_the_tokenizer(folder, capsys, flags, said):
    folders = [str(folder / "stock"), str(folder / "cape")]
    assert main([*folders, "--position-embedding", "abspos", *SIZE, *flags]) == 0
    assert said in capsys.readouterr().out
    model = hf_models.CapeRobertaForMaskedLM.from_pretrained(folder / "cape")
    assert len(table_of(model)) == LONG
    config = json.loads((folder / "cape" / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == LONG


@pytest.mark.parametrize(
    ("size", "extension", "flags", "message"),
    [
        ([], "copy", [], "give --position-table-size"),
        (SIZE, "wrap", [], "adds no rows"),
        ([], "long", [], "allowed: copy, stretch"),
        (SIZE, "stretch:5", ["--neutral"], "Choose --position-table-extension copy"),
    ],
)
def test_convert_refuses_flags_that_do_not_fit(folder, capsys, size, extension, flags, message):
    folders = [str(folder / "stock"), str(folder / "cape")]
    flags = [*size, "--position-table-extension", extension, *flags]
    assert main([*folders, "--position-embedding", "abspos", *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "cape").exists()


@pytest.mark.parametrize("extension", ["copy", "stretch"])
def test_a_neutral_grid_of_another_size_has_a_remedy(tmp_path, capsys, extension):
    """The outputs of ViT change with each extension, so only the size can be left out."""
    vit().save_pretrained(tmp_path / "stock")
    argv = [str(tmp_path / "stock"), str(tmp_path / "cape"), "--position-embedding", "abspos"]
    size = ["--position-table-size", "32", "--position-table-extension", extension]
    assert main([*argv, "--neutral", *size]) == 2
    error = capsys.readouterr().err
    assert "Leave out --position-table-size" in error
    assert "Choose" not in error
    assert main([*argv, "--neutral"]) == 0

"""Calls that build a model, with a position embedding: by Auto classes, stock
classes and stock configurations."""

import pytest
import torch
import transformers
from transformers import (
    AutoModelForImageClassification,
    BertModel,
    BertPreTrainedModel,
    BloomConfig,
    BloomForCausalLM,
)

import hf_models
from hf_models import CapeBertConfig
from hf_models.switching.modeling import PositionModelMixin
from tests.support.hf import FAMILIES, VARIANTS, WITH_STOCK, answer, batch


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Stock checkpoints of each family."""
    root = tmp_path_factory.mktemp("stock")
    for name in WITH_STOCK:
        FAMILIES[name].build_stock(seed=1).save_pretrained(root / name)
    return root


@pytest.mark.parametrize("family", WITH_STOCK)
def test_every_call_loads_the_model_of_this_package_with_the_stock_weights(family, folders):
    row, inputs, folder = FAMILIES[family], batch(family), folders / family
    cape = {"position_embedding": VARIANTS[family]["cape"]}
    expected = answer(row.model.from_pretrained(folder, **cape)(**inputs))
    stock = row.stock_config.from_pretrained(folder)
    models = [row.stock_model.from_pretrained(folder, **cape)]
    for loader in (row.auto, row.model, row.stock_model):
        models.append(loader.from_pretrained(folder, config=stock, **cape))
    for model in models:
        assert type(model) is row.model
        # weights in a file may be aligned otherwise, and a convolution rounds otherwise then
        torch.testing.assert_close(answer(model(**inputs)), expected, atol=1e-5, rtol=1e-5)
    assert type(stock) is row.stock_config  # it is the caller's
    assert not hasattr(stock, "position_embedding")


@pytest.mark.parametrize("family", WITH_STOCK)
def test_every_call_builds_the_model_of_this_package_from_a_stock_configuration(family):
    row, settings = FAMILIES[family], VARIANTS[family]["cape"]
    stock = row.stock_config(**row.sizes)
    stock.architectures = [row.stock_model.__name__]  # without, from_config of DeiT fails in stock
    stock._attn_implementation = "eager"
    cape = {"position_embedding": settings}
    models = (
        row.auto.from_config(stock, **cape),
        row.auto.from_config(config=stock, **cape),
        row.stock_model._from_config(stock, **cape),
        row.model._from_config(stock, **cape, dtype=torch.bfloat16),
    )
    for model in models:
        assert type(model) is row.model
        assert model.config.position_embedding.items() >= settings.items()
        assert model.config._attn_implementation == "eager"
    assert models[-1].dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["marian", "bert", "llama"])
def test_constructors_name_the_call_that_takes_a_position_embedding(family):
    row = FAMILIES[family]
    for build, config in ((row.stock_model, row.stock_config), (row.model, row.config)):
        told = rf"{build.__name__}\(config\) takes no position_embedding.*hf_models\.switch\("
        with pytest.raises(ValueError, match=told):
            build(config(**row.sizes), position_embedding={"type": "nopos"})


@pytest.mark.parametrize("family", WITH_STOCK)
def test_a_stock_configuration_may_hold_the_position_embedding(family, folders):
    row, settings, folder = FAMILIES[family], VARIANTS[family]["cape"], folders / family
    config = row.stock_config.from_pretrained(folder)
    config.architectures = [row.stock_model.__name__]
    config.position_embedding = settings
    models = [row.auto.from_config(config), row.stock_model._from_config(config)]
    for loader in (row.auto, row.stock_model, row.model):
        models.append(loader.from_pretrained(folder, config=config))
    for model in models:
        assert type(model) is row.model
        assert model.config.position_embedding.items() >= settings.items()
    model = row.auto.from_config(config, position_embedding={"type": "nopos"})  # the call wins
    assert model.config.position_embedding["type"] == "nopos"
    with pytest.raises(ValueError, match=r"takes no position_embedding.*hf_models\.switch\("):
        row.stock_model(config)


@pytest.mark.parametrize("family", ["marian", "bert", "llama", "vit"])
def test_none_stands_for_no_position_embedding(family, folders, tmp_path):
    row, folder, none = FAMILIES[family], folders / family, {"position_embedding": None}
    config = row.stock_config.from_pretrained(folder)
    for model in (
        row.auto.from_pretrained(folder, **none),
        row.stock_model.from_pretrained(folder, **none),
        row.auto.from_config(config, **none),
    ):
        assert isinstance(model, row.stock_model)
        assert not hasattr(model.config, "position_embedding")
    settings = VARIANTS[family]["cape"]
    row.model.from_pretrained(folder, position_embedding=settings).save_pretrained(tmp_path)
    for build in (row.auto.from_pretrained, row.model.from_pretrained):
        stored = build(tmp_path, **none).config.position_embedding
        assert stored.items() >= settings.items()
    stored = transformers.AutoConfig.from_pretrained(tmp_path, **none)
    assert stored.position_embedding.items() >= settings.items()


def test_models_of_other_families_refuse_a_position_embedding(tmp_path):
    config = BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=60)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    settings = {"position_embedding": {"type": "cape"}}
    for call in (
        lambda: BloomForCausalLM.from_pretrained(tmp_path, **settings),
        lambda: transformers.AutoModelForCausalLM.from_config(config, **settings),
        lambda: transformers.AutoModel.from_pretrained(tmp_path, config=config, **settings),
    ):
        with pytest.raises(ValueError, match="no effect on .*Bloom.*'bloom'.*docs/families"):
            call()


def test_head_without_a_class_is_answered_with_those_that_there_are(folders, tmp_path):
    """An Auto class whose head the stock model type lacks, and a head of the caller."""
    settings = {"position_embedding": {"type": "cape"}}
    cape_config = CapeBertConfig.from_pretrained(folders / "bert", **settings)
    stock = FAMILIES["bert"].stock_config.from_pretrained(folders / "bert")
    cape_config.save_pretrained(tmp_path)
    calls = (
        lambda: AutoModelForImageClassification.from_pretrained(folders / "bert", **settings),
        lambda: AutoModelForImageClassification.from_pretrained(tmp_path),
        lambda: AutoModelForImageClassification.from_config(cape_config),
        lambda: hf_models.switch(BertForRanking(stock), {"type": "cape"}),
    )
    for call in calls:
        with pytest.raises(ValueError, match="ImageClassification|Ranking") as error:
            call()
        message = str(error.value)
        assert "CapeBertForMaskedLM, CapeBertForMultipleChoice" in message
        assert "register_family" in message
        assert "Marian" not in message
        assert len(message) < 700


class BertForRanking(BertPreTrainedModel):
    """A head of the caller."""

    def __init__(self, config):
        super().__init__(config)
        self.bert = BertModel(config)
        self.score = torch.nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids, **options):
        return self.score(self.bert(input_ids, **options).pooler_output)


def test_class_of_another_head_is_written_in_two_lines(folders, tmp_path):
    before = dict(hf_models.AUTO_CLASSES[CapeBertConfig])

    class CapeBertForRanking(PositionModelMixin, BertForRanking):
        """Ranks texts."""

    hf_models.register_family(hf_models.FamilyClasses(CapeBertConfig, (CapeBertForRanking,)))
    try:
        assert hf_models.AUTO_CLASSES[CapeBertConfig].items() >= before.items()
        model = CapeBertForRanking.from_pretrained(
            folders / "bert", position_embedding={"type": "cape"}
        )
        model.save_pretrained(tmp_path)
        again, ids = CapeBertForRanking.from_pretrained(tmp_path).eval(), torch.arange(1, 13)[None]
        assert torch.equal(again(ids), model.eval()(ids))
        stock = BertForRanking.from_pretrained(folders / "bert")
        assert type(hf_models.switch(stock, {"type": "nopos"})) is CapeBertForRanking
    finally:
        hf_models.MODELS.pop("CapeBertForRanking")
        hf_models.switching.install.PARTS.pop(BertForRanking)
        hf_models.AUTO_CLASSES[CapeBertConfig] = before

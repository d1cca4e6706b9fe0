"""What loads into which class: stock checkpoints of the same family, and nothing else."""

import copy
import logging
import re

import pytest
import torch
from peft import AutoPeftModel, LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    ViTMSNConfig,
    ViTMSNForImageClassification,
)

import hf_models
from hf_models import (
    MODELS,
    CapeMarianConfig,
    CapeMarianModel,
    CapeMarianMTModel,
    CapeViTConfig,
    CapeViTForImageClassification,
)
from tests.support import whisper
from tests.support.hf import (
    FAMILIES,
    MARIAN,
    STACKS,
    VARIANTS,
    VIT,
    WITH_STOCK,
    answer,
    batch,
    loss,
    make,
)

SEQ2SEQ = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "vocab_size": 60,
    "pad_token_id": 1,
}
ENCODER = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
FOREIGN = {
    "blenderbot": (BlenderbotForConditionalGeneration, BlenderbotConfig, SEQ2SEQ),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config,
        {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 60}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "vit_msn": (
        ViTMSNForImageClassification,
        ViTMSNConfig,
        {**ENCODER, "image_size": 32, "patch_size": 8},
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of foreign model types, and of each family of this package."""
    root = tmp_path_factory.mktemp("checkpoints")
    for model_type, (model, config, sizes) in FOREIGN.items():
        model(config(**sizes)).save_pretrained(root / model_type)
    for name in FAMILIES:
        make(name, "nopos").save_pretrained(root / f"cape_{name}")
    for name in WITH_STOCK:
        FAMILIES[name].build_stock().save_pretrained(root / name)
    whisper.make_stock().save_pretrained(root / "whisper")
    whisper.switched("nopos").save_pretrained(root / "cape_whisper")
    return root


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("with_config", [False, True], ids=["", "config given"])
def test_every_class_refuses_every_foreign_model_type(name, with_config, folders):
    model = getattr(hf_models, name)
    settings = {"position_embedding": {"type": "nopos"}}
    if with_config:
        settings = {"config": model.config_class(**settings)}
    allowed = model.config_class.model_types()
    refused = [folder for folder in folders.iterdir() if folder.name not in allowed]
    assert len(refused) == len(list(folders.iterdir())) - len(allowed)
    for folder in refused:
        with pytest.raises(ValueError, match=f"model of type '{folder.name}'") as error:
            model.from_pretrained(folder, **settings)
        for name in allowed:
            assert repr(name) in str(error.value)


@pytest.mark.parametrize("family", WITH_STOCK)
def test_stock_checkpoints_of_the_family_load_without_a_warning(family, folders, caplog):
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model = FAMILIES[family].model.from_pretrained(
            folders / family, position_embedding={"type": FAMILIES[family].stock_type}
        )
    finally:
        logger.removeHandler(caplog.handler)
    assert model.config.model_type == f"cape_{family}"
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("family", WITH_STOCK)
def test_stock_configuration_object_is_refused_with_the_remedy(family, folders):
    row = FAMILIES[family]
    stock = row.stock_config(**row.sizes)
    calls = (
        lambda: row.model(stock),
        lambda: row.model.from_pretrained(folders / family, config=stock),
    )
    for call in calls:
        with pytest.raises(ValueError, match=f"config is a {row.stock_config.__name__}.*from_dict"):
            call()
    config = row.config.from_dict(stock.to_dict(), position_embedding={"type": "nopos"})
    assert row.model(config).config.position_embedding == {"type": "nopos"}


# ---- alpha ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [None, {"type": "cape"}])
def test_configuration_without_alpha_is_saved_and_loaded_but_builds_no_model(settings, tmp_path):
    config = CapeMarianConfig(**MARIAN.sizes, position_embedding=settings)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.position_embedding == config.position_embedding
    assert again.position_config.source_scale == "auto"
    for model in (CapeMarianModel, CapeMarianMTModel):
        with pytest.raises(ValueError, match=r"source_scale='auto'.*cape-plugins alpha"):
            model(again)
    given = AutoConfig.from_pretrained(tmp_path, position_embedding={"source_scale": 2})
    assert CapeMarianMTModel(given).config.position_config.alpha == 2.0


@pytest.mark.parametrize("family", WITH_STOCK)
def test_adapters_on_a_stock_base_are_saved_and_load_again(family, folders, tmp_path):
    row, settings = FAMILIES[family], VARIANTS[family]["cape"]

    def base():
        return row.model.from_pretrained(folders / family, position_embedding=settings)

    adapted = get_peft_model(base(), LoraConfig(target_modules=list(row.adapted)))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(base(), tmp_path).eval()
    module = row.model.__module__
    by_name = AutoPeftModel.from_pretrained(
        tmp_path, position_embedding=settings, import_allowlist=[module]
    ).eval()
    inputs = batch(family)
    expected = answer(adapted.eval()(**inputs))
    assert torch.equal(answer(again(**inputs)), expected)
    assert torch.equal(answer(by_name(**inputs)), expected)
    assert not torch.equal(answer(base().eval()(**inputs)), expected)


@pytest.mark.parametrize("family", [name for name in STACKS if "relpos" in VARIANTS[name]])
def test_adapters_train_new_relative_tables_if_told(family, tmp_path):
    settings = {"type": "relpos", "relative_context": 2}
    model = FAMILIES[family].build(settings)
    lora = {"target_modules": list(FAMILIES[family].adapted[:1])}
    frozen = get_peft_model(copy.deepcopy(model), LoraConfig(**lora))
    adapted = get_peft_model(model, LoraConfig(**lora, modules_to_save=["relative"]))

    def trained(peft_model):
        names = (n for n, p in peft_model.named_parameters() if p.requires_grad)
        return {name for name in names if "relative" in name}

    assert not trained(frozen)
    assert trained(adapted)
    loss(adapted(**batch(family))).backward()
    parameters = dict(adapted.named_parameters())
    # not in the last layer of ViT, where the class token alone counts, which is no patch
    assert sum(parameters[name].grad.abs().sum() for name in trained(adapted)) > 0
    for name in trained(adapted):
        parameters[name].data.normal_()
    adapted.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(FAMILIES[family].build(settings), tmp_path)
    inputs = batch(family)
    assert torch.equal(answer(again.eval()(**inputs)), answer(adapted.eval()(**inputs)))


# ---- settings that would be ignored --------------------------------------------------------------


MISPLACED = [
    ({"position_embeddings": {"type": "cape"}}, "allowed: position_embedding"),
    ({"positional_embedding": {"type": "cape"}}, "allowed: position_embedding"),
    ({"decoder_position_embedding": {"type": "cape"}}, "allowed: position_embedding"),
    ({"max_global_shift": 3}, '"max_global_shift": 3}'),
    ({"position_max_global_shift": 3}, '"max_global_shift": 3}'),
    ({"source_scale": 2}, '"source_scale": 2}'),
]


@pytest.mark.parametrize(("settings", "message"), MISPLACED, ids=str)
def test_misplaced_settings_are_refused(settings, message, folders):
    calls = (
        lambda: CapeViTConfig(**settings),
        lambda: CapeViTConfig.from_dict(VIT.sizes, **settings),
        lambda: CapeViTConfig.from_pretrained(folders / "vit", **settings),
        lambda: CapeViTForImageClassification.from_pretrained(folders / "cape_vit", **settings),
        lambda: AutoConfig.from_pretrained(folders / "vit", **settings),
        lambda: AutoModelForImageClassification.from_pretrained(folders / "cape_vit", **settings),
    )
    for call in calls:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


@pytest.mark.parametrize("family", WITH_STOCK)
def test_auto_classes_take_a_position_embedding_for_stock_checkpoints(family, folders):
    settings = {"type": "cape", "max_local_shift": 0.25}
    if "source_scale" in VARIANTS[family]["cape"]:
        settings["source_scale"] = 2
    config = AutoConfig.from_pretrained(folders / family, position_embedding=settings)
    assert config.model_type == f"cape_{family}"
    assert config.position_config.max_local_shift == 0.25
    config, rest = AutoConfig.from_pretrained(
        folders / family, position_embedding=settings, foo=1, return_unused_kwargs=True
    )
    assert config.model_type == f"cape_{family}"
    assert rest == {"foo": 1}
    plain = AutoConfig.from_pretrained(folders / family)
    assert type(plain) is FAMILIES[family].stock_config
    model = FAMILIES[family].auto.from_pretrained(folders / family, position_embedding=settings)
    assert type(model) is FAMILIES[family].model
    direct = FAMILIES[family].model.from_pretrained(folders / family, position_embedding=settings)
    inputs = batch(family)
    assert torch.equal(answer(model(**inputs)), answer(direct(**inputs)))


def test_auto_config_takes_the_folder_by_its_stock_name(folders):
    foreign = AutoConfig.from_pretrained(pretrained_model_name_or_path=folders / "gpt2")
    assert type(foreign) is GPT2Config
    settings = {"position_embedding": {"type": "nopos"}}
    own = AutoConfig.from_pretrained(pretrained_model_name_or_path=folders / "vit", **settings)
    assert own.position_embedding == settings["position_embedding"]


def test_auto_classes_refuse_a_position_embedding_for_other_models(folders):
    for auto in (AutoConfig, AutoModelForSeq2SeqLM):
        with pytest.raises(ValueError, match=r"'blenderbot'.*cape_marian.*marian"):
            auto.from_pretrained(folders / "blenderbot", position_embedding={"type": "sinpos"})


def test_configuration_and_settings_beside_it_are_refused(folders):
    config = CapeViTConfig(**VIT.sizes)
    with pytest.raises(ValueError, match="config and position_embedding are both given"):
        CapeViTForImageClassification.from_pretrained(
            folders / "vit", config=config, position_embedding={"type": "nopos"}
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_of_a_built_model_cannot_be_changed(family, tmp_path):
    model, alpha = make(family, "nopos"), {}
    if "source_scale" in VARIANTS[family]["cape"]:
        alpha["source_scale"] = 1
    with pytest.raises(ValueError, match="a model was built from this configuration"):
        model.config.position_embedding = {"type": "cape", "max_local_shift": 0.25, **alpha}
    model.config.position_embedding = {"type": "nopos"}  # no change
    assert model.config.position_embedding == {"type": "nopos"}
    with pytest.raises(ValueError, match="cannot be changed one by one"):
        model.config.position_embedding["type"] = "cape"
    changed = copy.deepcopy(model.config)
    changed.position_embedding = {"type": "cape", "max_local_shift": 0.25, **alpha}
    assert FAMILIES[family].model(changed).config.position_embedding["max_local_shift"] == 0.25
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).position_embedding == {"type": "nopos"}


@pytest.mark.parametrize("family", WITH_STOCK)
def test_parts_that_the_stock_model_leaves_out_are_left_out(family):
    stock, model = FAMILIES[family].build_stock(), make(family, "nopos")
    ignored = stock._keys_to_ignore_on_load_unexpected
    assert ignored <= model._keys_to_ignore_on_load_unexpected
    assert len(ignored) < len(model._keys_to_ignore_on_load_unexpected)

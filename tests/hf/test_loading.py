"""What loads into which class: stock checkpoints of the same family, and nothing else."""

import re

import pytest
import torch
from peft import AutoPeftModel, LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForImageClassification, GPT2Config, GPT2LMHeadModel

import hf_models
from hf_models import CapeMarianConfig, CapeMarianModel, CapeMarianMTModel, CapeViTConfig
from tests.support.hf import (
    FAMILIES,
    MARIAN,
    STACKS,
    VARIANTS,
    VIT,
    WITH_STOCK,
    answer,
    batch,
    make,
)

STOCK = [name for name in STACKS if name in WITH_STOCK]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoints of a foreign model type, and of families of this package."""
    root = tmp_path_factory.mktemp("checkpoints")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 60}
    config = GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(root / "gpt2")
    for name in ("marian", "vit"):
        make(name, "nopos").save_pretrained(root / f"cape_{name}")
    for name in STOCK:
        FAMILIES[name].build_stock().save_pretrained(root / name)
    return root


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_every_class_refuses_foreign_model_types(name, folders):
    """With and without a configuration."""
    model = getattr(hf_models, name)
    fields = {"position_embedding": {"type": "nopos"}}
    allowed = model.config_class.model_types()
    other = "marian" if "marian" not in allowed else "vit"
    for folder in ("gpt2", other, f"cape_{other}"):
        settings = fields if folder == other else {"config": model.config_class(**fields)}
        with pytest.raises(ValueError, match=f"model of type '{folder}'") as error:
            model.from_pretrained(folders / folder, **settings)
        assert all(repr(name) in str(error.value) for name in allowed)


@pytest.mark.parametrize("family", ["marian", "vit"])
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
    config = AutoConfig.from_pretrained(tmp_path, position_embedding={"source_scale": 2})
    assert CapeMarianMTModel(config).config.position_config.alpha == 2.0


@pytest.mark.parametrize("family", STOCK)
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


MISPLACED = [
    ({"positional_embedding": {"type": "cape"}}, "allowed: position_embedding"),
    ({"decoder_position_embedding": {"type": "cape"}}, "allowed: position_embedding"),
    ({"text_position_embedding": {"type": "cape"}}, "allowed: position_embedding"),
    ({"position_max_global_shift": 3}, '"max_global_shift": 3}'),
]


@pytest.mark.parametrize(("settings", "message"), MISPLACED, ids=str)
def test_misplaced_settings_are_refused(settings, message, folders):
    calls = (
        lambda: CapeViTConfig(**settings),
        lambda: CapeViTConfig.from_dict(VIT.sizes, **settings),
        lambda: CapeViTConfig.from_pretrained(folders / "vit", **settings),
        lambda: VIT.model.from_pretrained(folders / "cape_vit", **settings),
        lambda: AutoConfig.from_pretrained(folders / "vit", **settings),
        lambda: AutoModelForImageClassification.from_pretrained(folders / "cape_vit", **settings),
    )
    for call in calls:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()

"""transformers looks up some behaviour by the names of classes and model types; our models get the
same behaviour as the stock models."""

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.models.auto import modeling_auto

import hf_models
from hf_models.switching.install import stock_class
from tests.support.hf import FAMILIES, batch


@pytest.mark.parametrize("family", ["llama", "qwen2", "bert"])
def test_smoothed_labels_equal_the_stock_model(family, tmp_path):
    row = FAMILIES[family]
    stock = row.build_stock()
    model = row.model(row.config(**row.sizes, position_embedding={"type": row.stock_type})).eval()
    model.load_state_dict(stock.state_dict(), strict=False)
    arguments = {"report_to": [], "use_cpu": True, "label_smoothing_factor": 0.1}
    losses = []
    for learner in (stock, model):
        trainer = Trainer(learner, TrainingArguments(output_dir=str(tmp_path), **arguments))
        with torch.no_grad():
            losses.append(trainer.compute_loss(learner, batch(family)))
    assert torch.equal(*losses)


def tables(name):
    """Tables of transformers that a class is named in."""
    rows = (
        (table, class_names if isinstance(class_names, tuple) else (class_names,))
        for table, names in vars(modeling_auto).items()
        if table.endswith("_NAMES")
        for class_names in names.values()
    )
    return {table for table, class_names in rows if name in class_names}


# no Auto class loads them, neither ours nor the stock models
WITHOUT_TABLE = {"CapeWhisperEncoder", "CapeBeitForMaskedImageModeling"}


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_models_are_in_the_tables_that_their_stock_models_are_in(name):
    model = hf_models.MODELS[name]
    stock = stock_class(model)
    if stock is None:
        assert tables(name) == set()
    else:
        assert tables(name) == tables(stock.__name__)
        assert bool(tables(name)) != (name in WITHOUT_TABLE)

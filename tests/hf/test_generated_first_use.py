"""Classes of generated families are made when they are first asked for, also in a new process."""

import subprocess
import sys
import textwrap

import pytest
import torch
from transformers import AutoConfig

import hf_models
from cape_plugins.checkpoints.families import FAMILY_ROWS, OWN_PREFIX
from cape_plugins.checkpoints.generated import GENERATED
from hf_models.generated.families import make
from hf_models.generated.kinds import SEAMS
from tests.support.generated import CAPE, batch, llava, logits, mistral


def in_new_process(script, *arguments):
    """What a new interpreter prints."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_import_makes_no_family():
    script = """
        import sys, hf_models
        from cape_plugins.checkpoints.generated import GENERATED
        # the image tower of SigLIP is a row of a file, in the same module of transformers
        names = GENERATED.keys() - {"siglip"}
        stock = {f"transformers.models.{name}.modeling_{name}" for name in names}
        print(*(stock & sys.modules.keys()))
    """
    assert in_new_process(script) == []


def test_new_process_loads_a_saved_folder_and_its_configuration(tmp_path):
    hf_models.switch(mistral(), CAPE).save_pretrained(tmp_path)
    script = """
        import sys, hf_models, transformers
        print(type(transformers.AutoConfig.from_pretrained(sys.argv[1])).__name__)
        print(*(name for name in sys.modules if ".modeling_mi" in name))
        print(type(transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)
    """
    assert in_new_process(script, tmp_path) == [
        "CapeMistralConfig",
        "transformers.models.mistral.modeling_mistral",
        "CapeMistralForCausalLM",
    ]


def test_new_process_unpickles_a_model(tmp_path):
    model, inputs = hf_models.switch(llava(), CAPE).eval(), batch()
    torch.save((model, inputs, logits(model, **inputs)), tmp_path / "model.pt")
    script = """
        import sys, torch
        model, inputs, expected = torch.load(sys.argv[1], weights_only=False)
        print(torch.equal(model(**inputs, use_cache=False).logits, expected))
    """
    assert in_new_process(script, tmp_path / "model.pt") == ["True"]


def test_classes_are_found_by_name():
    script = """
        import hf_models
        print(hf_models.CapeMistralForCausalLM.config_class is hf_models.CapeMistralConfig)
        from hf_models import CapeMixtralModel
        print(CapeMixtralModel.__name__, hasattr(hf_models, "CapeNothing"))
        print(hasattr(hf_models, "CapeT5Model"), hasattr(hf_models, "MistralModel"))
    """
    assert in_new_process(script) == ["True", "CapeMixtralModel", "False", "False", "False"]


def test_a_new_process_tells_how_to_add_a_head():
    script = """
        import hf_models, transformers
        from transformers.models.roberta.modeling_roberta import RobertaPreTrainedModel
        class Ranking(RobertaPreTrainedModel): pass
        try:
            hf_models.switch(Ranking(transformers.RobertaConfig()), {"type": "cape"})
        except ValueError as refusal:
            print(refusal)
    """
    said = " ".join(in_new_process(script))
    assert "Ranking has no counterpart in 'cape_roberta', which has CapeRobertaForCausalLM" in said
    assert "register_family" in said


def test_all_rows_are_families_that_have_classes():
    assert GENERATED.keys() <= FAMILY_ROWS.keys()
    assert {row.seam for row in GENERATED.values()} <= SEAMS.keys()
    assert AutoConfig.for_model(OWN_PREFIX + "mistral").position_embedding["type"] == "cape"
    with pytest.raises(ValueError, match=r"'t5' is no generated family.*cape-plugins doctor t5"):
        make("t5")

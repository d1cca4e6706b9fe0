"""The cape models in the form that the common tests of transformers need; see run.py."""

import importlib.util
import os
import unittest
from pathlib import Path

import torch

import hf_models
from hf_models import (
    CapeSpeech2TextConfig,
    CapeSpeech2TextForConditionalGeneration,
    CapeSpeech2TextModel,
    CapeSpeechConfig,
    CapeSpeechForCTC,
    CapeSpeechModel,
    CapeWhisperConfig,
    CapeWhisperForConditionalGeneration,
    CapeWhisperModel,
)

from ...generation.test_utils import GenerationTesterMixin
from ...test_modeling_common import ModelTesterMixin, floats_tensor, ids_tensor

# by its path: `tests` is here the package of transformers
_place = Path(hf_models.__file__).parents[1] / "tests" / "support" / "hf.py"
_spec = importlib.util.spec_from_file_location("cape_table", _place)
TABLE = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(TABLE)
TYPE = os.environ["POSITION_EMBEDDING"]
SETTINGS = {"type": TYPE}


def left_out(reason):
    """For the last line, of summary.py."""
    return unittest.skip(f"left out: {reason}")


class Sizes:
    """Sizes and inputs of one family."""

    is_training = True
    batch_size = 3
    seq_length = encoder_seq_length = key_length = 7
    decoder_seq_length = 7
    hidden_size = 16
    num_hidden_layers = 2
    num_attention_heads = 4

    def __init__(self, parent):
        self.parent = parent

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), self.get_inputs()


class CapeModelTest(ModelTesterMixin):
    """Settings that transformers derives from the names of its classes: which models have a
    loss."""

    def _labels(self):
        length = self.model_tester.decoder_seq_length
        return torch.arange(3, 3 + length).repeat(self.model_tester.batch_size, 1)

    def _heads(self):
        return tuple(
            c for c in self.all_model_classes if c.__name__[-5:] != "Model" or "MT" in c.__name__
        )

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels and model_class in self._heads():
            inputs["labels"] = self._labels()
        return inputs

    def test_training(self):
        self.all_model_classes = self._heads()
        super().test_training()

    def check_training_gradient_checkpointing(self, **kwargs):
        self.all_model_classes = self._heads()
        super().check_training_gradient_checkpointing(**kwargs)

    if hasattr(GenerationTesterMixin, "is_stub"):

        @left_out("that what generates has the tests of generation")
        def test_generation_tester_mixin_inheritance(self):
            pass


class SpeechTester(Sizes):
    seq_length = 30
    encoder_seq_length = key_length = 10

    def get_config(self):
        return CapeSpeechConfig(
            vocab_size=20, d_model=16, encoder_layers=2, encoder_attention_heads=4,
            encoder_ffn_dim=16, num_mel_bins=8, feature_dropout=0.0, layer_norm="pre",
            position_embedding=SETTINGS,
        )  # fmt: skip

    def get_inputs(self):
        features = floats_tensor([self.batch_size, self.seq_length, 8])
        return {
            "input_features": features,
            "attention_mask": torch.ones(features.shape[:2], dtype=torch.long),
        }


class SpeechTest(CapeModelTest, unittest.TestCase):
    all_model_classes = (CapeSpeechModel, CapeSpeechForCTC)
    test_resize_embeddings = False

    def setUp(self):
        self.model_tester = SpeechTester(self)
        if "_pad_left" in self._testMethodName and "no_attn_mask" not in self._testMethodName:
            self.skipTest("left out: frames are padded on the right, and else refused")

    @left_out("frames have no embeddings of tokens")
    def test_inputs_embeds(self):
        pass

    @left_out("frames have no embeddings of tokens")
    def test_model_get_set_embeddings(self):
        pass


class Speech2TextTester(Sizes):
    seq_length = 20
    encoder_seq_length = key_length = 5
    decoder_seq_length = 7

    def get_config(self):
        return CapeSpeech2TextConfig(
            vocab_size=60, d_model=16, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=16,
            decoder_ffn_dim=16, conv_channels=16, input_feat_per_channel=8,
            max_source_positions=20, max_target_positions=20, position_embedding=SETTINGS,
        )  # fmt: skip

    def get_inputs(self):
        features = floats_tensor([self.batch_size, self.seq_length, 8])
        words = ids_tensor([self.batch_size, self.decoder_seq_length], 60).clamp(3)
        return {
            "input_features": features,
            "attention_mask": torch.ones(features.shape[:2], dtype=torch.long),
            "decoder_input_ids": words,
            "decoder_attention_mask": torch.ones_like(words),
        }


class Speech2TextTest(CapeModelTest, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (CapeSpeech2TextModel, CapeSpeech2TextForConditionalGeneration)
    is_encoder_decoder = True
    test_missing_keys = False

    def setUp(self):
        self.model_tester = Speech2TextTester(self)

    @left_out("the test calls the model with input_ids (stock skips or replaces it)")
    def test_resize_tokens_embeddings(self):
        pass

    @left_out("the test calls the model with input_ids (stock skips or replaces it)")
    def test_resize_embeddings_untied(self):
        pass

    @left_out("frames have no embeddings of tokens")
    def test_inputs_embeds(self):
        pass


class WhisperTester(Sizes):
    seq_length, decoder_seq_length = 20, 7
    encoder_seq_length = key_length = 10

    def get_config(self):
        return CapeWhisperConfig(
            vocab_size=60, d_model=16, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=16,
            decoder_ffn_dim=16, num_mel_bins=8, max_source_positions=10, max_target_positions=20,
            classifier_proj_size=4, pad_token_id=0, bos_token_id=1, eos_token_id=1,
            decoder_start_token_id=2, begin_suppress_tokens=None, position_embedding=SETTINGS,
        )  # fmt: skip

    def get_inputs(self):
        features = floats_tensor([self.batch_size, 8, self.seq_length])
        words = ids_tensor([self.batch_size, self.decoder_seq_length], 60).clamp(3)
        return {
            "input_features": features,
            "attention_mask": torch.ones(features.shape[::2], dtype=torch.long),
            "decoder_input_ids": words,
            "decoder_attention_mask": torch.ones_like(words),
        }


class WhisperTest(Speech2TextTest):
    all_model_classes = (CapeWhisperModel, CapeWhisperForConditionalGeneration)

    def setUp(self):
        self.model_tester = WhisperTester(self)


# ---- families that have no class above, from the table of the tests ------------------------------


class RowTester(Sizes):
    """Sizes and inputs of a row of the table."""

    vocab_size = 60
    hidden_size = 32

    def __init__(self, parent):
        super().__init__(parent)
        self.row, self.settings = parent.row, parent.settings
        if "image_size" in self.row.sizes:
            config = self.get_config()
            special = {"deit": 2, "siglip_vision_model": 0}.get(parent.name, 1)
            special += getattr(config, "num_register_tokens", 0)
            self.seq_length = self.encoder_seq_length = self.key_length = 4 + special

    def get_config(self):
        sizes = {**self.row.sizes, "forced_eos_token_id": None}
        for wide in ("init_std", "initializer_range"):  # in half precision, sums would differ
            sizes.pop(wide, None)
        if "image_size" in sizes:
            sizes |= {"image_size": 16}
        else:
            sizes |= {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0}
        return self.row.config(**sizes, position_embedding=self.settings)

    def get_inputs(self):
        if "image_size" in self.row.sizes:
            return {"pixel_values": floats_tensor([self.batch_size, 3, 16, 16])}
        ids = ids_tensor([self.batch_size, self.seq_length], 60).clamp(3)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "decoder_layers" in self.row.sizes:
            other = ids_tensor([self.batch_size, self.seq_length], 60).clamp(3)
            inputs |= {"decoder_input_ids": other, "decoder_attention_mask": torch.ones_like(other)}
        return inputs


class RowTest(CapeModelTest):
    """Of one row of the table."""

    def setUp(self):
        self.model_tester = RowTester(self)


class TextRowTest(RowTest):
    test_missing_keys = False


class ImageRowTest(RowTest):
    """Leaves out what images do not have."""

    test_resize_embeddings = False

    def _labels(self):
        return torch.zeros(self.model_tester.batch_size, dtype=torch.long)

    @left_out("patches are no embedding of tokens (stock skips it, too)")
    def test_model_get_set_embeddings(self):
        pass

    @left_out("saved under the names of the model by design, so that the Trainer resumes")
    def test_reverse_loading_mapping(self):
        pass

    @left_out("images have no embeddings of tokens")
    def test_inputs_embeds(self):
        pass


def add_tests(name):
    """A class of tests for a family, with the type that is asked for if the family has it."""
    row = TABLE.FAMILIES[name]
    image, generates = "image_size" in row.sizes, row.model.can_generate()
    bases = (ImageRowTest if image else TextRowTest,)
    bases += (GenerationTesterMixin,) * generates + (unittest.TestCase,)
    base = getattr(hf_models, f"{row.config.__name__.removesuffix('Config')}Model")
    body = {
        "name": name,
        "row": row,
        "settings": TABLE.OF_FAMILY[name][TYPE],
        "all_model_classes": tuple(dict.fromkeys((base, row.model))),
        "is_encoder_decoder": "decoder_layers" in row.sizes,
    }
    settings = row.config(position_embedding=body["settings"]).position_config
    if settings.source_bos:
        body["test_retain_grad_hidden_states_attentions"] = left_out(
            "gradients at states and attentions, which with the BOS hint are parts of others"
        )(lambda self: None)
    if name.startswith("dinov2"):
        reason = "gradients of the mask token, which only masked images have (stock skips it, too)"
        body["check_training_gradient_checkpointing"] = left_out(reason)(
            lambda self, **kwargs: None
        )
    title = f"{name.title().replace('_', '')}Test"
    globals()[title] = type(title, bases, body)


for _name in TABLE.FAMILIES:
    if (
        _name not in ("speech_ctc", "speech_to_text")
        and TYPE in TABLE.OF_FAMILY[_name]
        and not TABLE.left_out(_name, "common")
    ):
        add_tests(_name)

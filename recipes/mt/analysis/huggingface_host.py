"""Folders of Hugging Face translation models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING as TRANSLATING
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from cape_plugins import PositionConfig
from cape_plugins.utils.texts import first_line
from hf_models import CapeMarianConfig, CapeMarianMTModel
from hf_models.seams.bos_hint import place_hint
from recipes.lab.steps import CommandError
from recipes.mt.analysis.translators import Decoding, Ids, Running, Translator, pad

IGNORED = -100  # label of padding


class HuggingFaceTranslator(Translator):
    """A folder with a model and its tokenizer: cape_marian, or any encoder-decoder of transformers.

    Stock Marian is loaded as cape_marian with sinusoids: outputs stay the same, length has no
    limit, and offsets can be added to positions.
    """

    def __init__(self, path: Path, running: Running, **_files: Any):
        super().__init__(path, running)
        self.config = self._read(AutoConfig)
        if type(self.config) not in TRANSLATING:
            raise CommandError(
                f"--model {path}: is of the type {self.config.model_type}, which cannot translate;"
                " give a model with an encoder and a decoder of text, such as marian"
            )
        self.tokenizer = self._read(AutoTokenizer)
        settings = getattr(self.config, "position_embedding", None) or {}
        parts = ("Hugging Face", self.config.model_type, settings.get("type"))
        self.kind = " ".join(filter(None, parts))

    def _read(self, loader: Any) -> Any:
        try:
            return loader.from_pretrained(self.path)
        except Exception as error:  # without its files each tokenizer fails in a different way
            raise CommandError(
                f"--model {self.path}: cannot be read as a Hugging Face model "
                f"({first_line(error)}); give a folder with a translation model and its tokenizer, "
                "or a checkpoint*.pt of fairseq"
            ) from None

    def files(self) -> list[Path]:
        endings = (".safetensors", ".bin", ".json")
        return sorted(path for path in self.path.iterdir() if path.suffix in endings)

    def source_ids(self, text: str) -> Ids:
        return self._checked(self.tokenizer(text, verbose=False)["input_ids"])

    def target_ids(self, text: str) -> Ids:
        return self._checked(self.tokenizer(text_target=text, verbose=False)["input_ids"])

    def subwords(self, ids: Sequence[int]) -> list[str]:
        return self.tokenizer.convert_ids_to_tokens(ids)

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def position_config(self, model: nn.Module) -> PositionConfig | None:
        return getattr(model.config, "position_config", None)

    def load(self) -> nn.Module:
        loader, more = AutoModelForSeq2SeqLM, {}
        if self.config.model_type in CapeMarianConfig.model_types()[1:]:  # stock
            loader, more = CapeMarianMTModel, {"position_embedding": {"type": "sinpos"}}
        try:
            return loader.from_pretrained(self.path, dtype=torch.float32, **more)
        except (OSError, ValueError) as error:
            raise CommandError(
                f"--model {self.path}: cannot be loaded ({first_line(error)})"
            ) from None

    def score(self, model: nn.Module, sources: list[Ids], targets: list[Ids]) -> Tensor:
        labels = pad(targets, IGNORED, self.running.device)
        before = model.prepare_decoder_input_ids_from_labels(labels=labels)
        logits = model(**self._batch(sources), decoder_input_ids=before, use_cache=False).logits
        logits = logits.float().transpose(1, 2)
        return -F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")

    def generate(self, model: nn.Module, sources: list[Ids], decoding: Decoding) -> list[str]:
        longest = max(map(len, sources))
        output = model.generate(
            **self._batch(sources),
            num_beams=decoding.beam,
            length_penalty=decoding.length_penalty,
            # as in fairseq, the end of sentence follows the longest hypothesis and counts in the
            # score
            max_new_tokens=1 + int(decoding.max_len_a * longest + decoding.max_len_b),
            forced_eos_token_id=self.tokenizer.eos_token_id,
            do_sample=False,
        )
        return [self.text(row) for row in output.tolist()]

    def states(self, model: nn.Module, sources: list[Ids]) -> tuple[list[Tensor], Tensor]:
        batch, encoder = self._batch(sources), model.get_encoder()
        valid, states = batch["attention_mask"], []
        if not getattr(encoder, "has_hint", False):
            output = encoder(**batch, output_hidden_states=True, return_dict=True)
            return list(output.hidden_states), valid.bool()
        # fairseq counts the BOS hint, which the output leaves out
        hooks = [layer.register_forward_pre_hook(lambda _layer, inputs: states.append(inputs[0]))
                 for layer in encoder.layers]  # fmt: skip
        output = encoder(**batch)
        for hook in hooks:
            hook.remove()
        states.append(torch.cat((output.leading_state, output.last_hidden_state), dim=1))
        return states, place_hint(valid).mask.bool()

    def _batch(self, sources: list[Ids]) -> dict[str, Tensor]:
        ids = pad(sources, self.tokenizer.pad_token_id, self.running.device)
        mask = pad([[1] * len(row) for row in sources], 0, self.running.device)
        return {"input_ids": ids, "attention_mask": mask}

    def _checked(self, ids: Ids) -> Ids:
        """Refuses a text that is longer than the table of positions: the model would raise an index
        error."""
        free = self.config.model_type in CapeMarianConfig.model_types()
        limit = getattr(self.config, "max_position_embeddings", None)
        if not free and limit and len(ids) > limit:
            raise CommandError(
                f"--model {self.path}: a text of {len(ids)} subwords, and {self.config.model_type}"
                f" has {limit} positions; give shorter texts or another model"
            )
        return ids

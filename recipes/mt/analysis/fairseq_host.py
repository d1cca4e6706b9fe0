"""Translation checkpoints of fairseq."""

import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks.translation import TranslationTask
from omegaconf import open_dict
from torch import Tensor, nn

import fairseq_user_dir  # noqa: F401 registers the architectures, lets torch load checkpoints
from cape_plugins import PositionConfig
from cape_plugins.utils.texts import first_line
from recipes.lab.steps import CommandError
from recipes.mt.analysis.translators import Decoding, Ids, Running, Translator, pad
from recipes.mt.corpus import SEPARATOR, Segmented, open_segmentation

# torch warns, because fairseq masks padding with booleans and the future with numbers
warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask and attn_mask")


class FairseqTranslator(Translator):
    """A ``checkpoint*.pt`` of a translation task, of a stock model or of a model of this package.

    Args:
        segmented: Whether the test text is in the subwords of the model.
        data: Folder with the dictionaries (default: the folder that the checkpoint names).
        files: The sentencepiece model (spm) or subword-nmt codes (bpe) of the training text.
    """

    def __init__(
        self,
        path: Path,
        running: Running,
        segmented: bool = False,
        data: Path | None = None,
        **files: Path | None,
    ):
        super().__init__(path, running)
        self.data = data
        cfg = self._read()["cfg"]
        self.task = tasks.setup_task(cfg.task, from_checkpoint=True)
        self.source, self.target = self.task.source_dictionary, self.task.target_dictionary
        if segmented:
            self.segmentation = Segmented(self.target.symbols)
        else:
            languages = cfg.task.source_lang, cfg.task.target_lang
            self.segmentation = open_segmentation(Path(cfg.task.data), languages, **files)
        if self.segmentation is None:
            raise CommandError(
                f"--model {path}: no subword model beside {cfg.task.data}; give --spm FILE or"
                " --bpe FILE, or --segmented if the test text is in the subwords of the model"
            )
        self.segmentation.keeps_separator |= SEPARATOR in self.source.indices
        position = getattr(cfg.model, "position_embedding", None)
        self.kind = " ".join(filter(None, ("fairseq", _arch(cfg.model), position)))

    def files(self) -> list[Path]:
        return [self.path]

    def source_ids(self, text: str) -> Ids:
        pieces = self.segmentation.encode(text, 0)
        return self.source.encode_line(pieces, add_if_not_exist=False).tolist()

    def target_ids(self, text: str) -> Ids:
        pieces = self.segmentation.encode(text, 1)
        return self.target.encode_line(pieces, add_if_not_exist=False).tolist()

    def subwords(self, ids: Sequence[int]) -> list[str]:
        return [self.target[index] for index in ids]

    def text(self, ids: Sequence[int]) -> str:
        return self.segmentation.decode(self.target.string(torch.tensor(ids, dtype=torch.int)))

    def plain(self, text: str) -> str:
        return self.segmentation.plain(text)

    def position_config(self, model: nn.Module) -> PositionConfig | None:
        return getattr(model, "position_config", None)

    def load(self) -> nn.Module:
        try:
            (model,), *_ = checkpoint_utils.load_model_ensemble_and_task(
                [str(self.path)], task=self.task, state=self._read()
            )
        except (ValueError, RuntimeError) as error:
            raise CommandError(
                f"--model {self.path}: cannot be built ({first_line(error)})"
            ) from None
        return model

    def score(self, model: nn.Module, sources: list[Ids], targets: list[Ids]) -> Tensor:
        target = self._padded(targets)
        before = self._padded([[self.target.eos(), *ids[:-1]] for ids in targets])
        output = model(**self._sources(sources), prev_output_tokens=before)
        scores = model.get_normalized_probs(output, log_probs=True, sample={"target": target})
        return scores.gather(2, target[..., None])[..., 0]

    def generate(self, model: nn.Module, sources: list[Ids], decoding: Decoding) -> list[str]:
        options = Namespace(**vars(decoding), lenpen=decoding.length_penalty)
        generator = self.task.build_generator([model], options)
        sample = {"net_input": self._sources(sources)}
        hypotheses = self.task.inference_step(generator, [model], sample)
        return [self.text(best["tokens"].tolist()) for best, *_ in hypotheses]

    def states(self, model: nn.Module, sources: list[Ids]) -> tuple[list[Tensor], Tensor]:
        output = model.encoder(**self._sources(sources), return_all_hiddens=True)
        states = [state.transpose(0, 1) for state in output["encoder_states"]]
        return states, ~output["encoder_padding_mask"][0]

    def _padded(self, rows: list[Ids]) -> Tensor:
        return pad(rows, self.target.pad(), self.running.device)

    def _sources(self, rows: list[Ids]) -> dict[str, Tensor]:
        lengths = torch.tensor([len(ids) for ids in rows], device=self.running.device)
        return {"src_tokens": self._padded(rows), "src_lengths": lengths}

    def _read(self) -> dict[str, Any]:
        """Returns the checkpoint, with an architecture of this package and the folder of the data
        in its ``cfg``."""
        try:
            state = checkpoint_utils.load_checkpoint_to_cpu(str(self.path))
        except ValueError as error:
            raise CommandError(f"--model {error}") from None
        if not state.get("cfg"):  # a checkpoint of an older fairseq
            state["cfg"] = convert_namespace_to_omegaconf(state["args"])
        state["args"] = None
        cfg = state["cfg"]
        task = getattr(cfg.task, "_name", None)
        if not issubclass(tasks.TASK_REGISTRY.get(task, object), TranslationTask):
            raise CommandError(
                f"--model {self.path}: is of the task {task}; give a model of the task translation"
            )
        with open_dict(cfg):
            cfg.task.data = str(find_data(self.path, self.data, cfg.task))
        use_cape_architecture(cfg.model)
        return state


def _arch(model: Any) -> str:
    return getattr(model, "arch", None) or model._name


def use_cape_architecture(model: Any) -> None:
    """Replaces a stock Transformer architecture in the settings by the architecture of this
    package. Outputs stay the same, length has no limit, and offsets can be added to positions."""
    arch = _arch(model)
    if arch.startswith("cape_") or f"cape_{arch}" not in ARCH_MODEL_REGISTRY:
        return
    learned = {bool(getattr(model, f"{s}_learned_pos", False)) for s in ("encoder", "decoder")}
    if getattr(model, "no_token_positional_embeddings", False):
        position = "nopos"
    elif len(learned) > 1:
        return
    else:
        position = "abspos" if True in learned else "sinpos"
    model.arch = f"cape_{arch}"
    if hasattr(model, "_name"):
        model._name = model.arch
    model.position_embedding = position


def find_data(checkpoint: Path, chosen: Path | None, task: Any) -> Path:
    """Returns the folder with the dictionaries of a checkpoint: the `chosen` folder, or the folder
    of the training. If checkpoint and folder were moved together, the folder is found by its path
    relative to a common parent folder."""
    names = [f"dict.{code or '*'}.txt" for code in (task.source_lang, task.target_lang)]
    candidates = [chosen or Path(str(task.data).split(":")[0])]
    if not chosen:
        parts = [part for part in candidates[0].parts if part != candidates[0].anchor]
        ends = [Path(*parts[start:]) for start in range(len(parts))]
        candidates += [folder / end for end in ends for folder in checkpoint.resolve().parents]
    for folder in candidates:
        if all(any(folder.glob(name)) for name in names):
            return folder
    remedy = "give --data FOLDER, the folder that fairseq-preprocess has made"
    raise CommandError(f"--model {checkpoint}: no dictionaries in {candidates[0]}; {remedy}")

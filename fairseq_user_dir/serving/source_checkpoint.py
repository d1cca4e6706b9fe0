"""Loads the checkpoint to export, refuses models that an engine cannot hold, and translates with
fairseq, for the comparison with the engine."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data import Dictionary
from fairseq.data.data_utils import collate_tokens
from fairseq.models import ARCH_MODEL_NAME_REGISTRY
from fairseq.models.nat import FairseqNATModel
from torch import nn

from cape_plugins.checkpoints.fairseq_files import fairseq_arguments, reason
from cape_plugins.serving.checks import refuse_not_finite
from cape_plugins.serving.ctranslate2_check import BEAM, Hypothesis
from fairseq_user_dir.host.errors import SettingsError
from fairseq_user_dir.host.reading import check_registered, read_checkpoint, task_name
from fairseq_user_dir.models import CLASSES, PREFIX

# Tasks that give a model its sentences unchanged, with EOS; other tasks add language codes or
# masks.
TASKS = ("translation", "language_modeling")
# Parameters of a stack that the engines support; other parameters would be left out silently.
_KNOWN = re.compile(
    r"(embed_tokens|embed_positions|output_projection)\.weight"
    r"|embed_positions\.encoder\.encoding\.weight"
    r"|(layernorm_embedding|layer_norm|project_in_dim|project_out_dim)\.\w+"
    r"|layers\.\d+\.((self_attn_|encoder_attn_|final_)layer_norm|fc1|fc2|admin\.omega)\.\w+"
    r"|layers\.\d+\.(self_attn|encoder_attn)\.(\w_proj|out_proj|relative)\.\w+"
    # No engine supports these biases. They are known here so that another check can refuse the type
    # by its name, which says more to users than the name of a parameter.
    r"|layers\.\d+\.self_attn\.layer_bias\.[\w.]+"
)
_BATCH = 100


class Source(NamedTuple):
    """A trained model.

    Attributes:
        model: Model in evaluation mode.
        task: Task of the model, with dictionaries.
    """

    model: Any
    task: Any

    @property
    def stacks(self) -> dict[str, nn.Module]:
        """ "encoder" (not in language models) and "decoder"."""
        names = [name for name in ("encoder", "decoder") if hasattr(self.model, name)]
        return {name: getattr(self.model, name) for name in names}


def load_source(path: Path, data: str | None = None) -> Source:
    """Loads a checkpoint of a translation or language model of this package.

    Args:
        path: Path of the checkpoint.
        data: Folder with the dictionaries; default the folder of the training.

    Raises:
        SettingsError: for models of other kinds, naming a way that works, and for wrong or missing
            dictionaries.
    """
    state = read_checkpoint(path)
    arguments = fairseq_arguments(state)
    arch = arguments.get("arch") or arguments.get("_name")
    name = ARCH_MODEL_NAME_REGISTRY.get(arch, arch)
    if name in CLASSES:
        raise SettingsError(
            f"{path} is a stock model ({arch}); allowed: cape_ architectures. The converter of "
            "ctranslate2, ct2-fairseq-converter, takes it, and fairseq-generate serves it."
        )
    if name not in {PREFIX + stock for stock in CLASSES}:
        raise SettingsError(
            f"{path} is of architecture {arch}; allowed: translation models and language models "
            "of text (cape_transformer, cape_transformer_lm and their sizes). The engines cannot "
            "read its inputs: serve it by fairseq-generate, or train speech as a Hugging Face "
            "model (cape_speech_ctc, cape_whisper) and export that model."
        )
    if task_name(state) not in TASKS:
        raise SettingsError(
            f"{path} was trained in the task {task_name(state)}, which may add symbols to "
            f"the inputs; allowed: {', '.join(TASKS)}. Serve it by fairseq-generate."
        )
    del state
    model, _, task = load_trained(path, data)
    source = Source(model, task)
    check_model(source.model)
    return source


def load_trained(path: Path, data: str | None) -> tuple[Any, Any, Any]:
    """The model of a checkpoint in evaluation mode, its configuration, and its task.

    Raises:
        SettingsError: for files that cannot be read, models and tasks of another user directory,
            missing dictionaries and dictionaries of another training.
        ValueError: for weights that are not finite.
    """
    check_registered(read_checkpoint(path), path)
    overrides = {} if data is None else {"data": data}
    try:
        (model,), cfg, task = load_model_ensemble_and_task([str(path)], overrides)
    except Exception as error:  # fairseq has no special type for a folder without dictionaries
        if type(error) is RuntimeError and "loading state_dict" in str(error):
            raise _unfit(path, data, str(error).splitlines()[1:]) from error
        if not isinstance(error, OSError) and type(error) is not Exception:
            raise
        raise SettingsError(
            f"{path} needs the dictionaries of its training ({reason(error)}); give --data DIR, a "
            "folder with its dict.*.txt."
        ) from error
    refuse_not_finite(model, path)
    return model.eval(), cfg, task


def _unfit(path: Path, data: str | None, reasons: Sequence[str]) -> SettingsError:
    """The error for weights that do not fit the model.

    Args:
        path: Path of the checkpoint.
        data: Folder of the dictionaries, if the command line names one.
        reasons: Lines of torch, each about some of the weights.
    """
    causes = reasons[0].strip().rstrip(".")
    if causes.startswith("size mismatch") and ("embed_tokens" in causes or "output_proj" in causes):
        return SettingsError(
            f"{path} does not fit the dictionaries in {data or 'the folder of its training'} "
            f"({causes}); give --data DIR, a folder with the dictionaries of its training."
        )
    return SettingsError(
        f"the weights of {path} do not fit its settings ({causes}): it is damaged, or was written "
        "by another version of its code. Give another checkpoint of the training."
    )


def check_model(model: nn.Module) -> None:
    """Refuses a model with parts that the stacks of an engine lack.

    Raises:
        SettingsError: names the part, and a way that works.
    """
    if isinstance(model, FairseqNATModel):
        raise SettingsError(
            f"{type(model).__name__} decodes all tokens at once, which no engine of `cape-plugins "
            "export` supports; allowed: autoregressive models. Serve it by fairseq-generate."
        )
    for side, stack in Source(model, None).stacks.items():
        for name, _ in stack.named_parameters():
            if not _KNOWN.fullmatch(name):
                raise SettingsError(
                    f"the {side} has the parameter {name}, of a part that no engine of "
                    "`cape-plugins export` supports; allowed: embeddings of tokens and "
                    "positions, attention, layer norms, two linear maps a layer, ADMIN. Serve "
                    "the model by fairseq-generate."
                )
        if getattr(stack, "cross_self_attention", False):
            raise SettingsError(
                f"the {side} was trained with --cross-self-attention, which no engine of "
                "`cape-plugins export` supports; allowed: models without this option. Serve the "
                "model by fairseq-generate."
            )


# ---- sentences in fairseq ------------------------------------------------------------------------


def encoded(dictionary: Dictionary, line: str) -> torch.Tensor:
    """``[T]`` indices, EOS last."""
    return dictionary.encode_line(line, add_if_not_exist=False).long()


@torch.no_grad()
def translate(source: Source, lines: Sequence[str], max_tokens: int) -> list[Hypothesis]:
    """Translations from fairseq's beam search, in the order of the lines.

    Args:
        source: A translation model.
        lines: Sentences, segmented like the training data.
        max_tokens: Number of tokens after which EOS is forced.
    """
    model, task = source
    options = argparse.Namespace(beam=BEAM, min_len=0, max_len_b=max_tokens)
    generator = task.build_generator([model], options)
    tokens = [encoded(task.source_dictionary, line) for line in lines]
    order = sorted(range(len(lines)), key=lambda number: len(tokens[number]))
    hypotheses: dict[int, Hypothesis] = {}
    for start in range(0, len(order), _BATCH):
        numbers = order[start : start + _BATCH]
        rows = [tokens[number] for number in numbers]
        inputs = {
            "src_tokens": collate_tokens(rows, task.source_dictionary.pad(), left_pad=True),
            "src_lengths": torch.tensor([len(row) for row in rows]),
        }
        results = task.inference_step(generator, [model], {"net_input": inputs})
        for number, (best, *_) in zip(numbers, results, strict=True):
            words = tuple(task.target_dictionary[index] for index in best["tokens"][:-1])
            ended = len(words) < max_tokens
            hypotheses[number] = Hypothesis(words, best["score"].item(), ended)
    return [hypotheses[number] for number in range(len(lines))]


@torch.no_grad()
def score(source: Source, lines: Sequence[str]) -> list[list[float]]:
    """Natural log-probabilities of the tokens of each line and of EOS, from a language model that
    starts with :func:`start_of`."""
    model, task = source
    scores = []
    for line in lines:
        tokens = encoded(task.source_dictionary, line)
        start = tokens.new_tensor([task.source_dictionary.index(start_of(source))])
        logits, _ = model(torch.cat((start, tokens[:-1]))[None])
        scores.append(logits[0].log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist())
    return scores


def start_of(source: Source) -> str:
    """The symbol that a language model begins with, in training and in generation."""
    symbols = source.task.target_dictionary
    return symbols[symbols.bos() if source.task.args.add_bos_token else symbols.eos()]

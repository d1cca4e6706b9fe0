"""Stores two more facts about a model in a checkpoint: all position settings, and digests of the
dictionaries. Both are compared when the checkpoint is used again.

fairseq stores the arguments of the model, but does not check whether a resumed training has other
arguments. fairseq stores only the number of symbols of a dictionary.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from typing import Any

from fairseq import checkpoint_utils, models
from fairseq.data import Dictionary
from fairseq.file_io import PathManager
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.trainer import Trainer
from torch import Tensor, nn

from cape_plugins import PositionConfig
from cape_plugins.checkpoints.fairseq_files import DICTIONARIES, fairseq_arguments, fairseq_config
from cape_plugins.checkpoints.families import DECODER_FIELD
from cape_plugins.settings.arguments import PREFIX, TYPE_ARG, flag, option_flag
from cape_plugins.settings.config import option_fields
from cape_plugins.settings.options import COUNTED
from fairseq_user_dir.flags import ALLOW_ARG, ALLOW_FLAG, DECODER_PREFIX, record
from fairseq_user_dir.host.errors import SettingsError, named_by_flags
from fairseq_user_dir.host.reading import read_checkpoint

logger = logging.getLogger(__name__)

_OLD_TABLES = ("embed_positions.weights", "embed_positions._float_tensor")
_RESUMING = ", by --restore-file, or delete the file to start anew"
# Parts of the names of positional parameters, and the flags that decide whether a model has them.
_PARTS = {
    "embed_positions.weight": "--position-embedding, --max-source-positions and the like",
    ".positions.encoding.": "--position-embedding",
    "embed_positions.encoder.encoding.": "--position-learned-table and --position-max-position",
    ".relative.": "--position-relative-context, -values and -heads, and --position-layers",
    ".layer_bias.": "--position-embedding and --position-layers",
    ".admin.": "--admin-init",
}
# Fine-tuning may change positions, but not ADMIN's omegas, which belong to the weights.
_SWITCHED_PARTS = [part for part in _PARTS if part != ".admin."]


def watch_checkpoints() -> None:
    """Wraps fairseq's functions with the checks of this module; a second call changes nothing."""
    if hasattr(Trainer.load_checkpoint, "__wrapped__"):
        return
    models.build_model = _with_record(models.build_model)
    FairseqTask.state_dict = _with_marks(FairseqTask.state_dict)
    FairseqTask.load_state_dict = _with_check_of_marks(FairseqTask.load_state_dict)
    Trainer.load_checkpoint = _with_comparison(Trainer.load_checkpoint)
    checkpoint_utils.load_checkpoint_to_cpu = _checked(checkpoint_utils.load_checkpoint_to_cpu)


# --------------------------------------------------------------------------------------- reading


def _checked(stock: Any) -> Any:
    @functools.wraps(stock)
    def load_checkpoint_to_cpu(
        path: str, arg_overrides: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        local_path = PathManager.get_local_path(path)
        if os.path.isfile(local_path):  # the stock function names a missing file
            # before the stock function, which lets omegaconf evaluate the settings
            state = read_checkpoint(local_path)
            if arg_overrides and TYPE_ARG in arg_overrides:
                arg_overrides = _own_defaults(fairseq_arguments(state), arg_overrides)
            del state  # the stock function loads the file again: one copy in memory at a time
        return stock(path, arg_overrides, *args, **kwargs)

    return load_checkpoint_to_cpu


def _own_defaults(stored: Mapping[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Lets a changed type begin with its defaults, not with the stored options of the old type."""
    if stored.get(TYPE_ARG) in (None, overrides[TYPE_ARG]):
        return overrides
    decoder_has_type = "type" in (stored.get(DECODER_FIELD) or {})
    # None stands for the default of the new type; a decoder with a separate type keeps its options
    unset = dict.fromkeys(
        name
        for name in stored
        if name.startswith(PREFIX)
        and name != TYPE_ARG
        and not (decoder_has_type and name.startswith(DECODER_FIELD))
    )
    if "no_token_positional_embeddings" in stored:  # the value that the stored type needed
        unset["no_token_positional_embeddings"] = False
    return {**unset, **overrides}


# ------------------------------------------------------------------------------ position settings


def position_config(model: nn.Module) -> PositionConfig | None:
    """Settings of a built model; None for a stock model."""
    for part in (model, getattr(model, "encoder", None)):
        if isinstance(config := getattr(part, "position_config", None), PositionConfig):
            return config
    return None


def _decoder_config(model: nn.Module) -> PositionConfig | None:
    """Settings of a decoder that does not share the settings of its encoder."""
    config = getattr(getattr(model, "decoder", None), "position_config", None)
    is_separate = (
        config is not None and config.architecture == "decoder" and hasattr(model, "encoder")
    )
    return config if is_separate else None


def _with_record(stock: Any) -> Any:
    """Writes the position settings into the settings that fairseq stores. A model that is
    configured with a dataclass is built from a copy of these settings, so the model cannot write
    into the settings itself."""

    @functools.wraps(stock)
    def build_model(cfg: Any, *args: Any, **kwargs: Any) -> Any:
        model = stock(cfg, *args, **kwargs)
        if (config := position_config(model)) is not None:
            record(cfg, config)
        return model

    return build_model


def changed_settings(
    stored: PositionConfig, current: PositionConfig, prefix: str = PREFIX
) -> list[str]:
    """Differences, named as flags: ``--position-max-global-shift 5.0 (now 7.0)``."""
    if stored.type != current.type:
        return [f"{option_flag(TYPE_ARG, prefix)} {stored.type} (now {current.type})"]
    values = [
        (option.name, getattr(stored, option.name), getattr(current, option.name))
        for option in option_fields("text")
    ]
    return [
        f"{option_flag(name, prefix)} {str(old).lower()} (now {str(new).lower()})"
        for name, old, new in values
        if old != new and not (name == "source_scale" and _same_ratio(old, new))
    ]


def _same_ratio(old: str, new: str) -> bool:
    # 3/2 and 1.5 are one alpha; auto is no number
    return not COUNTED.keys() & {old, new} and Fraction(old) == Fraction(new)


def _compare(path: str, state: Mapping[str, Any], trainer: Trainer, resuming: bool) -> None:
    """Stops a resumed training with position settings that differ from the checkpoint."""
    stored_arguments, model = fairseq_arguments(state), trainer._model
    current = position_config(model)
    if current is None and TYPE_ARG not in stored_arguments:
        return  # two stock models
    if current is None:  # a stock model that goes on from a cape checkpoint
        arguments = fairseq_arguments({"cfg": {"model": trainer.cfg.model}})
        current = fairseq_config(arguments, model.state_dict())
    with named_by_flags(f"{path}: "):
        trained = fairseq_config(stored_arguments, state["model"])
    if (trained.domain, trained.architecture) != (current.domain, current.architecture):
        return  # a model of another kind; its weights do not fit
    differences = changed_settings(trained, current)
    decoder = _decoder_config(model)
    if decoder is not None and trained.type == current.type:
        with named_by_flags(f"{path}: "):
            before = fairseq_config(stored_arguments, state["model"], "decoder")
        differences += changed_settings(before, decoder, DECODER_PREFIX)
    changes = "; ".join(differences)
    if not changes:
        return
    if not resuming or getattr(trainer.cfg.model, ALLOW_ARG, False):
        logger.warning("%s was trained with other position settings: %s", path, changes)
        return
    raise SettingsError(
        f"{path} was trained with other position settings: {changes}. Resume with the settings of "
        f"the checkpoint, insist with {ALLOW_FLAG} (hydra: +model.{ALLOW_ARG}=true), or start a "
        "new training from its weights by --finetune-from-model with another --save-dir."
    )


def _with_comparison(stock: Any) -> Any:
    @functools.wraps(stock)
    def load_checkpoint(
        self: Trainer, filename: str, reset_optimizer: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        # fairseq resets the optimizer for --finetune-from-model, and refuses --reset-optimizer
        # beside this option. If --save-dir has a checkpoint already, fairseq resumes from that one.
        finetuning = reset_optimizer and filename == self.cfg.checkpoint.finetune_from_model
        if os.path.isfile(filename):
            # each rank reads for itself: if only one rank stopped, the others would wait for ever
            state = read_checkpoint(filename, _RESUMING)
            _compare(filename, state, self, resuming=not reset_optimizer)
            if not getattr(self.cfg.model, ALLOW_ARG, False):
                _check_marks(self.task, state.get("task_state"), filename)
            del state
        try:
            with _switched_positions(self._model) if finetuning else nullcontext():
                return stock(self, filename, reset_optimizer, *args, **kwargs)
        except Exception as error:
            # fairseq hides all reasons behind "please ensure that the architectures match"
            if isinstance(error.__context__, SettingsError):
                raise error.__context__ from None
            raise

    return load_checkpoint


# ------------------------------------------------------------------------------------- parameters


class PositionalModel:
    """Mixin over the class of a fairseq model: checks the positional parameters that a model loads.

    Attributes:
        switches_positions: True while a fine-tuning loads the checkpoint of another training.
    """

    switches_positions = False

    def upgrade_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Refuses a checkpoint with another kind of positions, and gives a reason. Drops the
        sinusoid tables that old fairseq versions stored, as in the stock model."""
        for name in [n for n in state_dict if n.endswith(_OLD_TABLES)]:
            del state_dict[name]
        if self.switches_positions:
            _switch_parameters(state_dict, self.state_dict())
        check_state_dict(state_dict, self)
        super().upgrade_state_dict(state_dict)


@contextmanager
def _switched_positions(model: nn.Module) -> Iterator[None]:
    """Lets a :class:`PositionalModel` take weights from a model with other positions."""
    model.switches_positions = True
    try:
        yield
    finally:
        del model.switches_positions


def _switch_parameters(
    state_dict: dict[str, Tensor], model_parameters: Mapping[str, Tensor]
) -> None:
    """Leaves out positional parameters of a checkpoint that the model does not have. Adds
    positional parameters that the checkpoint lacks, with the initial values of the model."""
    left_out, fresh = (
        [n for n in some if n not in others and any(part in n for part in _SWITCHED_PARTS)]
        for some, others in ((state_dict, model_parameters), (model_parameters, state_dict))
    )
    for name in left_out:
        del state_dict[name]
    state_dict.update((name, model_parameters[name]) for name in fresh)
    for names, what in ((left_out, "of the checkpoint are left out"), (fresh, "start anew")):
        if names:
            logger.info("%d parameters of positions %s: %s", len(names), what, ", ".join(names))


def check_state_dict(state_dict: Mapping[str, Tensor], model: nn.Module) -> None:
    """Compares the positional parameters of a checkpoint with the parameters of the model.

    Raises:
        SettingsError: names the difference, the flags of the model and what to do.
    """
    model_parameters = model.state_dict()
    for part, flags in _PARTS.items():
        theirs = {name: value for name, value in state_dict.items() if part in name}
        ours = {name: value for name, value in model_parameters.items() if part in name}
        if bool(ours) != bool(theirs):
            has, has_not = ("this model", "the checkpoint")
            if theirs:
                has, has_not = has_not, has
            _refuse(model, f"{has} has parameters '*{part}*', {has_not} has none", flags)
        for name, value in ours.items():
            if name not in theirs:
                _refuse(model, f"the checkpoint lacks the parameter {name} of this model", flags)
            if theirs[name].shape != value.shape:
                shapes = f"{tuple(theirs[name].shape)} in the checkpoint, {tuple(value.shape)} here"
                _refuse(model, f"{name} has shape {shapes}", flags)


def _refuse(model: nn.Module, what: str, flags: str) -> None:
    config = position_config(model)
    raise SettingsError(
        f"{what}: checkpoint and model have different settings of {flags}. This model has "
        f"{flag(TYPE_ARG)} {config.type} {flag(PREFIX + 'relative_context')} "
        f"{config.relative_context}; give the settings that the checkpoint was trained with. To "
        "switch the positions of a trained model, start a new training from its weights by "
        "--finetune-from-model with another --save-dir."
    )


# ----------------------------------------------------------------------------------- dictionaries


def dictionary_marks(task: FairseqTask) -> dict[str, list[Any]]:
    """Number of symbols and a digest of the symbols in order, for each side with a dictionary."""
    marks = {}
    for side in ("source", "target"):
        try:
            dictionary = getattr(task, f"{side}_dictionary")
        except (AttributeError, LookupError, NotImplementedError):
            continue  # a task without this dictionary, or with several languages
        if isinstance(dictionary, Dictionary):
            digest = hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()[:16]
            marks[side] = [len(dictionary), digest]
    return marks


def _check_marks(task: FairseqTask, state: Mapping[str, Any] | None, where: str) -> None:
    """Refuses a dictionary of the same size with other symbols, or with symbols in another order.
    If sizes differ, fairseq stops with an error, or adds or drops rows of the embeddings (BART)."""
    marks = dictionary_marks(task)
    for side, (size, digest) in ((state or {}).get(DICTIONARIES) or {}).items():
        if side in marks and marks[side][0] == size and marks[side][1] != digest:
            raise SettingsError(
                f"{where} was trained with other units than this {side} dictionary, or in another "
                f"order; both have {size} units, so the embeddings would belong to other words. "
                f"Give the data folder with the dictionary of training{_not(task)}."
            )


def _not(task: FairseqTask) -> str:
    settings = getattr(task, "cfg", None) or getattr(task, "args", None)
    data = getattr(settings, "data", None)
    return f", not {data}" if data else ""


def _with_marks(stock: Any) -> Any:
    @functools.wraps(stock)
    def state_dict(self: FairseqTask) -> dict[str, Any]:
        return {**stock(self), DICTIONARIES: dictionary_marks(self)}

    return state_dict


def _with_check_of_marks(stock: Any) -> Any:
    @functools.wraps(stock)
    def load_state_dict(self: FairseqTask, state_dict: dict[str, Any]) -> None:
        _check_marks(self, state_dict, "the checkpoint")
        rest = {name: value for name, value in state_dict.items() if name != DICTIONARIES}
        stock(self, rest)

    return load_state_dict

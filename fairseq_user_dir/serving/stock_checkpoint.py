"""Stock checkpoints of models trained in fairseq: the stock architecture with a learned table
instead of computed positions. Stock checkpoints can be used without this package."""

from __future__ import annotations

import argparse
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq import utils
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.models.nat import FairseqNATModel
from omegaconf import OmegaConf
from torch import Tensor, nn

from cape_plugins.serving.checks import refuse_large_table
from cape_plugins.serving.command import SHORTEST
from cape_plugins.serving.ctranslate2_tables import missing_in_engine
from cape_plugins.serving.output import Exported
from cape_plugins.serving.templates import fill
from cape_plugins.settings.arguments import FAIRSEQ, PREFIX, TYPE_ARG
from fairseq_user_dir.checkpoints import position_config
from fairseq_user_dir.flags import ALLOW_ARG
from fairseq_user_dir.models import CLASSES
from fairseq_user_dir.serving.folding import folded, width_of
from fairseq_user_dir.serving.layouts import write_hugging_face
from fairseq_user_dir.serving.source_checkpoint import load_trained

TEMPLATE = Path(__file__).with_name("stock_checkpoint.md")
FILE = "model.pt"
# Allowed difference of logits, relative to the largest logit, or to 1 if all logits are smaller;
# float32 rounding over many layers gives less.
CLOSE = 1e-3
_OWN_ARGS = (TYPE_ARG, ALLOW_ARG, "admin_init", "admin_profiled", "user_dir")
_PATHS = ("data", "user_dir", "save_dir", "restore_file", "tensorboard_logdir", "log_file")


class Trained(NamedTuple):
    """A checkpoint of fairseq.

    Attributes:
        model: Model in evaluation mode.
        cfg: The whole configuration.
        task: Task of the model, with dictionaries.
        stock: Name of the stock model.
        data: Folder of the dictionaries.
    """

    model: Any
    cfg: dict[str, Any]
    task: Any
    stock: str
    data: Path


def export(source: Path, folder: Path, args: argparse.Namespace) -> Exported:
    """Writes a stock checkpoint of fairseq with dictionaries, or with ``--to hugging-face`` a
    folder of transformers.

    Args:
        source: Checkpoint of a ``cape_`` architecture.
        folder: Empty folder.
        args: Arguments of ``cape-plugins export stock``.

    Raises:
        ValueError: for a model without a stock form, naming the reason and a way that works, and
            for missing dictionaries.
    """
    if args.image_size:
        raise ValueError(
            f"--image-size {' '.join(map(str, args.image_size))} is not allowed for a model of "
            "fairseq, which reads tokens; allowed: --max-tokens."
        )
    trained = load(source, args.data)
    if args.to not in (None, FAIRSEQ):
        return _to_hugging_face(trained, folder, args.max_tokens)
    rows = table_rows(trained, args.max_tokens)
    plain = folded(trained.model, *rows.values())
    for file in sorted(trained.data.glob("dict*.txt")):
        shutil.copy(file, folder)
    torch.save(_state(trained, plain, rows), folder / FILE)
    difference = _compare(trained, folder)
    report = (
        f"{FILE}: {trained.stock} of fairseq, logits on random tokens within {difference:.1e} of "
        f"{source.name}"
    )
    return Exported(_readme(trained, plain, rows), report)


def _to_hugging_face(trained: Trained, folder: Path, limit: int | None) -> Exported:
    dictionary = trained.task.target_dictionary
    if dictionary != trained.task.source_dictionary:
        raise ValueError(
            "--to hugging-face has no stock class for two dictionaries; allowed: one shared by "
            "both sides (fairseq-preprocess --joined-dictionary). Leave --to out for a stock "
            "checkpoint of fairseq, or use `cape-plugins export ctranslate2`."
        )
    rows = max(table_rows(trained, limit).values())
    plain = folded(trained.model, rows, rows)
    return write_hugging_face(plain, trained.cfg["model"], dictionary, rows, folder)


def load(source: Path, data: str | None) -> Trained:
    """Loads a checkpoint of a model with a stock form.

    Raises:
        ValueError: for a model without a stock form, and for missing dictionaries.
    """
    model, cfg, task = load_trained(source, data)
    stock = next((name for name, cape_class in CLASSES.items() if type(model) is cape_class), None)
    config = position_config(model)
    if stock is None and config is None:
        raise ValueError(
            f"SOURCE {source} is a stock {type(model).__name__} already, which does not need this "
            "package; allowed: cape_ architectures."
        )
    if stock is None or isinstance(model, FairseqNATModel):
        raise ValueError(
            f"SOURCE {source} is a {type(model).__name__}, whose stock class has no place for a "
            "table; allowed: translation and language models (cape_transformer, "
            "cape_transformer_lm). Serve it with fairseq-generate and this package, or train "
            "speech as a Hugging Face model and export that model."
        )
    if config.in_attention:
        part = f"position embedding {config.type!r} in attention"
        if config.relative_context:
            part = f"relative attention (context {config.relative_context})"
        remedy = "`cape-plugins export ctranslate2` takes it"
        if missing_in_engine(config, hasattr(model, "encoder")):
            remedy = "fairseq-generate serves it with this package"
        raise ValueError(
            f"SOURCE {source} has {part}, which no stock model has; allowed: types that add to "
            f"the token embeddings, or nopos. {remedy}."
        )
    data_folder = Path(utils.split_paths(data or cfg.task.data)[0])
    container = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)
    sections = {
        name: _with_attributes(vars(part)) if isinstance(part, argparse.Namespace) else part
        for name, part in container.items()
    }
    # if the command line named no languages, fairseq has found them by the names of the binarised
    # texts, and stored them in the task only
    languages = {
        name: getattr(task.cfg, name)
        for name in ("source_lang", "target_lang")
        if hasattr(task.cfg, name)
    }
    for name in ("task", "model"):
        sections[name] = _changed(sections[name], languages)
    return Trained(model, sections, task, stock, data_folder)


def table_rows(trained: Trained, limit: int | None) -> dict[str, int]:
    """Numbers of positions to write for "source" and "target": `limit`, or as many as a stock model
    with these settings has.

    Raises:
        ValueError: for more positions than memory can hold.
    """
    args, sides = trained.cfg["model"], ("source", "target")
    names = {side: f"max_{side}_positions" for side in sides}
    unset = args.get("tokens_per_sample") or 1024  # tokens_per_sample: language models
    rows = {side: limit or args.get(name) or unset for side, name in names.items()}
    for count in rows.values():
        refuse_large_table("--max-tokens", count, width_of(trained.model.decoder))
    return rows


# ---- the checkpoint ------------------------------------------------------------------------------


def _state(trained: Trained, plain: nn.Module, rows: dict[str, int]) -> dict[str, Any]:
    """The entries that fairseq stores for a model, without the entries of this package."""
    limits = {f"max_{side}_positions": count for side, count in rows.items()}
    general = {**limits, **dict.fromkeys(_PATHS)}
    cfg = {
        name: _changed(part, general) if isinstance(part, dict) else part
        for name, part in trained.cfg.items()
    }
    cfg["task"] = _changed(cfg["task"], {"data": "."})
    cfg["model"] = _stock_arguments(trained, plain, limits)
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}
    # without the dictionary marks of this package, which stock tasks do not know
    return {
        "args": None,
        "cfg": cfg,
        "model": plain.state_dict(),
        "optimizer_history": [{**history, "num_updates": 0}],
        "extra_state": {"train_iterator": {"epoch": 1}},
    }


def _stock_arguments(trained: Trained, plain: nn.Module, limits: dict[str, int]) -> dict[str, Any]:
    """Arguments of the stock model."""
    arguments = trained.cfg["model"]
    own_arguments = [name for name in arguments if name.startswith(PREFIX) or name in _OWN_ARGS]
    learned = {f"{side}_learned_pos": True for side in ("encoder", "decoder")}
    names = {"arch": trained.stock, "_name": trained.stock, "data": "."}
    changes = {**learned, **limits, **_sharing(plain), **names, **dict.fromkeys(_PATHS[1:])}
    return _changed(arguments, changes, without=own_arguments)


def _changed(
    part: dict[str, Any], changes: dict[str, Any], without: Sequence[str] = ()
) -> dict[str, Any]:
    """A copy of `part`, with the changes for the names in `part`."""
    copy = {name: changes.get(name, value) for name, value in part.items() if name not in without}
    return _with_attributes(copy) if isinstance(part, OrderedDict) else copy


def _with_attributes(entries: dict[str, Any]) -> OrderedDict[str, Any]:
    """A dictionary with all entries as attributes, instead of a Namespace: torch loads a dictionary
    with ``weights_only``, the default, and commands of fairseq and ctranslate2 read attributes."""
    part = OrderedDict(entries)
    part.__dict__.update(entries)
    return part


def _sharing(plain: nn.Module) -> dict[str, bool]:
    """The flags of shared embeddings. Input embeddings that were scaled by ADMIN are copies, which
    are shared no longer."""
    decoder = plain.decoder
    projection = getattr(decoder, "output_projection", None)
    embedding = getattr(decoder.embed_tokens, "weight", None)
    if projection is None or embedding is None:  # adaptive softmax or input, which do not change
        return {}
    flags = {"share_decoder_input_output_embed": projection.weight is embedding}
    if hasattr(plain, "encoder"):
        everywhere = (
            plain.encoder.embed_tokens.weight is embedding and projection.weight is embedding
        )
        flags["share_all_embeddings"] = everywhere
    return flags


@torch.no_grad()
def _compare(trained: Trained, folder: Path) -> float:
    """Largest difference of the logits of both models on random tokens. The stock model is loaded
    from the folder, in the way that a user loads it.

    Raises:
        ValueError: if the stock model computes something else.
    """
    (stock,), _, _ = load_model_ensemble_and_task([str(folder / FILE)], {"data": str(folder)})
    dictionary = trained.task.target_dictionary
    first = dictionary.nspecial
    generator = torch.Generator().manual_seed(1)
    source, target = (
        torch.randint(first, len(symbols), (2, SHORTEST - 1), generator=generator)
        for symbols in (trained.task.source_dictionary, dictionary)
    )
    expected = _logits(trained.model, source, target)
    got = _logits(stock.eval(), _with_hint(trained.model, source), target)
    difference = (expected - got).abs().max().item()
    if not difference <= CLOSE * max(1.0, expected.abs().max().item()):
        raise ValueError(
            f"the stock {trained.stock} gives other logits than the model (by {difference:.3g}): "
            "the model has a part that the stock class computes differently. Serve it by "
            "fairseq-generate with this package."
        )
    return difference


def _logits(model: Any, source: Tensor, target: Tensor) -> Tensor:
    if not hasattr(model, "encoder"):
        return model(target)[0]
    lengths = torch.full((len(source),), source.shape[1])
    return model(source, lengths, target)[0]


def _with_hint(model: Any, source: Tensor) -> Tensor:
    """The source as a stock model has to get it, with the BOS hint."""
    if not has_hint(model):
        return source
    bos = source.new_full((len(source), 1), model.encoder.dictionary.bos())
    return torch.cat((bos, source), dim=1)


def has_hint(model: Any) -> bool:
    """Whether BOS belongs before the source."""
    return hasattr(model, "encoder") and model.position_config.source_bos


# ---- the README ----------------------------------------------------------------------------------


def _readme(trained: Trained, plain: nn.Module, rows: dict[str, int]) -> str:
    task, translation = trained.cfg["task"], hasattr(plain, "encoder")
    hint = has_hint(trained.model)
    bos = task.get("add_bos_token")
    sides = ("source", "target") if translation else ("target",)
    return fill(
        TEMPLATE,
        stock=trained.stock,
        file=FILE,
        trained=trained.model.position_config.type,
        table=plain.decoder.embed_positions is not None,
        translation=translation,
        hint=hint,
        before="<s> " if hint else "",
        source_lang=task.get("source_lang"),
        target_lang=task.get("target_lang"),
        start="`<s>` (`--add-bos-token`)" if bos else "`</s>`",
        first="bos" if bos else "eos",
        source_rows=rows["source"],
        target_rows=rows["target"],
        limits=" ".join(f"--max-{side}-positions {rows[side]}" for side in sides),
    )

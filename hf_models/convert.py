"""Stock checkpoints to cape checkpoints and back, without training.

    python -m hf_models.convert Helsinki-NLP/opus-mt-en-de opus-cape \\
        --position-embedding cape --position-source-scale 1.05
    python -m hf_models.convert google/vit-base-patch16-224 vit-cape --position-embedding cape
    python -m hf_models.convert vit-cape vit-stock --stock

Weights, configuration, tokenizer and processor files go to a new folder.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers import AutoConfig, PreTrainedModel

import hf_models
from cape_plugins import patch_positions
from cape_plugins.arguments import TYPE_ARG, add_position_args, given_settings
from cape_plugins.registry import DEFAULT_TYPE
from hf_models.configuration import FIELD
from hf_models.export import make_self_contained

# What the result has of its own, and what belongs to a training that has ended.
LEFT_BEHIND = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.ckpt", "*.ot", "*.onnx"),
    *("*.index.json", "config.json", "README.md", "trainer_state.json", ".*", "*.py"),
)


def convert(
    source: str, target: str | os.PathLike[str], settings: dict[str, Any] | None
) -> PreTrainedModel:
    """Writes the checkpoint `source` to the new folder `target` with another position embedding.

    Args:
        source: Folder or hub name of a stock or cape checkpoint.
        target: Folder that does not exist yet.
        settings: ``{"type": ..., option: value}``; None for the stock model.

    Returns:
        The model that was written.

    Raises:
        ValueError: if the family is unknown, a setting is wrong, or the stock model would not give
            the same output.
    """
    target = Path(target)
    if target.exists():
        raise ValueError(f"{target} exists already; give a new folder, or remove this one first.")
    name = _architecture(source)
    if settings is None:
        model = _stock_model(source, name)
    else:
        model = _cape_model(source, name, settings)
    # complete or not at all
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _copy_other_files(source, partial)
        model.save_pretrained(partial)
        partial.chmod(0o755)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return model


def _architecture(source: str) -> str:
    """Name of the stock class that a checkpoint was saved by."""
    config = AutoConfig.from_pretrained(source)
    saved = (config.architectures or [""])[0]
    name = saved.removeprefix("Cape")
    if not hasattr(hf_models, f"Cape{name}"):
        known = sorted(n.removeprefix("Cape") for n in hf_models.MODELS)
        raise ValueError(
            f"{source} holds a {saved or 'model without architecture'} (model type "
            f"{config.model_type!r}), which has no cape counterpart; known: {', '.join(known)}."
        )
    return name


def _cape_model(source: str, name: str, settings: dict[str, Any]) -> PreTrainedModel:
    cape_class = getattr(hf_models, f"Cape{name}")
    model, report = cape_class.from_pretrained(
        source, position_embedding=settings, output_loading_info=True, dtype="auto"
    )
    for key in sorted(report["missing_keys"]):
        print(f"new, not trained yet: {key}")
    embeddings = getattr(model.base_model, "embeddings", None)
    if hasattr(embeddings, "cls_token") and embeddings.position_embeddings is None:
        table = _tensor(source, getattr(transformers, name), "position_embeddings")
        if table is not None:
            # the class token keeps what it has learnt in its own row of the table
            with torch.no_grad():
                embeddings.cls_token += table[:, :1]
    return model


def _stock_model(source: str, name: str) -> PreTrainedModel:
    cape = getattr(hf_models, f"Cape{name}").from_pretrained(source, dtype="auto").eval()
    embeddings = getattr(cape.base_model, "embeddings", None)
    settings = cape.config.to_dict()
    reasons = []
    for field in cape.config.position_fields:
        config = cape.config.position_settings(field)
        changed = {
            "alpha": config.source_scale != "1",
            "the BOS hint": config.source_bos,
            "relative attention": bool(config.relative_context),
        }
        if embeddings is None:
            changed["mean-normalised positions"] = config.mean_normalize
            changed[f"position embedding {config.type!r}"] = config.encoding != "sinusoid"
        reasons += [f"{reason} ({field})" for reason, present in changed.items() if present]
        del settings[field]
    if reasons:
        raise ValueError(
            f"{source} cannot become a stock {name}: its output depends on {', '.join(reasons)}, "
            "which the stock model does not have. Keep the cape checkpoint."
        )
    for own in ("model_type", "hop_seconds", "window_seconds", "drop_path_rate"):
        settings.pop(own, None)
    stock_class = getattr(transformers, name)
    stock = stock_class(stock_class.config_class(**settings)).to(cape.dtype)
    weights = cape.state_dict()
    if embeddings is not None and embeddings.position_embeddings is None:
        weights[_name_of_table(stock)] = _baked_table(embeddings, cape.config.position_config.gamma)
    own = {k: v for k, v in stock.state_dict().items() if "embed_positions" in k}
    stock.load_state_dict({**own, **weights})
    return stock


@torch.no_grad()
def _baked_table(embeddings: Any, gamma: float) -> torch.Tensor:
    """``[1, 1 + patches, C]``: the sinusoids of the image size of the configuration."""
    patches = embeddings.positions(patch_positions(*embeddings.table_size, gamma=gamma))
    shape = (
        1,
        1 + embeddings.table_size[0] * embeddings.table_size[1],
        embeddings.cls_token.shape[-1],
    )
    table = torch.zeros(shape)
    if patches is not None:
        table[:, 1:] = patches
    return table.to(embeddings.cls_token.dtype)


def _name_of_table(stock: PreTrainedModel) -> str:
    return next(name for name in stock.state_dict() if name.endswith("position_embeddings"))


def _tensor(source: str, stock_class: Any, ending: str) -> torch.Tensor | None:
    """A parameter of a stock checkpoint; None if `source` is no stock checkpoint."""
    if hasattr(AutoConfig.from_pretrained(source), FIELD):
        return None
    state = stock_class.from_pretrained(source).state_dict()
    return next(value for name, value in state.items() if name.endswith(ending))


def _copy_other_files(source: str, target: Path) -> None:
    folder = (
        source
        if os.path.isdir(source)
        else snapshot_download(source, ignore_patterns=[*LEFT_BEHIND])
    )
    shutil.copytree(
        folder,
        target,
        dirs_exist_ok=True,
        ignore=lambda path, names: {
            *shutil.ignore_patterns(*LEFT_BEHIND)(path, names),
            *(name for name in names if os.path.isdir(os.path.join(path, name))),
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command; ends with status 2 and one line if something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_models.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SRC", help="folder or hub name of a checkpoint")
    parser.add_argument("target", metavar="DST", help="new folder")
    parser.add_argument("--stock", action="store_true", help="write a stock checkpoint")
    parser.add_argument(
        "--self-contained",
        action="store_true",
        help="also write the code of the model, so that the folder loads without this package by "
        "trust_remote_code=True",
    )
    add_position_args(parser, "image")
    args = parser.parse_args(argv)
    given = given_settings(args, "image")
    position_type = getattr(args, TYPE_ARG)
    if args.stock and (position_type or given or args.self_contained):
        parser.error(
            "--stock writes a stock checkpoint: leave out --position-... and --self-contained"
        )
    if not args.stock:
        given["type"] = position_type or DEFAULT_TYPE
    try:
        model = convert(args.source, args.target, None if args.stock else given)
        if args.self_contained:
            make_self_contained(args.target)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {type(model).__name__} to {args.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Loads checkpoints as a whole, with clear errors for checkpoints that do not load."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedModel

from cape_plugins.checkpoints.fairseq_files import reason
from cape_plugins.serving.checks import refuse_not_finite


@contextmanager
def clear_errors(source: str) -> Iterator[None]:
    """Turns errors of transformers about damaged or unfit files into clear errors. The block must
    hold the loading alone, because an error of other code would blame the checkpoint. A lack of
    memory passes unchanged, because the checkpoint is not at fault.

    Args:
        source: Folder or hub name of the checkpoint.

    Raises:
        ValueError: names the checkpoint, the fault and the remedy.
    """
    try:
        yield
    except StrictDataclassError as error:
        problem = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"the configuration of {source} is not allowed: {problem}. Correct its config.json."
        ) from error
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        # on a CPU a lack of memory has no special class
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            raise
        raise ValueError(
            f"the weights of {source} cannot be read ({reason(error)}); they are damaged, "
            "incomplete or of another model. Save, copy or download them again."
        ) from error
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            f"the configuration of {source} builds no model ({type(error).__name__}: {error}). "
            "Compare its config.json with the config.json of a model that loads."
        ) from error


def require_place(source: str) -> None:
    """Refuses a path without a folder, which transformers would look up on the hub.

    Raises:
        ValueError: names the path.
    """
    if not os.path.exists(source) and (source[:1] in "./~" or source.count("/") > 1):
        raise ValueError(f"{source}: no such folder; check the path.")


# Parameters that depend on the position embedding.
_POSITIONS = re.compile(r"\.relative\.|\.layer_bias\.|\bpositions\.|position_embeddings")


def load_whole(model_class: Any, source: str, **fields: Any) -> tuple[PreTrainedModel, list[str]]:
    """A model with every weight of its checkpoint, in the stored precision.

    Args:
        model_class: Class of this package or of transformers.
        source: Folder or hub name of a checkpoint.
        fields: Fields of the configuration to change, such as the position embedding.

    Returns:
        the model, and the names of positional parameters that are not in the checkpoint.

    Raises:
        ValueError: if a weight is missing, has another shape or is not finite.
    """
    model, report = model_class.from_pretrained(
        source,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        dtype="auto",
        **fields,
    )
    if report["mismatched_keys"]:
        sizes = (f"{key} {(*a,)} for {(*b,)}" for key, a, b in report["mismatched_keys"])
        raise ValueError(
            f"the weights of {source} do not fit its config.json: {'; '.join(sizes)}. Take weights "
            "and config.json from one model."
        )
    new = sorted(report["missing_keys"])
    lacking = [key for key in new if not _POSITIONS.search(key)]
    if lacking:
        others = f" and {len(lacking) - 1} others" if len(lacking) > 1 else ""
        raise ValueError(
            f"the weights of {source} are not complete: config.json asks for {lacking[0]}{others}, "
            "too. Take weights and config.json from one model."
        )
    refuse_not_finite(model, source)
    return model, new

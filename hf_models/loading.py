"""Clear errors for checkpoints that do not load."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError


@contextmanager
def clear_errors(source: str) -> Iterator[None]:
    """Turns what transformers raises for damaged or unfit files into errors that say so.

    Args:
        source: Folder or hub name of the checkpoint.

    Raises:
        ValueError: naming the checkpoint, what is wrong with it, and what to do.
    """
    try:
        yield
    except StrictDataclassError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the configuration of {source} is not allowed: {reason}. Correct its config.json."
        ) from None
    except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"the weights of {source} cannot be read ({reason}); they are damaged, incomplete or "
            "of another model. Save, copy or download them again."
        ) from None
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            f"the configuration of {source} builds no model ({type(error).__name__}: {error}). "
            "Compare its config.json with that of a model that loads."
        ) from None

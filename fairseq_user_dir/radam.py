"""The optimizer ``radam`` of the translation recipes that the CAPE paper follows (appendix D.1).

The optimizer is torch's rectified Adam after Liu et al. (ICLR 2020, algorithm 2), with decoupled
weight decay, as in fairseq's ``adam``. The first five updates are momentum steps, as in Liu et al.;
the optimizer of Transformer-Clinic, the code of ADMIN, takes no steps in these updates. The
difference is small, because the learning rate is below 1e-6 there. The flags have the names of the
flags of ``adam``, as in the recipes of Transformer-Clinic, so commands of these recipes need no
change.
"""

# Without `from __future__ import annotations`: fairseq needs the types of a dataclass, not their
# names.
import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, List  # noqa: UP035

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II, OmegaConf

from fairseq_user_dir.host.errors import SettingsError


@dataclass
class RAdamConfig(FairseqDataclass):
    """Options of ``--optimizer radam``, with the defaults of ``adam``."""

    adam_betas: Any = field(
        default=(0.9, 0.999), metadata={"help": "decay of the two running means, in [0, 1)"}
    )
    adam_eps: float = field(default=1e-8, metadata={"help": "added to the denominator"})
    weight_decay: float = field(
        default=0.0,
        metadata={"help": "share of the weights that an update subtracts, times the learning rate"},
    )
    lr: List[float] = II("optimization.lr")  # noqa: UP006, RUF009 as fairseq reads it


@register_optimizer("radam", dataclass=RAdamConfig)
class FairseqRAdam(FairseqOptimizer):
    """``torch.optim.RAdam`` under fairseq's trainer.

    Half precision works as for other optimizers without half-precision kernels: ``--fp16`` and
    ``--bf16`` keep parameters in float32 beside the model; ``--memory-efficient-fp16`` is refused.

    Args:
        cfg: Options.
        params: Parameters to train.

    Raises:
        SettingsError: for options that are not allowed; names flag, value, range and remedy.
    """

    def __init__(self, cfg: RAdamConfig, params: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(cfg)
        config = self.optimizer_config
        self._optimizer = torch.optim.RAdam(params, decoupled_weight_decay=True, **config)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Settings that replace the settings of a checkpoint when a training is resumed."""
        rate = self.cfg.lr
        return {
            "lr": rate[0] if isinstance(rate, Sequence) else rate,
            "betas": _parse_betas(self.cfg.adam_betas),
            "eps": _not_negative("--adam-eps", self.cfg.adam_eps),
            "weight_decay": _not_negative("--weight-decay", self.cfg.weight_decay),
        }

    @property
    def supports_flat_params(self) -> bool:
        """True: all parameters may be joined into one tensor, because each number is updated
        independently."""
        return True


def _parse_betas(value: Any) -> tuple[float, float]:
    """``"(0.9, 0.98)"`` of a command line, or two numbers of a configuration."""
    try:
        betas = ast.literal_eval(value) if isinstance(value, str) else value
        betas = OmegaConf.to_container(betas) if OmegaConf.is_config(betas) else betas
        first, second = map(float, betas)
        if not (0 <= first < 1 and 0 <= second < 1):
            raise ValueError
    except (ValueError, TypeError, SyntaxError):
        raise SettingsError(
            f"--adam-betas {value!r} is not allowed; allowed: two numbers from 0 to less than 1. "
            "Give them as in --adam-betas '(0.9,0.98)'."
        ) from None
    return first, second


def _not_negative(flag: str, value: float) -> float:
    if not 0 <= value < float("inf"):
        raise SettingsError(
            f"{flag} {value:g} is not allowed; allowed: a number >= 0. Leave the flag out for the "
            "default."
        )
    return value

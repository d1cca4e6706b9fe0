"""Stock layers that get facts about the inputs of the model, for which stock code has no
argument."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from cape_plugins.mathematics.binding import Bound
from hf_models.seams.scope import Scope


class InformedLayer(Bound):
    """Base of mixins over stock layers to which the scope of a forward is bound. The facts are an
    argument of the layer, because bound values are gone when gradient checkpointing calls the layer
    again in the backward pass."""

    def information(self, scope: Scope) -> Any:
        """Facts about a forward that the layer needs; None if the layer needs none."""
        raise NotImplementedError

    @property
    def informed(self) -> Sequence[Bound]:
        """The parts of the layer that the facts are bound to while the layer runs."""
        return (self,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers. Runs before gradient checkpointing keeps the arguments."""
        facts = None if self.bound is None else self.information(self.bound)
        return super().__call__(*args, **kwargs, facts=facts)

    def forward(self, *args: Any, facts: Any = None, **kwargs: Any) -> Any:
        """See transformers; `facts` come from :meth:`information`."""
        with ExitStack() as bindings:
            for part in self.informed:
                bindings.enter_context(part.using(facts))
            return super().forward(*args, **kwargs)

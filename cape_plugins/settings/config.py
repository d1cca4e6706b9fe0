"""Settings of a position embedding: completed by defaults, and checked as a whole. The options of a
position embedding are defined in :mod:`cape_plugins.settings.options`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from cape_plugins.settings.domains import DOMAINS, default_of
from cape_plugins.settings.options import (
    AUGMENT_PROBABILITY,
    COUNTED,
    FORMER_NAMES,
    OPTION_FIELDS,
    OptionError,
    OptionFields,
    applies,
    choose,
    exists_in,
    option_fields,
    parse_option,
)
from cape_plugins.settings.registry import (
    ARCHITECTURES,
    DOMAIN_DEFAULT,
    ENCODINGS,
    PRESETS,
    ROTARY,
    ROTARY_TYPES,
    TYPES,
    Encoding,
    PositionType,
    types_of,
)


@dataclass(frozen=True)
class PositionConfig(OptionFields):
    """All settings of one position embedding; immutable, validated and complete once built.

    An option left ``None`` takes the default of the type in this domain and architecture. An
    option that the type does not have is refused, because the option would silently have no effect.

    Args:
        type: One of :data:`TYPES`, or of :data:`~cape_plugins.settings.registry.ROTARY_TYPES`.
        domain: One of :data:`~cape_plugins.DOMAINS`: "text" (unit: tokens), "audio"
            (seconds), "image" (the [-1, 1] square) or "video" (the same and seconds).
        architecture: "encoder", "decoder" (causal), "seq2seq" (both) or "rotary" (queries and keys
            are turned).

    Raises:
        OptionError: names the option, the value, the allowed range and what to do.
    """

    def __post_init__(self) -> None:
        choose("domain", self.domain, DOMAINS)
        choose("architecture", self.architecture, ARCHITECTURES)
        self._check_type()
        for option in option_fields():
            # in the order of the fields: max_position depends on draw_positions
            value = getattr(self, option.name)
            value = self._default(option) if value is None else parse_option(option.name, value)
            object.__setattr__(self, option.name, value)
        self._check_model()
        self._check_applicable()
        self._check_combinations()

    def _check_type(self) -> None:
        types = types_of(self.architecture, self.domain)
        # lists, not dicts: a value from JSON may be unhashable
        if self.type in list(types):
            return
        if self.type not in [*ROTARY_TYPES, *TYPES]:
            problem = "is unknown"
        elif self.type not in types_of(self.architecture):
            problem = (
                "is no type of a model that turns queries and keys: such a model adds nothing to "
                "the content or the scores, and a shift of all positions changes no distance"
            )
        else:
            problem = (
                f"sorts the positions of a sequence, and positions of domain {self.domain!r} are a "
                "grid, which has no order"
            )
        raise OptionError("position_embedding", self.type, problem, ", ".join(types), "Choose one.")

    @property
    def _row(self) -> PositionType:
        # not types_of, which copies the table: each step of generation calls this method
        types = ROTARY_TYPES if self.architecture == ROTARY else TYPES
        return types[self.type]

    def _default(self, option: Any) -> Any:
        row = self._row
        value = row.options.get(option.name, option.metadata["off"])
        if self.architecture == "seq2seq":
            value = row.seq2seq.get(option.name, value)
        if option.name == "mean_normalize" and self.architecture != "encoder":
            return False  # impossible for causal positions
        is_grid = bool(DOMAINS[self.domain].grid)
        if option.name == "max_position" and (is_grid or not self._draws_positions):
            return option.metadata["off"]
        if not exists_in(option, DOMAINS[self.domain]):
            return option.metadata["off"]
        return default_of(self.domain, option.name) if value is DOMAIN_DEFAULT else value

    def _check_model(self) -> None:
        """Refuses options that no type has in models of this architecture and domain."""
        for option in option_fields():
            value, needed = getattr(self, option.name), option.metadata.get("architecture")
            if value == option.metadata["off"]:
                continue
            if needed not in (None, self.architecture):
                raise OptionError(
                    option.name,
                    value,
                    f"needs {ARCHITECTURES[needed].needs} (architecture {needed!r}), this is "
                    f"{self.architecture!r}",
                    remedy="Leave it out.",
                )
            if option not in option_fields(self.domain):
                domains = [repr(name) for name, row in DOMAINS.items() if exists_in(option, row)]
                raise OptionError(
                    option.name,
                    value,
                    f"needs a grid{' with time' if option.metadata.get('timed') else ''} (domain "
                    f"{' or '.join(domains)}), the domain is {self.domain!r}",
                    remedy="Leave it out.",
                )
        is_grid = bool(DOMAINS[self.domain].grid)
        if self._draws_positions and is_grid:
            raise OptionError(
                "draw_positions",
                self.draw_positions,
                f"sorts the positions of a sequence, and positions of domain {self.domain!r} are a "
                "grid, which has no order",
                allowed="none",
                remedy="Leave it out.",
            )
        if self.mean_normalize and self.architecture != "encoder":
            raise OptionError(
                "mean_normalize",
                True,
                f"is impossible in a model of architecture {self.architecture!r}: the mean would "
                "change with every decoded position",
                allowed="false; true with architecture 'encoder'",
                remedy="Leave it out.",
            )
        if self.directed and (is_grid or self.architecture == "decoder"):
            reason = "a grid has no before" if is_grid else "the causal mask hides what follows"
            raise OptionError(
                "directed",
                True,
                f"has no effect here: {reason}",
                allowed="false",
                remedy="Leave it out.",
            )

    def _check_applicable(self) -> None:
        for option in option_fields():
            value = getattr(self, option.name)
            if value == option.metadata["off"] or applies(
                option.name, self.type, self.architecture
            ):
                continue
            reason = ""
            if ENCODINGS[self._row.encoding].in_attention:
                reason = " in attention, where only distances count and nothing is added"
                if option.name.startswith("relative_"):
                    reason = ": attention has one kind of positions, and relative keys are another"
            if self.architecture == ROTARY:
                remedy = "Leave it out."
                if option.name == "rotary_base":
                    reason = ": the stock model has a base"
                    remedy = "Leave it out; the base is rope_theta in the model's configuration."
                raise OptionError(
                    option.name,
                    value,
                    f"has no effect on position embedding {self.type!r}{reason}",
                    allowed=repr(option.metadata["off"]),
                    remedy=remedy,
                )
            types_with_option = ", ".join(name for name in TYPES if applies(option.name, name))
            remedy = "Leave it out or choose one of these types."
            if option.name == "draw_positions":
                drawn = " or ".join(name for name, row in TYPES.items() if row.sampling)
                remedy += f" Sinusoids at drawn positions are the type {drawn}."
            raise OptionError(
                option.name,
                value,
                f"has no effect on position embedding {self.type!r}{reason}; it belongs to "
                f"{types_with_option}",
                remedy=remedy,
            )

    def _check_combinations(self) -> None:
        for option in option_fields():
            value = getattr(self, option.name)
            if value == option.metadata["off"]:
                continue
            if option.name.startswith("relative_") and not self.relative_context:
                raise OptionError(
                    option.name,
                    value,
                    "has no effect without relative attention",
                    allowed=">= 1",
                    needed="relative_context",
                    remedy="Set that, or leave this option out.",
                )
        self._check_augmentation()
        self._check_attention()
        if self.learned_table and not self.max_position:
            raise OptionError(
                "learned_table",
                True,
                "has no rows",
                allowed=">= 1, the length of the longest input",
                needed="max_position",
                remedy="Set that, or leave this option out.",
            )
        if self.encoding.relative and self.relative_context == 0:
            raise OptionError(
                "relative_context",
                0,
                f"leaves position embedding {self.type!r} without any position",
                allowed=">= 1",
                remedy="Use type 'nopos' for a model without positions.",
            )

    def _check_augmentation(self) -> None:
        """Checks options of positions that are drawn or moved."""
        if self.max_position and not self._draws_positions:
            raise OptionError(
                "max_position",
                self.max_position,
                "has no effect on positions that are counted",
                allowed="subset or uniform",
                needed="draw_positions",
                remedy="Set that, or leave this option out.",
            )
        is_default = self.augment_probability == OPTION_FIELDS[AUGMENT_PROBABILITY].metadata["off"]
        needs_draws = {
            AUGMENT_PROBABILITY: not is_default and not self.augments,
            "random_evaluation": self.random_evaluation and not self.random,
        }
        for name in filter(needs_draws.get, needs_draws):
            moves = ("max_local_shift", "max_offset", "max_position")
            remedy = "Set that or another augmentation, or leave this option out."
            if self.augments:  # samples would be augmented, but the share of these samples is 0
                moves, remedy = (AUGMENT_PROBABILITY,), "Set that, or leave this option out."
            raise OptionError(
                name,
                getattr(self, name),
                f"has no effect on position embedding {self.type!r} without augmentation",
                allowed="> 0",
                needed=next(move for move in moves if applies(move, self.type, self.architecture)),
                remedy=remedy,
            )

    def _check_attention(self) -> None:
        """Checks options of types that act in attention."""
        if self.layers != "all" and not (self.in_attention or self.encoding.in_attention):
            raise OptionError(
                "layers",
                self.layers,
                f"has no effect on position embedding {self.type!r}: no layer of attention has "
                "positions",
                allowed=">= 1",
                needed="relative_context",
                remedy="Set that, or leave this option out.",
            )

    @property
    def encoding(self) -> Encoding:
        """Encoding of positions. Code asks for properties of the encoding, not for its name."""
        return ENCODINGS[self.encoding_name]

    @property
    def encoding_name(self) -> str:
        """Key of the encoding."""
        return self._row.learned if self.learned_table else self._row.encoding

    @property
    def sampling(self) -> str:
        """Way to draw positions instead of counting them, a key of
        :data:`~cape_plugins.mathematics.augmentation.SAMPLINGS`; "" for counted positions."""
        if not self.max_position:
            return ""
        return self._row.sampling or self.draw_positions

    @property
    def _draws_positions(self) -> bool:
        """Whether the type or the option ``draw_positions`` draws positions."""
        off = OPTION_FIELDS["draw_positions"].metadata["off"]
        return bool(self._row.sampling) or self.draw_positions != off

    @property
    def in_attention(self) -> bool:
        """Whether self-attention has to be given positions. False for rotary models, whose stock
        attention has positions already."""
        if self.architecture == ROTARY:
            return False
        return self.relative_context > 0 or self.encoding.in_attention

    def in_layer(self, index: int) -> bool:
        """Whether self-attention of the layer with this 0-based index has to be given positions."""
        return self.in_attention and self.names_layer(index)

    def names_layer(self, index: int) -> bool:
        """Whether the option ``layers`` names the layer with this 0-based index."""
        word, _, number = self.layers.partition(":")
        if not number:
            return word == "all" or index == 0
        return ((index + 1) % int(number) == 0) == (word == "every")

    @property
    def random(self) -> bool:
        """True if training draws random numbers."""
        return self.augment_probability > 0 and self.augments

    @property
    def augments(self) -> bool:
        """Whether the settings move or draw positions of augmented samples, whatever the share of
        these samples is."""
        moves = self.max_global_shift or self.max_local_shift or self.max_offset or self.sampling
        return bool(moves) or self.max_global_scale != 1.0

    @property
    def alpha(self) -> float:
        """The source scale as a number (CAPE section 5.3).

        Raises:
            OptionError: if the source scale is a word, because the training data are not counted.
        """
        if self.source_scale in COUNTED:
            raise OptionError(
                "source_scale",
                self.source_scale,
                "has not been resolved: no training data have been counted",
                allowed="a number > 0 or TARGET/SOURCE token counts",
                remedy="`cape-plugins alpha` counts them.",
            )
        return float(Fraction(self.source_scale))

    def changes(self, other: PositionConfig) -> dict[str, tuple[Any, Any]]:
        """Settings that give other outputs in evaluation than `other` with the same weights: maps
        the name of an option to its values in self and in `other`. The name "type" stands for
        another encoding; relative keys differ by the options of relative attention."""
        encodings = ((config.encoding_name, config.encoding) for config in (self, other))
        names = [name if row.adds or row.in_attention else None for name, row in encodings]
        changes = {"type": (self.type, other.type)} if names[0] != names[1] else {}
        # if evaluation draws positions, options of training have an effect in evaluation, too
        draws_in_evaluation = self.random_evaluation or other.random_evaluation
        for option in option_fields():
            here, there = getattr(self, option.name), getattr(other, option.name)
            if here != there and (draws_in_evaluation or not option.metadata.get("training")):
                changes[option.name] = (here, there)
        return changes

    def replace(self, **changes: Any) -> PositionConfig:
        """A copy with some settings changed; unknown names are refused. Another type begins with
        the defaults of that type."""
        settings = self.to_dict() if changes.get("type", self.type) == self.type else {}
        return self.from_dict({**settings, **changes}, self.domain, self.architecture)

    def to_dict(self) -> dict[str, Any]:
        """Type and options as plain str, float, int and bool. Leaves out domain and architecture,
        which the model sets, not the user."""
        return {"type": self.type, **{o.name: getattr(self, o.name) for o in option_fields()}}

    @classmethod
    def from_dict(
        cls, settings: Mapping[str, Any], domain: str = "text", architecture: str = "encoder"
    ) -> PositionConfig:
        """Builds from user settings ``{"type": ..., option: value}``.

        Raises:
            ValueError: for an unknown key, which is never ignored, or a bad value.
        """
        settings = {FORMER_NAMES.get(name, name): value for name, value in settings.items()}
        names = {"type", *OPTION_FIELDS}
        unknown = sorted(set(settings) - names)
        if unknown:
            raise ValueError(
                f"unknown position option {unknown[0]!r}={settings[unknown[0]]!r}; "
                f"known options: {', '.join(sorted(names))}. Correct or remove it."
            )
        return cls(domain=domain, architecture=architecture, **settings)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> PositionConfig:
        """The setting of a paper by its name in :data:`PRESETS`, with `changes` applied."""
        choose("preset", name, PRESETS)
        return cls(**{**PRESETS[name], **changes})

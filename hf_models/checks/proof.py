"""The proof of a generated family: the checks that a tiny model of a model type has to pass before
:mod:`cape_plugins.checkpoints.generated` gets a row for the type.

Comparisons with the stock model are bit for bit, as the same operations run in the same order.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cape_plugins.checkpoints.families import (
    FIELD,
    add_generated_row,
    find_family,
    remove_generated_row,
)
from cape_plugins.checkpoints.generated import GENERATED, GeneratedRow, Variant
from cape_plugins.doctor.check import (
    FAILED,
    LIMIT,
    OK,
    SKIPPED,
    Check,
    Mismatch,
    NotApplicable,
    check,
    unless_stock_fails,
    wishes,
)
from cape_plugins.settings.registry import ROTARY
from hf_models.calls.switching import switch
from hf_models.checks.calls import SIDES, Batch, padded, unpadded
from hf_models.checks.generation import from_padded, generate
from hf_models.checks.in_attention import attention_checks
from hf_models.checks.inner_models import inner_models, same_alone
from hf_models.checks.model import augmentation, draw_new_tables, draws_nothing, one_step, padding
from hf_models.checks.outputs import equal, outputs_of
from hf_models.checks.packed import PACKED, difference_of_packed, packed, same_packed
from hf_models.checks.samples import Samples
from hf_models.checks.stock_models import (
    NoModelType,
    NoStockModel,
    StockModel,
    one_line,
    tiny_stock_models,
)
from hf_models.checks.storage import storage_checks
from hf_models.checks.updates import UPDATES, same_checkpointed, same_updates
from hf_models.checks.without_seam import REASONS
from hf_models.generated.families import forget, part_of
from hf_models.generated.kinds import SEAMS
from hf_models.generated.model import GeneratedModel
from hf_models.switching.install import PARTS, is_model

_NEW_TABLES = 0.5  # standard deviation
STOCK_MODEL = "stock model"  # check that is skipped where no tiny stock model runs
SEAM = "seam"  # check that is skipped where no seam is found
_NO_POSITIONS = {"type": "nopos"}
_UNKNOWN = "No module of the model is known to add or turn positions."


class Proof(NamedTuple):
    """The result of the checks of a model type.

    Attributes:
        model_type: Such as "mistral".
        row: The row that was proved, or else the last row that was tried; None if the stock
            model does not run, has no known seam, or has a family with a file.
        stock: Name of the stock class; "" if none runs.
        checks: The comparisons, in order.
        is_new: Whether `row` was tried because the table of generated families has none.
    """

    model_type: str
    row: GeneratedRow | None
    stock: str
    checks: list[Check]
    is_new: bool = False

    @property
    def failure(self) -> Check | None:
        """The first comparison that failed."""
        return next((row for row in self.checks if row.failed), None)

    @property
    def is_proved(self) -> bool:
        """Whether something was compared and nothing differs."""
        return self.failure is None and any(row.status == OK for row in self.checks)


def prove(model_type: str, position_embedding: Mapping[str, Any] | None = None) -> Proof:
    """Compares a tiny model with its stock model, and trains it with another position embedding.

    A model type with two kinds of models is proved for both kinds. A model type without a row is
    tried with the rows of other model types that have the same seam; a row that is proved stays
    registered in this process.

    Args:
        model_type: A model type of the installed transformers.
        position_embedding: ``{"type": ..., option: value}`` to train with; by default ``cape``.

    Raises:
        ValueError: if the installed transformers has no such model type, or if the family refuses
            the settings.
    """
    row = GENERATED.get(model_type)
    if row is None or row.variant is None:
        return _proof_of_kind(model_type, row, {}, position_embedding)
    return _proof_of_both_kinds(model_type, row, row.variant, position_embedding)


def _proof_of_both_kinds(
    model_type: str,
    row: GeneratedRow,
    variant: Variant,
    position_embedding: Mapping[str, Any] | None,
) -> Proof:
    """One proof for the two kinds of models of a type. Settings that one kind refuses are skipped
    there.

    Raises:
        ValueError: if both kinds refuse the settings.
    """
    proofs: list[Proof] = []
    refusals: list[ValueError] = []
    for fields in ({}, {variant.field: variant.value}):
        try:
            proof = _proof_of_kind(model_type, row, fields, position_embedding)
        except ValueError as error:
            refusals.append(error)
            proof = Proof(model_type, row, "", [Check("settings", SKIPPED, str(error))])
        else:
            if not proof.is_proved and proof.failure is None:  # nothing can be compared
                return proof
        kind = "".join(f"{name}={value!r}, " for name, value in fields.items())
        checks = [line._replace(name=kind + line.name) for line in proof.checks]
        proofs.append(proof._replace(checks=checks))
    if len(refusals) == len(proofs):
        raise refusals[0]
    stock = next(filter(None, (proof.stock for proof in proofs)))
    return Proof(model_type, row, stock, [line for proof in proofs for line in proof.checks])


def _proof_of_kind(
    model_type: str,
    known_row: GeneratedRow | None,
    fields: Mapping[str, Any],
    position_embedding: Mapping[str, Any] | None,
) -> Proof:
    """The proof of the models whose stock configuration has these `fields`."""
    proofs: list[Proof] = []
    try:
        for stock in tiny_stock_models(model_type, fields):
            proofs.append(_proof(model_type, known_row, stock, position_embedding))
            if len(proofs[-1].checks) > 1:  # switched, so this class decides
                return proofs[-1]
    except NoStockModel as reason:
        name = "model type" if isinstance(reason, NoModelType) else STOCK_MODEL
        # in front: a class of another type, which may run, is not what stands in the way
        proofs.insert(0, Proof(model_type, None, "", [Check(name, SKIPPED, str(reason))]))
    if known_row is None and model_type in REASONS:
        return Proof(model_type, None, proofs[0].stock, [_no_seam(REASONS[model_type])])
    return proofs[0]


def _proof(
    model_type: str,
    known_row: GeneratedRow | None,
    stock: StockModel,
    position_embedding: Mapping[str, Any] | None,
) -> Proof:
    """The proof of a model with the `known_row` of its type. Without such a row: the proof with
    the first candidate that passes, or with the most similar row if no candidate passes."""
    name = type(stock.model).__name__
    owner = type(stock.model).config_class.model_type
    if owner != model_type:  # another model type has the class
        text = f"Its {name} is the class of the model type {owner}."
        return Proof(model_type, None, name, [Check("class", SKIPPED, text)])
    if known_row is not None:
        checks = _checks(stock, _stock_type(stock.model), position_embedding)
        return Proof(model_type, known_row, name, checks)
    if is_model(PARTS.get(type(stock.model))):  # a family with a file
        checks = _checks(stock, _stock_type(stock.model), position_embedding)
        return Proof(model_type, None, name, checks)
    if find_family(model_type) is not None:
        return Proof(model_type, None, name, [_no_seam(f"Its family has no class for {name}.")])
    proofs = [Proof(model_type, None, name, [_no_seam(_UNKNOWN)])]
    for row in candidates(stock.model):
        add_generated_row(model_type, row)
        proof = Proof(
            model_type, row, name, _checks(stock, row.stock, position_embedding), is_new=True
        )
        if proof.is_proved:
            return proof
        proofs.append(proof)
        forget(model_type)
        remove_generated_row(model_type)
    # the most similar candidate, or the check that says that no seam is known
    return proofs[:2][-1]


def _no_seam(text: str) -> Check:
    return Check(SEAM, SKIPPED, text)


def candidates(model: Any) -> list[GeneratedRow]:
    """Rows to try for a stock model: the rows that other model types have for a seam of this model,
    the most similar first."""
    side = "encoder"
    if model.can_generate() and not getattr(model.config, "is_encoder_decoder", False):
        side = "decoder"
    seams = [name for name, seam in SEAMS.items() if any(True for _ in seam.find(model))]
    rows = (dataclasses.replace(row, checked=False) for row in GENERATED.values())
    return sorted(
        dict.fromkeys(row for row in rows if row.seam in seams),
        key=lambda row: (seams.index(row.seam), row.side != side, len(row.oddities)),
    )


def _stock_type(model: Any) -> str:
    """Type of position embedding of a stock model whose family is known."""
    family = find_family(model.config.model_type)
    side = next(side for side, row in family.sides.items() if row.field == FIELD)
    return family.stock_type(vars(model.config), side)


# ---- the comparisons -----------------------------------------------------------------------------


def _checks(
    stock: StockModel, stock_type: str, position_embedding: Mapping[str, Any] | None
) -> list[Check]:
    with torch.random.fork_rng():
        checks = list(_stock_checks(stock, stock_type))
        if not checks[0].failed:  # the model can be switched
            checks += _training_checks(stock, stock_type, position_embedding)
            twin = _switched(stock.model, {"type": stock_type})
            if isinstance(twin, GeneratedModel) and twin.config.position_fields[FIELD][1] != ROTARY:
                checks += attention_checks(stock.model, stock.inputs, _switched, same_checkpointed)
    return checks


def _stock_checks(stock: StockModel, stock_type: str) -> Iterator[Check]:
    """Compares the stock type with the stock class."""
    model, inputs = stock.model, stock.inputs
    yield (row := check("switch", partial(_switchable, model, stock_type)))
    if row.failed:
        return
    twin = _switched(model, {"type": stock_type})
    yield check("outputs", partial(_same_outputs, model, twin, inputs))
    for side in SIDES:
        compare = partial(_same_padded, model, side=side, inputs=inputs)
        name = f"padding on the {side}"
        yield unless_stock_fails(check(name, partial(compare, twin)), partial(compare, model))
    yield check(PACKED, partial(_same_packed_outputs, model, twin, inputs))
    compare = partial(_same_generation, model, inputs=inputs)
    row = check("generation", partial(compare, twin))
    yield unless_stock_fails(row, partial(compare, model))
    compare = partial(same_updates, model, inputs=inputs)
    row = check(f"{UPDATES} updates", partial(compare, twin))
    yield unless_stock_fails(row, partial(compare, model))
    samples = Samples([dict(inputs)], {})
    loaders = [type(twin)] if stock.auto is None else [stock.auto, type(twin)]
    yield from storage_checks(model, twin, samples, {"type": stock_type}, loaders)
    bare = _switched(model, _NO_POSITIONS)  # without the stock table
    for row in storage_checks(model, bare, samples, _NO_POSITIONS, loaders[:1], False):
        yield row._replace(name=f"{_NO_POSITIONS['type']}: {row.name}")
    for name, copied in (("copied", deepcopy), ("pickled", _pickled)):
        compare = partial(_same_copy, copied, inputs=inputs)
        yield unless_stock_fails(check(name, partial(compare, twin)), partial(compare, model))


def _training_checks(
    stock: StockModel, stock_type: str, position_embedding: Mapping[str, Any] | None
) -> Iterator[Check]:
    """Trains the model with random positions."""
    model, inputs = stock.model, stock.inputs
    fields = part_of(type(model)).config_class.fields_for(vars(model.config))
    wish = wishes(position_embedding, *fields[FIELD])[0]
    name = wish["type"]
    if stock_type != _NO_POSITIONS["type"]:
        yield check("positions reach the output", partial(_without_positions, model, inputs))
    try:
        cape_model = _switched(model, wish)
    except Exception as error:
        if position_embedding is not None:  # the user's settings may be wrong
            raise
        yield Check(f"{name}: switch", FAILED, one_line(error))
        return
    old = {name for name, _ in model.named_parameters()}
    draw_new_tables(cape_model, old, _NEW_TABLES)
    compare = partial(draws_nothing, inputs=inputs)
    row = check(f"{name}: evaluation draws nothing", partial(compare, cape_model))
    yield unless_stock_fails(row, partial(compare, model))
    if inner_models(cape_model):
        yield check(f"{name}: inner models alone", partial(same_alone, cape_model, inputs))
    yield check(f"{name}: training draws positions", partial(augmentation, cape_model, inputs))
    yield check(f"{name}: {PACKED}", partial(same_packed, model, cape_model, inputs))
    compare = partial(same_checkpointed, inputs=inputs)
    row = check(f"{name}: gradient checkpointing", partial(compare, cape_model))
    yield unless_stock_fails(row, partial(compare, model))
    compare = partial(one_step, inputs=inputs, stock_names=old)
    row = check(f"{name}: one training step", partial(compare, cape_model))
    yield unless_stock_fails(row, partial(compare, deepcopy(model)))


def _switched(model: Any, position_embedding: Mapping[str, Any]) -> Any:
    return switch(deepcopy(model), position_embedding).eval()


def _switchable(model: Any, stock_type: str) -> str:
    twin = _switched(model, {"type": stock_type})
    main_side = next(iter(find_family(twin.config.model_type).sides))
    if isinstance(twin, GeneratedModel) and all(seam.side != main_side for seam in twin.seams()):
        raise Mismatch(f"{type(twin).__name__} has no part for {FIELD}")
    return f"{type(twin).__name__} with {stock_type!r}"


def _seeded_outputs(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(1)  # some stock models draw in evaluation
    return outputs_of(model, inputs)


def _same_outputs(model: Any, other: Any, inputs: Mapping[str, Tensor]) -> str:
    expected = _seeded_outputs(model, inputs)
    if not any(numbers.isfinite().all() for numbers in expected.values()):
        raise Mismatch("no output of the stock model is finite, so nothing can be compared")
    return equal(expected, _seeded_outputs(other, inputs))


def _same_padded(model: Any, other: Any, side: str, inputs: Mapping[str, Tensor]) -> float | str:
    """Compares padded batches; models of this package that count from the first token, unlike the
    stock model, have to equal the stock model on each sample alone."""
    if (batch := padded(model, inputs, side)) is None:
        raise NotApplicable("the forward of the model takes no tokens with a mask")
    try:
        return equal(_seeded_outputs(model, batch), _seeded_outputs(other, batch))
    except Mismatch:
        return padding(model, other, unpadded(model, inputs), side)


def _same_packed_outputs(model: Any, other: Any, inputs: Mapping[str, Tensor]) -> str:
    """Compares packed texts, if the stock model keeps them apart."""
    if difference_of_packed(model, inputs) > LIMIT:
        raise NotApplicable("packed texts see each other in the stock model")
    batch, _ = packed(model, inputs)
    return equal(_seeded_outputs(model, batch), _seeded_outputs(other, batch))


def _same_generation(model: Any, other: Any, inputs: Mapping[str, Tensor]) -> float | str:
    """Compares greedy generation with a cache from texts with padding on the left, as
    :func:`_same_padded` does."""
    if not model.can_generate():
        raise NotApplicable("the model does not generate")
    batch: Batch = padded(model, inputs, "left") or dict(inputs)
    results = []
    for generating in (model, other):
        torch.manual_seed(1)
        results.append(generate(generating, batch, beams=1)._asdict())
    try:
        return equal(*({name: value.float() for name, value in row.items()} for row in results))
    except Mismatch:
        return from_padded(unpadded(model, inputs), "left", model, other)


def _pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def _same_copy(copied: Callable[[Any], Any], model: Any, inputs: Mapping[str, Tensor]) -> str:
    copy = copied(model)
    if type(copy) is not type(model):
        raise Mismatch(f"the copy is a {type(copy).__name__}")
    return equal(_seeded_outputs(model, inputs), _seeded_outputs(copy, inputs))


def _without_positions(model: Any, inputs: Mapping[str, Tensor]) -> str:
    """Checks that the output depends on the seam that was found."""
    other = _switched(model, _NO_POSITIONS)
    try:
        equal(_seeded_outputs(model, inputs), _seeded_outputs(other, inputs))
    except Mismatch:
        return "the output changes without positions"
    raise Mismatch("the output is the same without positions")

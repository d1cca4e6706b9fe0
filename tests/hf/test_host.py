"""Values taken from stock calls, on this release of transformers and on one that renames
its arguments; the releases that the tests have passed on."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from transformers import LlamaModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.models.bart.modeling_bart import BartDecoder

from cape_plugins.checkpoints.generated import GENERATED
from hf_models import releases
from hf_models.generated import families
from hf_models.host import cache_name, cached_tokens, check_forwards, find_cache
from hf_models.seams.text import TargetStack
from tests.support.hf import make, sentences, targets

CACHE = cache_name(BartDecoder.forward)


def filled(length):
    cache = DynamicCache()
    for layer in (0, 1):
        cache.update(torch.zeros(1, 2, length, 4), torch.zeros(1, 2, length, 4), layer)
    return cache


def test_the_cache_is_found_under_any_name():
    cache = filled(3)
    arguments = {"mask": torch.ones(2), "a name of tomorrow": cache, "use_cache": True}
    assert find_cache(*arguments.values()) is cache
    assert find_cache(torch.ones(2), None, True) is None


def test_cached_tokens_equal_the_text():
    assert cached_tokens(None) == 0
    assert cached_tokens(filled(3)) == cached_tokens(filled(3), 1) == 3
    assert cached_tokens(EncoderDecoderCache(filled(3), filled(7))) == 3
    config = make("marian", "cape").config
    assert cached_tokens(StaticCache(config, max_cache_len=8)) == 0


def annotated(self, input_ids, memory: Cache | None = None, use_cache=None): ...
def unannotated(self, input_ids, cache=None, use_cache=None): ...
def unknown(self, input_ids, memory=None, use_cache=None): ...
def ambiguous(self, memory: Cache | None = None, cache: Cache | None = None): ...  # fmt: skip


def test_the_name_of_the_cache_is_read_from_the_signature():
    assert cache_name(annotated) == "memory"
    assert cache_name(unannotated) == "cache"


@pytest.mark.parametrize(("forward", "words"), [(unknown, "no name"), (ambiguous, "several names")])
def test_a_cache_without_a_known_name_is_refused(forward, words):
    with pytest.raises(ValueError, match=f"takes the cache under {words}.*cape-plugins doctor"):
        cache_name(forward)


def renamed_decoder(stock_forward):
    """A part over a stock decoder of a release that renames arguments."""
    stock = type("RenamedDecoder", (BartDecoder,), {"forward": stock_forward})
    return type("CapeRenamedDecoder", (TargetStack, stock), {}), stock


def test_an_argument_that_the_stock_forward_lacks_is_refused():
    """Not all stock decoders have position_ids, which alone may be missing, but not renamed."""

    def no_mask(self, input_ids=None, mask=None, encoder_hidden_states=None,
                encoder_attention_mask=None, inputs_embeds=None): ...  # fmt: skip
    def renamed(self, input_ids=None, attention_mask=None, encoder_hidden_states=None,
                encoder_attention_mask=None, inputs_embeds=None, positions=None): ...  # fmt: skip

    with pytest.raises(ValueError, match="no argument 'attention_mask', which TargetStack takes"):
        check_forwards(*renamed_decoder(no_mask))
    with pytest.raises(ValueError, match="positions under a name that is not known, 'positions'"):
        check_forwards(*renamed_decoder(renamed))


def test_another_order_of_what_is_handed_on_by_place_is_refused():
    def forward(self, input_ids=None, position_ids=None, attention_mask=None, inputs_embeds=None,
                cache: Cache | None = None, use_cache=None): ...  # fmt: skip

    class HandsOn:
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, *args): ...

    stock = type("ReorderedModel", (LlamaModel,), {"forward": forward})
    part = type("CapeReorderedModel", (HandsOn, stock), {})
    with pytest.raises(ValueError, match=r"arguments of HandsOn.forward in another order"):
        check_forwards(part, stock)


@pytest.mark.parametrize("name", ["cape", "sinpos", "relpos", "abspos"])
def test_a_cache_of_another_name_counts(name):
    """A step with a cache gives the logits of one forward; a cache that is overlooked makes it the
    first step."""

    def forward(self, input_ids=None, attention_mask=None, encoder_hidden_states=None,
                encoder_attention_mask=None, memory: Cache | None = None, inputs_embeds=None,
                use_cache=None, **others):  # fmt: skip
        return BartDecoder.forward(
            self, input_ids, attention_mask, encoder_hidden_states, encoder_attention_mask,
            inputs_embeds=inputs_embeds, use_cache=use_cache, **{CACHE: memory}, **others
        )  # fmt: skip

    decoder, ids = make("bart", name).get_decoder(), targets()
    part, stock = renamed_decoder(forward)
    check_forwards(part, stock)
    states = {"encoder_hidden_states": torch.randn(3, 5, decoder.config.d_model)}
    with torch.no_grad():
        whole = decoder(ids, **states).last_hidden_state
        decoder.__class__ = part
        memory = EncoderDecoderCache(DynamicCache(), DynamicCache())
        decoder(ids[:, :-1], **states, memory=memory, use_cache=True)
        step = decoder(ids[:, -1:], **states, memory=memory, use_cache=True).last_hidden_state
        first = decoder(ids[:, -1:], **states).last_hidden_state
    torch.testing.assert_close(step, whole[:, -1:], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(first, whole[:, -1:], atol=1e-3)


def test_a_cache_that_relative_attention_does_not_see_is_refused(monkeypatch):
    model, ids = make("bart", "relpos"), targets()
    output = model(**sentences(), decoder_input_ids=ids[:, :-1], use_cache=True)
    cache = next(value for value in output.values() if isinstance(value, Cache))
    monkeypatch.setattr("hf_models.seams.attention.find_cache", lambda *arguments: None)
    with pytest.raises(ValueError, match="keys for 1 queries, but no cache"):
        model(**sentences(), decoder_input_ids=ids[:, -1:], **{CACHE: cache})


def warnings_of(function, *arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for argument in arguments:
            function(argument)
    return [str(warning.message) for warning in caught]


def test_an_untested_release_is_told_with_the_range_and_the_remedy():
    rows = releases.tested_releases()
    oldest, newest = rows[0]["transformers"], rows[-1]["transformers"]
    for release in ("5.3.0", "99.0.0", "99.1rc1"):
        (message,) = warnings_of(releases.warn_if_untested, release)
        assert message.startswith(f"transformers {release} is not among the releases")
        assert f"{oldest} to {newest}" in message
        assert "`cape-plugins doctor`" in message


def test_a_tested_release_and_its_repairs_are_not_worth_a_word():
    for row in releases.tested_releases():
        for release in (row["transformers"], row["transformers"] + ".post1"):
            assert warnings_of(releases.warn_if_untested, release) == []


def test_a_family_that_a_tested_release_does_not_prove_is_told_once(tmp_path, monkeypatch):
    """On a tested release whose families nobody has proved, each family is told."""
    tested = [{"transformers": release} for release in ("5.22.2", "5.23.0", "5.24.0")]
    for path, content in (("TESTED", tested), ("NOT_PROVED", {"5.23.0": [], "5.24.0": ["llama4"]})):
        monkeypatch.setattr(releases, path, tmp_path / path)
        (tmp_path / path).write_text(json.dumps(content))
    monkeypatch.setattr(families, "_make", lambda config: families.FamilyClasses(config, ()))

    def told(release):
        monkeypatch.setattr(families, "_families", {})
        monkeypatch.setattr(families.transformers, "__version__", release)
        return warnings_of(families.make, "llama4", "phimoe", "cape_llama4")

    (message,) = told("5.24.1")
    assert message.startswith("the family of 'llama4' has not been shown to equal its stock models")
    assert "`cape-plugins doctor llama4`" in message
    assert told("5.23.0") == []
    assert [message.split("'")[1] for message in told("5.22.2")] == ["llama4", "phimoe"]
    assert told("99.0.0") == []  # the import has told
    (tmp_path / "NOT_PROVED").unlink()  # as in a self-contained folder
    assert told("5.24.0") == []


def test_names_of_families_that_are_not_proved_are_rows_of_the_table():
    for names in json.loads(releases.NOT_PROVED.read_text(encoding="utf-8")).values():
        assert {*names} <= GENERATED.keys()

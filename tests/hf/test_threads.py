"""One model that several threads use at once."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from cape_plugins.mathematics.binding import Bound
from tests.support.hf import FAMILIES, VARIANTS, answer, batch, sentences
from tests.support.whisper import SEGMENT, features, switched


def in_lockstep(modules, calls):
    """What `calls` return, each in a thread, which wait for each other at the call of a module."""
    barrier = threading.Barrier(len(calls), timeout=60)

    def wait(*_):
        barrier.wait()

    hooks = [module.register_forward_pre_hook(wait) for module in modules]
    assert hooks
    try:
        with ThreadPoolExecutor(len(calls)) as threads:
            return [future.result() for future in [threads.submit(call) for call in calls]]
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("family", ["marian", "bert", "m2m_100"])
@pytest.mark.parametrize("others", [(7, 9, 2), (20, 3, 1)], ids=["same shape", "longer"])
def test_threads_do_not_see_what_others_bind(family, others):
    model = FAMILIES[family].build(VARIANTS[family]["cape"])
    inputs = [{**batch(family), **sentences(lengths=lengths)} for lengths in ((9, 6, 4), others)]
    for texts in inputs:
        if family == "bert":  # as long as the source
            del texts["labels"]
    expected = [answer(model(**texts)) for texts in inputs]
    calls = [lambda texts=texts: answer(model(**texts)) for texts in inputs]
    # called when positions have been bound, and before they are read
    words = [m for m in model.modules() if isinstance(m, nn.Embedding) and len(m.weight) == 60]
    for output, alone in zip(in_lockstep(words, calls), expected, strict=True):
        assert torch.equal(output, alone)


def test_whisper_keeps_its_configuration_while_threads_generate():
    model = switched()
    config, inputs = model.config, [features(2, frames, seed=frames) for frames in (50, 200)]
    ways = {"max_new_tokens": 6, "language": "en", "one_piece": True}
    expected = [model.generate(sound, **ways) for sound in inputs]
    calls = [lambda sound=sound: model.generate(sound, **ways) for sound in inputs]
    seen = []

    def encoded(*_):
        seen.append(model.config.max_source_positions)

    hook = model.get_encoder().register_forward_hook(encoded)
    for output, alone in zip(in_lockstep([model.get_encoder()], calls), expected, strict=True):
        assert torch.equal(output, alone)
    hook.remove()
    assert sorted(seen) == [SEGMENT // 2, 3 * SEGMENT // 2]  # as each call is shown
    assert model.config is config
    assert config.max_source_positions == SEGMENT // 2


class Holder(Bound, nn.Module):
    def forward(self, content):
        return content if self.bound is None else content + self.bound


def test_what_is_bound_does_not_leave_its_thread_or_module():
    module = Holder()
    with module.using(torch.ones(2)):
        with module.using(None):
            assert module.bound is None
        assert module.bound is not None
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(lambda: module.bound).result() is None
        assert copy.deepcopy(module).bound is None
        assert pickle.loads(pickle.dumps(module)).bound is None
    assert module.bound is None

"""Leaves these tests out where the Hugging Face packages are missing; what several files share."""

import copy
import importlib.util
import pickle

import torch

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_*.py"]


def copies(model, folder):
    """The model loaded from the folder in which it is saved, copied, and pickled."""
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder)
    others = loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    return [other.eval() for other in others]


def check_same_gradients(models, outputs):
    """Fails if the outputs of a model and of its stock model give other gradients."""
    for each_output in outputs:
        each_output.square().sum().backward()
    gradients = dict(models[0].named_parameters())
    for name, parameter in models[1].named_parameters():
        if parameter.grad is not None:
            assert torch.equal(gradients[name].grad, parameter.grad), name

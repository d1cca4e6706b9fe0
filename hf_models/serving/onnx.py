"""``cape-plugins export onnx``: models as graphs for ONNX Runtime, which take inputs of any size
and need neither torch nor this package."""

from __future__ import annotations

import argparse
import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor
from transformers import AutoConfig

import hf_models
from cape_plugins import PositionEncoder
from cape_plugins.serving.output import Exported
from cape_plugins.utils.texts import first_line
from hf_models.processors.feature_extraction import choose_extractor
from hf_models.seams.packed_grids import refuse_packed_patches
from hf_models.seams.video import VideoSeam
from hf_models.serving.known_inputs import known_inputs
from hf_models.serving.onnx_generation import generation_graphs, language_model_graph
from hf_models.serving.onnx_graphs import (
    COMMAND,
    Graph,
    draw,
    frames_graph,
    image_graph,
    spectrogram_graph,
    text_and_image_graph,
    tokens_graph,
    video_graph,
)
from hf_models.serving.onnx_readme import Described, readme
from hf_models.storage.loading import clear_errors, load_whole
from hf_models.storage.other_files import copy_other_files
from hf_models.switching.install import stock_class

OPSETS = range(18, 24)
# Rounding of float32 in sums of thousands of terms and dozens of layers stays below 1e-5 of the
# largest value; a wrong position moves outputs by more than 1e-3.
TOLERANCE = 1e-4
ONE_FILE = 2**30  # bytes of weights in one file; protobuf allows at most 2 GiB


def export(source: Path, folder: Path, args: argparse.Namespace) -> Exported:
    """Writes the graphs of a model, and the files of its tokenizer or feature extractor.

    Args:
        source: Folder of a model of this package.
        folder: Empty folder to write into.
        args: `opset`, and `check`: compare at other sizes than the size of the sample, too.

    Raises:
        ValueError: if the model cannot be exported, or a graph computes something else.
    """
    if args.opset not in OPSETS:
        raise ValueError(
            f"--opset {args.opset} is not allowed; allowed: {OPSETS[0]} to {OPSETS[-1]}, for which "
            "torch writes programs that ONNX Runtime takes. Leave --opset out for 20."
        )
    model = load(source)
    descriptions, lines = [], []
    for graph in graphs(model):
        path = folder / f"{graph.name}.onnx"
        write(graph, path, args.opset)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        sizes = [graph.sample, *(graph.others if args.check else [])]
        lines.append(f"{path.name}: {compared(graph, session, sizes)}")
        descriptions.append(Described(path.name, *map(_port_descriptions, _ports(session))))
    # no config.json, because loading code would then look for weights
    copy_other_files(source, folder)
    choose_extractor(folder, at_natural_length=False)  # the stock one needs no hf_models
    return Exported(readme(model, descriptions, args.opset), "\n".join(lines))


def load(source: Path) -> Any:
    """The model of a folder, in float32 and evaluation mode.

    Raises:
        ValueError: if the model is not from this package, or draws positions in evaluation.
    """
    with clear_errors(str(source)):
        config = AutoConfig.from_pretrained(source)
        name = (config.architectures or ["model without architecture"])[0]
        if type(config) not in hf_models.AUTO_CLASSES or name not in hf_models.MODELS:
            raise ValueError(
                f"SOURCE {source} holds a {name}, which is no model of this package; "
                "allowed: model types that begin with cape_. Stock models are exported by "
                "transformers.exporters.OnnxExporter."
            )
        model_class = hf_models.MODELS[name]
        # graphs of fused attention are the fastest, but some stock models have none
        attention = "sdpa" if model_class._supports_sdpa else "eager"
        model, _ = load_whole(model_class, str(source), attn_implementation=attention)
    for module in model.modules():
        if isinstance(module, PositionEncoder) and module.config.random_evaluation:
            raise ValueError(
                f"SOURCE {source} draws positions in evaluation, too, and a graph draws none; "
                "allowed: models with fixed positions in evaluation. Set random_evaluation to "
                "false in config.json."
            )
    # torch exports attention differently if a learned bias among its arguments needs a gradient
    return model.float().eval().requires_grad_(False)


def graphs(model: Any) -> list[Graph]:
    """The graphs of a model, by its inputs and its task.

    Raises:
        ValueError: for a model that no graph fits.
    """
    refuse_packed_patches(model, COMMAND)
    with known_inputs(model, COMMAND):
        return _graphs(model)


def _graphs(model: Any) -> list[Graph]:
    video_seams = (module for module in model.modules() if isinstance(module, VideoSeam))
    if (seam := next(video_seams, None)) is not None:
        return [video_graph(model, seam)]
    generates = model.can_generate()
    if generates and model.config.is_encoder_decoder:
        return generation_graphs(model)
    if model.main_input_name == "pixel_values":
        return [image_graph(model)]
    if generates:
        return [language_model_graph(model)]
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{COMMAND} has no graph for {type(model).__name__}; allowed: models that classify or "
            "read images, videos, texts or recordings, and models that generate. "
            "transformers.exporters.OnnxExporter exports others."
        )
    if model.main_input_name == "input_features":
        return [frames_graph(model)]
    if model.main_input_name == "input_values":
        return [spectrogram_graph(model)]
    if "pixel_values" in inspect.signature(stock_class(type(model)).forward).parameters:
        return [text_and_image_graph(model)]
    return [tokens_graph(model)]


def write(graph: Graph, path: Path, opset: int) -> None:
    """Writes a graph; large weights go to a second file with ``.data`` at the end of the name.

    Raises:
        ValueError: if torch cannot export the graph; gives torch's reason.
    """
    axes = [
        {dim: axis for dim, axis in enumerate(port.axes) if isinstance(axis, str)}
        for port in graph.inputs.values()
    ]
    weights = sum(value.nbytes for value in graph.module.state_dict().values())
    try:
        with _quiet():
            program = torch.onnx.export(
                graph.module.eval(),
                draw(graph.inputs, graph.sample),
                dynamo=True,
                dynamic_shapes=(tuple(axes),),
                input_names=list(graph.inputs),
                output_names=graph.outputs,
                opset_version=opset,
                verbose=False,
            )
            for part in program.model.graph.all_nodes():
                part.metadata_props.clear()  # traces of calls, with the paths of this machine
            program.save(path, external_data=weights > ONE_FILE)
    except torch.onnx.OnnxExporterError as error:
        reason = first_line(error.__cause__ or error)
        raise ValueError(
            f"the {graph.name} of {type(graph.module.model).__name__} cannot be exported to ONNX "
            f"({reason}). Try another type of position embedding; transformers.exporters have more "
            "ways to export a model."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences messages of torch about parts of torch and about missing modules."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def compared(graph: Graph, session: Any, sizes: list[dict[str, int]]) -> str:
    """Differences of graph and module at these sizes and with each padding, in words.

    Raises:
        ValueError: if an output differs by more than :data:`TOLERANCE` of the largest value.
    """
    largest = 0.0
    for size in sizes:
        for padding in graph.paddings:
            largest = max(largest, _difference(graph, session, size, padding))
    cases = len(sizes) * len(graph.paddings)
    return f"differs by at most {largest:.1e} from the model in {cases} batches"


def _difference(graph: Graph, session: Any, sizes: dict[str, int], padding: str | None) -> float:
    """The largest difference of outputs, relative to values above 1."""
    values = draw(graph.inputs, sizes, padding)
    with torch.no_grad():
        expected = graph.module(*values)
    inputs = {name: value.numpy() for name, value in zip(graph.inputs, values, strict=True)}
    case = f"{graph.name} at {sizes}, padding {padding}"
    try:
        actual = session.run(None, inputs)
    except Exception as error:  # onnxruntime has a type for each code of an error
        raise ValueError(f"ONNX Runtime cannot run the {case}: {error}") from error
    largest = 0.0
    for name, ours, theirs in zip(graph.outputs, expected, actual, strict=True):
        difference = _distance(ours, theirs)
        if not difference <= TOLERANCE:  # NaN, too
            raise ValueError(
                f"the {name} of the {case}, differs from the {name} of the model by {difference}; "
                f"allowed: {TOLERANCE}. Please report this with the config.json; the model itself "
                "is right."
            )
        largest = max(largest, difference)
    return largest


def _distance(ours: Tensor, theirs: np.ndarray) -> float:
    if tuple(ours.shape) != theirs.shape:
        return float("inf")
    if not theirs.size:
        return 0.0
    scale = max(1.0, ours.abs().max().item())
    return float(np.abs(ours.numpy() - theirs).max()) / scale


def _ports(session: Any) -> tuple[Any, Any]:
    return session.get_inputs(), session.get_outputs()


def _port_descriptions(values: Any) -> list[tuple[str, str, list[Any]]]:
    return [(value.name, value.type, value.shape) for value in values]

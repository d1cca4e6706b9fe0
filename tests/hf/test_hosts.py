"""With torch.compile, torch.export, peft, the Trainer and several processes."""

import json
from operator import attrgetter

import pytest
import torch
import transformers
from packaging.version import Version
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from tests.support.expected import MOVED, types_whose
from tests.support.hf import FAMILIES, OF_FAMILY, VARIANTS, answer, batch, loss, make, targets

# What is resumed, and compiled: each type of random positions in some family.
CHOSEN = {"marian": "rfs+table", "speech_ctc": "randpos", "bert": "rfs"}
CHOSEN |= dict.fromkeys(("vit", "llama"), "cape")
CHOSEN["bart"] = "fire, moved"  # in attention: learned and drawn
RESUMED = ("marian", "vit", "speech_ctc", "llama", "bart")
HALVED = {family: {"augment_probability": 0.5} for family in ("vit", "bart")}


def rows(family, count, repeat=1):
    """A batch of the first `count` samples, with longer sequences if `repeat` is more than 1."""
    inputs = batch(family)
    inputs.pop("labels", None)
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].repeat(1, 1, 1, repeat)
    else:
        inputs = {n: v.repeat(1, repeat, *[1] * (v.dim() - 2)) for n, v in inputs.items()}
    if "input_features" in inputs:  # padding stays behind the last frame
        inputs["attention_mask"] = inputs["attention_mask"].sort(1, descending=True).values
    if "decoder_layers" in FAMILIES[family].sizes:
        inputs["decoder_input_ids"] = targets(3, 4 + repeat) % 30 + 3
    # no views: the graph would be one for the size of what they are views of
    return {name: value[:count].clone() for name, value in inputs.items()}


def shallow(family, name):
    """A model of one layer a stack that keeps no states of what it has seen, to compile soon."""
    depths = {"num_hidden_layers", "encoder_layers", "decoder_layers"}
    sizes = dict.fromkeys(FAMILIES[family].sizes.keys() & depths, 1)
    if hasattr(FAMILIES[family].config(), "use_cache"):
        sizes["use_cache"] = False
    model = make(family, name, **sizes)
    model.set_attn_implementation("sdpa")
    return model


def compare_compiled(family, name, shapes, **options):
    """Forward and backward in training, with augmentation, of a model and of its one graph."""
    if family not in ("vit", "bert") and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("layer drop of this transformers breaks the graph in training")
    model = shallow(family, name).train()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, **options)
    for count, repeat in shapes:
        outcomes = []
        for call in (model, compiled):
            torch.manual_seed(1)
            outcomes.append(answer(call(**rows(family, count, repeat))))
        torch.testing.assert_close(*outcomes, atol=1e-5, rtol=1e-4)
        outcomes[1].sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["marian", "vit"])
def test_compiles_to_one_graph_for_all_shapes(family):
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    compare_compiled(family, "cape", ((2, 1), (3, 2)), dynamic=True, backend="eager")
    assert graphs["unique_graphs"] == 1


IN_ATTENTION = types_whose(attrgetter("in_attention"))
# one family of each other kind of stack; types that act in attention: all in images, one each in
# texts and speech, one with its positions moved; a decoder that draws by its encoder is marian's
COMPILED = [(family, CHOSEN[family]) for family in ("marian", "speech_ctc", "bert", "llama")]
COMPILED += [("vit", name) for name in IN_ATTENTION]
COMPILED += [("marian", [*MOVED][-1]), ("speech_ctc", IN_ATTENTION[1])]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), COMPILED)
def test_compiles_without_graph_breaks(family, name):
    backend = "aot_eager" if family == "bert" else "eager"  # which traces the gradient, too
    compare_compiled(family, name, ((2, 1),), backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["marian", "vit"])
def test_exported_program_is_saved_and_loaded_for_all_shapes(family, tmp_path):
    model, inputs, other = shallow(family, "cape"), rows(family, 3, 2), rows(family, 2, 3)
    with torch.no_grad():
        expected = model(**other).logits
    size = torch.export.Dim.AUTO
    shapes = {key: dict.fromkeys(range(value.dim()), size) for key, value in inputs.items()}
    for key, fixed in (("pixel_values", 1), ("input_features", 2)):
        if key in shapes:
            del shapes[key][fixed]
    exported = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)
    torch.export.save(exported, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    for program in (exported, loaded):
        actual = program.module()(**other).logits
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


class Samples(Dataset):
    """The samples of a batch, over and over."""

    def __init__(self, family, size=24):
        self.batch, self.size = batch(family), size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {name: value[index % 3] for name, value in self.batch.items()}


def train(family, folder, resume=None, **options):
    settings = OF_FAMILY[family][CHOSEN[family]] | HALVED.get(family, {})
    model = FAMILIES[family].build(settings, attn_implementation="eager")
    arguments = TrainingArguments(
        folder, max_steps=4, save_steps=2, per_device_train_batch_size=3, learning_rate=1e-3,
        report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Samples(family))
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model.state_dict(), trainer.state.log_history


@pytest.mark.slow
@pytest.mark.parametrize("family", RESUMED)
def test_trainer_resumes_bit_for_bit(family, tmp_path):
    whole, history = train(family, tmp_path / "whole")
    resumed, _ = train(family, tmp_path / "again", resume=str(tmp_path / "whole" / "checkpoint-2"))
    start = make(family, CHOSEN[family]).state_dict()
    assert any(not torch.equal(value, start[name]) for name, value in whole.items())
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name
    assert len({entry["loss"] for entry in history if "loss" in entry}) > 1


TWO_RANKS = """
import json, os, sys
import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments
from hf_models import RankSeedCallback
from hf_models.switching.modeling import PositionEncoder
from tests.support.hf import FAMILIES, OF_FAMILY, batch, make
from tests.support.sharding import train_sharded
from tests.hf.test_hosts import Samples

def save_sharded(family):
    model = make(family, "cape").train()
    state, seen = train_sharded(model, batch(family), "cpu", 2)
    assert seen == {torch.float32}, (family, seen)
    if dist.get_rank() == 0:
        model.save_pretrained(family, state_dict=state)
    dist.barrier()

dist.init_process_group("gloo")
for family in ("marian", "vit"):
    save_sharded(family)
train_sharded(make("vit", "fire").train(), batch("vit"), "cpu", 2)  # which learns single numbers

chances, common = [], []
stock = PositionEncoder.draw

def noted(self, *args, **kwargs):
    draw = stock(self, *args, **kwargs)
    chances.append(draw.chance.flatten().tolist())
    return draw

class Stream(RankSeedCallback):
    def on_step_end(self, *args, **kwargs):
        super().on_step_end(*args, **kwargs)
        common.append(torch.get_rng_state().sum().item())

PositionEncoder.draw = noted
for words in sys.argv[1:]:
    folder, steps, resume, callback, compiled, family, name = words.split(maxsplit=6)
    settings = {**OF_FAMILY[family][name], "augment_probability": 0.5}
    chances.clear()
    common.clear()
    # as in a compiled model, which cannot have a separate generator
    torch.compiler.is_compiling = lambda: compiled == "yes"
    training = TrainingArguments(
        folder, max_steps=int(steps), save_steps=2, use_cpu=True, report_to="none", seed=5,
        per_device_train_batch_size=3, disable_tqdm=True,
    )
    model = FAMILIES[family].build(settings, attn_implementation="eager").train()
    trainer = Trainer(model, training, train_dataset=Samples(family))
    if callback == "yes":
        trainer.add_callback(Stream())
    trainer.train(resume_from_checkpoint=None if resume == "no" else resume)
    with open(f"{folder}.{training.process_index}", "w") as file:
        json.dump({"chances": chances, "common": common}, file)
trainer.accelerator.end_training()
os._exit(0)  # on a busy machine threads of gloo may outlive the interpreter, which aborts it
"""


@pytest.fixture(scope="module")
def two_ranks(run_cli, tmp_path_factory):
    """The folder of what two processes have trained: sharded models, and models of the Trainer."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "script.py").write_text(TWO_RANKS)
    # folder, steps, what to resume, whether to use the callback and to be compiled, and the model
    model, other = "marian cape", f"vit {next(iter(MOVED))}"
    trainings = (
        *(f"without 2 no no yes {model}", f"whole 4 no yes yes {model}"),
        *(f"again 4 whole/checkpoint-2 yes yes {model}", f"eager 4 no no no {model}"),
        *(f"again-eager 4 eager/checkpoint-2 no no {model}", f"moved 4 no no no {other}"),
        f"again-moved 4 moved/checkpoint-2 no no {other}",
    )
    launch = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
    run_cli(*launch, folder / "script.py", *trainings, cwd=folder)
    return folder


@pytest.mark.slow
def test_ranks_draw_differently_and_resume_alike(two_ranks):
    """Numbers of augmentation differ on the ranks, and are the same after resuming. A compiled
    model needs the callback, between whose steps all ranks share one stream."""

    def drawn_in(folder):
        return [json.loads((two_ranks / f"{folder}.{rank}").read_text()) for rank in (0, 1)]

    without, whole = map(drawn_in, ("without", "whole"))
    assert without[0]["chances"] == without[1]["chances"]  # what the callback is for
    assert whole[0]["common"] == whole[1]["common"]
    again_of = {"whole": "again", "eager": "again-eager", "moved": "again-moved"}
    for ranks, again in (map(drawn_in, names) for names in again_of.items()):
        drawn = [[chance for step in rank["chances"] for chance in step] for rank in ranks]
        assert all(0 < chances.count(1) < len(chances) == 12 for chances in drawn)
        assert drawn[0] != drawn[1]
        for rank in (0, 1):
            assert again[rank]["chances"] == ranks[rank]["chances"][2:]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["marian", "vit"])
def test_sharded_models_keep_positions_in_float32_and_are_saved_whole(family, two_ranks):
    """FSDP2 in mixed precision; the processes look at the precision of the positions."""
    load = FAMILIES[family].model.from_pretrained
    model, report = load(two_ranks / family, output_loading_info=True)
    assert not any(report[f"{keys}_keys"] for keys in ("missing", "unexpected", "mismatched"))
    first = make(family, "cape").state_dict()
    trained = [key for key, value in model.state_dict().items() if not value.equal(first[key])]
    assert len(trained) > len(first) // 2


@pytest.mark.slow
def test_broken_graph_keeps_the_draws_and_compiles_no_binding():
    """Compiled on its own, each module and value that is bound would be another program."""
    model = FAMILIES["bert"].build(VARIANTS["bert"]["cape"], num_hidden_layers=1).train()

    def losses(call):
        torch.manual_seed(1)
        return torch.stack([loss(call(**batch("bert"))).detach() for _ in range(3)])

    expected = losses(model)

    def broken(module, inputs, output):
        torch._dynamo.graph_break()

    model.bert.embeddings.LayerNorm.register_forward_hook(broken)
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    actual = losses(torch.compile(model, backend="eager"))
    torch.testing.assert_close(actual, expected)
    assert len(set(actual.tolist())) == 3
    frames = [m.co_filename or "" for m in torch._dynamo.utils.get_compilation_metrics()]
    assert len(frames) > 3
    assert not [name for name in frames if name.endswith("binding.py")]

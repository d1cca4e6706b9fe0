"""Trainings of models of transformers on a GPU: the Trainer in half precision, resumed trainings,
checkpoints that go to the CPU, processes of NCCL and FSDP2."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from cape_plugins import ENCODINGS, TYPES
from tests.hf.test_hosts import CHOSEN, HALVED, RESUMED, Samples
from tests.support.gpu import DEVICE, ON_GPU, close, deterministic, moved
from tests.support.hf import FAMILIES, OF_FAMILY, answer, batch

pytestmark = pytest.mark.slow


def train(family, folder, resume=None, steps=4, **options):
    settings = OF_FAMILY[family][CHOSEN[family]] | HALVED.get(family, {})
    model = FAMILIES[family].build(settings)
    arguments = TrainingArguments(
        str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=3, report_to=[],
        learning_rate=1e-3, use_cpu=not ON_GPU, disable_tqdm=True, logging_steps=1, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Samples(family))
    with deterministic():
        trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["float32", "bf16"])
@pytest.mark.parametrize("family", RESUMED)
def test_trainer_resumes_bit_for_bit(family, precision, tmp_path):
    whole = train(family, tmp_path / "whole", **precision)
    assert next(whole.model.parameters()).device.type == DEVICE.type
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert len(set(losses)) > 1
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    resumed = train(family, tmp_path / "again", checkpoint, **precision)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


@pytest.mark.skipif(not ON_GPU, reason="on a CPU float16 has no scaled gradients")
@pytest.mark.parametrize("family", RESUMED)
def test_trainer_trains_in_float16(family, tmp_path):
    trainer = train(family, tmp_path, fp16=True)
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())


@pytest.mark.parametrize("family", RESUMED)
def test_checkpoint_of_the_gpu_loads_on_the_cpu(family, tmp_path):
    """In float32 with the same outputs."""
    trainer = train(family, tmp_path, steps=2)
    trainer.save_model(str(tmp_path / "saved"))
    model = trainer.model.eval()
    loaded = FAMILIES[family].auto.from_pretrained(tmp_path / "saved").eval()
    assert next(loaded.parameters()).device.type == "cpu"
    with torch.no_grad():
        close(answer(model(**moved(batch(family)))), answer(loaded(**batch(family))), 1e-3)


ONE_RANK = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from hf_models.switching.modeling import process_generator
from tests.support.gpu import DEVICE, ON_GPU, moved
from tests.support.hf import batch, make, seam
from tests.support.sharding import train_sharded

if ON_GPU:
    torch.cuda.set_device(0)
dist.init_process_group(
    "nccl" if ON_GPU else "gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1
)
one = torch.ones(3, device=DEVICE)
dist.all_reduce(one)
assert one.sum() == 3

# ranks, as several processes see themselves, draw differently with the same seed
model = make("marian", "cape").to(DEVICE).train()
world, rank = dist.get_world_size, dist.get_rank
draws = []
dist.get_world_size = lambda *args: 2
for number in (0, 1, 0):
    dist.get_rank = lambda *args, number=number: number
    torch.manual_seed(1)
    draws.append(seam(model).draw(64, DEVICE, process_generator).shift)
assert all(draw.device.type == DEVICE.type for draw in draws)
assert torch.equal(draws[0], draws[2])
assert not torch.equal(draws[0], draws[1])
dist.get_world_size, dist.get_rank = world, rank

wrapped = DistributedDataParallel(model)
wrapped(**moved(batch("marian"))).loss.backward()
assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)

for family, name in (
    ("marian", "cape"), ("llama", "cape"), *(("vit", name) for name in sys.argv[2:])
):
    model = make(family, name).to(DEVICE).train()
    model.set_attn_implementation("sdpa")
    state, seen = train_sharded(model, moved(batch(family)), DEVICE.type, 1)
    assert seen <= {torch.float32}, (family, seen)
    model.save_pretrained(f"{family}-{name}", state_dict=state)
dist.destroy_process_group()
"""


def test_nccl_draws_by_rank_and_fsdp_keeps_positions_in_float32(run_cli, tmp_path):
    """The process checks what it computes; the sharded models load on the CPU."""
    (tmp_path / "script.py").write_text(ONE_RANK)
    names = ["cape", *(n for n, row in TYPES.items() if ENCODINGS[row.encoding].in_attention)]
    run_cli("python", tmp_path / "script.py", tmp_path / "init", *names, cwd=tmp_path)
    folders = sorted(path.parent for path in tmp_path.glob("*/model.safetensors"))
    assert len(folders) == 2 + len(names)
    for folder in folders:
        auto = FAMILIES[folder.name.split("-")[0]].auto
        _, report = auto.from_pretrained(folder, output_loading_info=True)
        assert not any(report.values()), report

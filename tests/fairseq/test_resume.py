"""Proves that a training killed with SIGKILL and started again ends, bit for bit, where one left
alone ends; that two data-parallel ranks and the micro-batches of an update draw different
shifts; and that ranks resume alike.

The draws are noted by a user directory that wraps the one under test.
"""

import os
import shutil
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch

from tests.support.fairseq_models import CLI_VARIANTS, ROOT, final_state, run_ranks, train_words

pytestmark = pytest.mark.slow
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)

SPY = '''
"""Writes the numbers of each draw to $SPY_LOG.RANK, one line a draw."""
import os
from torch import distributed
from fairseq_user_dir.embedding import TokenPositionEmbedding

draw = TokenPositionEmbedding.draw

def noted(self, batch_size, device):
    drawn = draw(self, batch_size, device)
    if drawn is not None:
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        with open(f"{os.environ['SPY_LOG']}.{rank}", "a") as log:
            numbers = drawn.order[:, :5] if drawn.shift is None else drawn.shift
            print(*numbers.flatten().tolist(), file=log)
    return drawn

TokenPositionEmbedding.draw = noted
'''
FREQUENCY = 2  # micro-batches of an update
HALF = ["--position-augment-probability", 0.5]
RESUMED = {
    "cape+relative, half of the samples": [*CLI_VARIANTS["cape+relative"], *HALF],
    "randpos": CLI_VARIANTS["randpos"],
}


@pytest.fixture
def spy(tmp_path):
    """Words that put the spy in the place of the user directory."""
    folder = tmp_path / "cape_spy"
    folder.mkdir()
    (folder / "__init__.py").write_text(SPY)
    return ["--user-dir", folder, "--update-freq", FREQUENCY, "--disable-validation"]


def draws(log, rank=0):
    return (log.parent / f"{log.name}.{rank}").read_text().splitlines()


def run_until(text, words, log):
    """Runs ``fairseq-train`` and kills it as soon as it prints `text`."""
    program = [sys.executable, "-m", "fairseq_cli.train", *(str(word) for word in words[1:])]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SPY_LOG": str(log)}
    with subprocess.Popen(
        program, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        seen = []
        for line in process.stdout:
            seen.append(line)
            if text in line:
                process.send_signal(signal.SIGKILL)
                break
        process.communicate()
    assert process.returncode == -signal.SIGKILL, "".join(seen)[-3000:]


@pytest.mark.parametrize("name", RESUMED)
def test_killed_training_resumes_bit_for_bit(name, run_cli, corpus, spy, tmp_path):
    logs = {name: tmp_path / f"{name}.log" for name in ("whole", "killed", "resumed")}
    options = [*spy, *RESUMED[name], "--save-interval-updates", 20]

    def words(folder):
        return train_words(corpus.binary, tmp_path / folder, *options, updates=100)

    run_cli(*words("whole"), env={"SPY_LOG": str(logs["whole"])})
    run_until("checkpoint_2_20.pt (epoch 2", words("again"), logs["killed"])
    killed = torch.load(tmp_path / "again" / "checkpoint_last.pt", weights_only=True)
    assert killed["optimizer_history"][-1]["num_updates"] == 20
    output = run_cli(*words("again"), env={"SPY_LOG": str(logs["resumed"])}).stdout
    assert "checkpoint_last.pt (epoch 2 @ 20 updates)" in output

    assert_same(final_state(tmp_path / "again"), final_state(tmp_path / "whole"))
    whole, before, after = (draws(log) for log in logs.values())
    assert len(whole) == 100 * FREQUENCY
    assert before[: 20 * FREQUENCY] + after == whole
    assert len(set(whole)) == len(whole)  # each micro-batch of each update draws anew
    with pytest.raises(AssertionError):  # it did go on: these would be equal otherwise
        assert_same(killed["model"], final_state(tmp_path / "again")[0])


ENDS = {
    "--max-update": ["--max-update", 3],
    "--max-epoch": ["--max-epoch", 1],
    "--stop-time-hours": ["--stop-time-hours", 1e-9],
    # nothing is learnt at this rate, so that the second validation is no better than the first
    "--patience": ["--patience", 1, "--lr", 1e-30, "--validate-interval-updates", 1],
}


@pytest.mark.parametrize("end", ENDS)
def test_finished_training_stays_as_it_is_when_started_again(end, run_cli, corpus, tmp_path):
    words = [*train_words(corpus.binary, tmp_path, updates=30), *ENDS[end]]
    run_cli(*words)
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in tmp_path.iterdir()}
    result = run_cli(*words)
    assert {f: (f.stat().st_mtime_ns, f.read_bytes()) for f in tmp_path.iterdir()} == before
    said = [line for line in (result.stdout + result.stderr).splitlines() if "is finished" in line]
    assert len(said) == 1
    assert f"{end} {ENDS[end][1]}" in said[0]


def test_patience_goes_on_counting_when_a_training_is_resumed(run_cli, corpus, tmp_path):
    """As many validations in all as without an interruption."""
    patience = ["--patience", 3, "--lr", 1e-30, "--validate-interval-updates", 1]
    for updates in (3, 30):
        run_cli(*train_words(corpus.binary, tmp_path, *patience, updates=updates))
    assert final_state(tmp_path)[2] == 4
    patience[1] = 5
    run_cli(*train_words(corpus.binary, tmp_path, *patience))
    assert final_state(tmp_path)[2] == 6


@pytest.mark.parametrize("anew", ["--reset-meters", "--reset-optimizer"])
def test_patience_begins_anew_with_what_it_counts(anew, run_cli, corpus, tmp_path):
    patience = ["--patience", 2, "--lr", 1e-30, "--validate-interval-updates", 1]
    first = tmp_path / "first"
    run_cli(*train_words(corpus.binary, first, *patience))
    before = final_state(first)[2]
    words = ["--restore-file", first / "checkpoint_last.pt", anew]
    run_cli(*train_words(corpus.binary, tmp_path / "second", *patience, *words))
    start = 0 if anew == "--reset-optimizer" else before
    assert final_state(tmp_path / "second")[2] == start + 3


def test_ranks_draw_differently_and_resume_alike(run_cli, corpus, spy, tmp_path):
    options = [*spy, *HALF, "--save-interval-updates", 4]

    def train(folder):
        words = train_words(corpus.binary, tmp_path / folder, *options, updates=8)
        return run_ranks(run_cli, words, env={"SPY_LOG": str(tmp_path / f"{folder}.log")})

    train("whole")
    (tmp_path / "again").mkdir()
    shutil.copy(tmp_path / "whole/checkpoint_1_4.pt", tmp_path / "again/checkpoint_last.pt")
    first_rank, _ = train("again")
    assert "@ 4 updates" in first_rank

    assert_same(final_state(tmp_path / "again"), final_state(tmp_path / "whole"))
    whole = [draws(tmp_path / "whole.log", rank) for rank in (0, 1)]
    resumed = [draws(tmp_path / "again.log", rank) for rank in (0, 1)]
    assert [len(lines) for lines in whole] == [8 * FREQUENCY] * 2
    assert resumed == [lines[4 * FREQUENCY :] for lines in whole]
    every = [float(number) for lines in whole for line in lines for number in line.split()]
    augmented = [number for number in every if number]
    assert len(set(augmented)) == len(augmented)
    assert 0.35 < len(augmented) / len(every) < 0.65
    left_out = [[not float(n) for line in lines for n in line.split()] for lines in whole]
    assert left_out[0] != left_out[1]  # ranks choose samples of their own

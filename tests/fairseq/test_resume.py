"""Proves that a training that is killed and started again ends with the same parameters, bit for
bit, as an uninterrupted training; that ranks and the micro-batches of an update draw different
shifts. The draws are noted by a user directory that wraps the one under test."""

import shutil
import signal
from functools import partial

import pytest
import torch

from fairseq_user_dir.attention import StackAttention
from fairseq_user_dir.embedding import TokenPositionEmbedding
from tests.support.fairseq_models import CLI_VARIANTS, final_state, run_here, run_ranks, train_words

pytestmark = pytest.mark.slow
assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)

SPY = '''
"""Writes the shifts of each draw to $SPY_LOG.RANK, one line a draw, and ends the process in draw
$SPY_KILL."""
import itertools, os, signal
from torch import distributed
from fairseq_user_dir.embedding import TokenPositionEmbedding

draw, numbers = TokenPositionEmbedding.draw, itertools.count(1)

def noted(self, batch_size, device):
    drawn = draw(self, batch_size, device)
    if drawn is not None:
        if os.environ.get("SPY_KILL") == str(next(numbers)):
            os.kill(os.getpid(), signal.SIGKILL)
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        with open(f"{os.environ['SPY_LOG']}.{rank}", "a") as log:
            print(*drawn.shift.flatten().tolist(), file=log)
    return drawn

TokenPositionEmbedding.draw = noted
'''
FREQUENCY = 2  # micro-batches of an update
HALF = ["--position-augment-probability", 0.5]


@pytest.fixture
def spy(tmp_path):
    """Words that put the spy in the place of the user directory."""
    folder = tmp_path / "cape_spy"
    folder.mkdir()
    (folder / "__init__.py").write_text(SPY)
    return ["--user-dir", folder, "--update-freq", FREQUENCY, "--disable-validation"]


def draws(log, rank=0):
    return (log.parent / f"{log.name}.{rank}").read_text().splitlines()


def test_killed_training_resumes_bit_for_bit(run_cli, corpus, spy, tmp_path, monkeypatch):
    """An epoch has 6 updates; the training is killed in the second and ends in the third."""
    logs = {name: tmp_path / f"{name}.log" for name in ("whole", "killed", "resumed")}
    options = [*spy, *CLI_VARIANTS["cape+relative"], *HALF, "--save-interval-updates", 8]
    options += ["--batch-size", 32]
    monkeypatch.setattr(TokenPositionEmbedding, "draw", TokenPositionEmbedding.draw)

    def words_of(folder):
        return train_words(corpus.binary, tmp_path / folder, *options, updates=13)

    def train(folder, log):
        monkeypatch.setenv("SPY_LOG", str(logs[log]))
        return run_here(*words_of(folder))

    train("whole", "whole")
    spied = {"SPY_LOG": str(logs["killed"]), "SPY_KILL": str(8 * FREQUENCY + 1)}
    done = run_cli(*words_of("again"), env=spied, check=False)
    assert done.returncode == -signal.SIGKILL
    killed, _, updates = final_state(tmp_path / "again")
    assert updates == 8
    assert "checkpoint_last.pt (epoch 2 @ 8 updates)" in train("again", "resumed")

    assert_same(final_state(tmp_path / "again"), final_state(tmp_path / "whole"))
    whole, before, after = (draws(log) for log in logs.values())
    assert len(whole) == 13 * FREQUENCY
    assert before + after == whole
    assert len(set(whole)) == len(whole)  # each micro-batch of each update draws anew
    with pytest.raises(AssertionError):  # it did go on: these would be equal otherwise
        assert_same(killed, final_state(tmp_path / "again")[0])


# The same code draws for all of them: one without parameters, one with.
@pytest.mark.parametrize("name", ["rope, moved", "fire, moved"])
def test_training_with_moved_distances_resumes_bit_for_bit(name, corpus, tmp_path, monkeypatch):
    drawn, draw = [], StackAttention.draw

    def noted(*args):
        drawn.append(draw(*args))
        return drawn[-1]

    monkeypatch.setattr(StackAttention, "draw", noted)
    options = [*CLI_VARIANTS[name], *HALF, "--save-interval-updates", 2, "--disable-validation"]

    def train(folder):
        drawn.clear()
        run_here(*train_words(corpus.binary, tmp_path / folder, *options, updates=4))
        return torch.cat([numbers.scale for numbers in drawn]).flatten()

    whole = train("whole")
    (tmp_path / "again").mkdir()
    shutil.copy(tmp_path / "whole/checkpoint_1_2.pt", tmp_path / "again/checkpoint_last.pt")
    resumed = train("again")
    assert_same(final_state(tmp_path / "again"), final_state(tmp_path / "whole"))
    assert torch.equal(resumed, whole[len(whole) // 2 :])
    assert 0.3 < (whole == 1).float().mean() < 0.7
    augmented = whole[whole != 1]
    assert len(augmented.unique()) == len(augmented)


# nothing is learnt at this rate, so that no validation is better than the first
UNCHANGED = ["--lr", 1e-30, "--validate-interval-updates", 1]
ENDS = [
    ["--max-update", 3],
    ["--max-epoch", 1],
    ["--stop-time-hours", 1e-9],
    ["--patience", 1, *UNCHANGED],
]


@pytest.mark.parametrize("end", ENDS)
def test_finished_training_stays_as_it_is_when_started_again(end, corpus, tmp_path):
    words = [*train_words(corpus.binary, tmp_path, "--batch-size", 96, updates=30), *end]
    run_here(*words)
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in tmp_path.iterdir()}
    output = run_here(*words)
    assert {f: (f.stat().st_mtime_ns, f.read_bytes()) for f in tmp_path.iterdir()} == before
    (said,) = [line for line in output.splitlines() if "is finished" in line]
    assert f"{end[0]} {end[1]}" in said


def test_patience_counts_over_resumed_trainings_unless_it_begins_anew(corpus, tmp_path):
    """The number of validations is the same as without an interruption. A training that begins with
    a checkpoint of another training counts from 0 if it does not take over the meters or the
    optimizer."""

    def updates(folder, patience, *more, updates=30):
        more = ["--patience", patience, *UNCHANGED, *more]
        run_here(*train_words(corpus.binary, tmp_path / folder, *more, updates=updates))
        return final_state(tmp_path / folder)[2]

    assert updates("first", 3, updates=3) == 3
    assert updates("first", 3) == 4
    restored = ("--restore-file", tmp_path / "first/checkpoint_last.pt")
    assert updates("meters", 2, *restored, "--reset-meters") == 4 + 3
    assert updates("optimizer", 2, *restored, "--reset-optimizer") == 3


def test_ranks_draw_differently_and_resume_alike(run_cli, corpus, spy, tmp_path):
    options = [*spy, *HALF, "--save-interval-updates", 2]

    def train(folder):
        words = train_words(corpus.binary, tmp_path / folder, *options, updates=4)
        return run_ranks(run_cli, words, env={"SPY_LOG": str(tmp_path / f"{folder}.log")})

    train("whole")
    (tmp_path / "again").mkdir()
    shutil.copy(tmp_path / "whole/checkpoint_1_2.pt", tmp_path / "again/checkpoint_last.pt")
    first_rank, _ = train("again")
    assert "@ 2 updates" in first_rank

    assert_same(final_state(tmp_path / "again"), final_state(tmp_path / "whole"))
    whole = [draws(tmp_path / "whole.log", rank) for rank in (0, 1)]
    resumed = [draws(tmp_path / "again.log", rank) for rank in (0, 1)]
    assert [len(lines) for lines in whole] == [4 * FREQUENCY] * 2
    assert resumed == [lines[2 * FREQUENCY :] for lines in whole]
    every = [float(number) for lines in whole for line in lines for number in line.split()]
    augmented = [number for number in every if number]
    assert len(set(augmented)) == len(augmented)
    assert 0.35 < len(augmented) / len(every) < 0.65
    left_out = [[not float(n) for line in lines for n in line.split()] for lines in whole]
    assert left_out[0] != left_out[1]  # ranks choose different samples

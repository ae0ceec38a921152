"""Faults planted on purpose: each must turn the layout tests red. A check that cannot fail is no check."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import runs
import torch
from spawn import spawn
from test_layouts import TOLERANCE, failures_of
from test_parallel import gather_error, through_gather

import parallel
import stream
from parallel import AllGather, RingAttention, SequenceParallel

attention, shard, generator, travel = (
    SequenceParallel.attention,
    SequenceParallel.shard,
    stream.generator,
    parallel.travel,
)
ring_backward, sum_gradients = RingAttention.backward, parallel.sum_gradients


def padding_attended():
    """The padding behind the last sample passes for tokens of that sample (FAULTS: DiffSynth, Wan2.1's own code)."""

    def faulty(self, q, k, v, lengths):
        padding = len(q) * self.layout.sp - sum(lengths)
        return attention(self, q, k, v, [*lengths[:-1], lengths[-1] + padding])

    return patch.object(SequenceParallel, "attention", faulty)


def rotary_restarts():
    """Every rank turns its tokens as if they were the pack's first."""

    def faulty(self, x):
        is_table = x.ndim == 2 and x.shape[1] == runs.TINY.dim // runs.TINY.num_heads // 2
        return x[: len(shard(self, x))] if is_table else shard(self, x)

    return patch.object(SequenceParallel, "shard", faulty)


def gradients_averaged():
    """DDP's own habit: divide by the world."""

    def faulty(_, bucket) -> torch.futures.Future[torch.Tensor]:
        bucket.buffer().div_(torch.distributed.get_world_size())
        return sum_gradients(_, bucket)

    return patch.object(parallel, "sum_gradients", faulty)


def stale_keys():
    """The ring's backward uses the keys that it began with at every hop (diffusers#14265)."""

    def stale(kv, group):
        for hop, _, last in travel(kv, group):
            yield hop, kv, last

    def faulty(ctx, grad):
        with patch.object(parallel, "travel", stale):
            return ring_backward(ctx, grad)

    return patch.object(RingAttention, "backward", staticmethod(faulty))


def noise_per_rank():
    """Noise keyed by the rank as well as by the position."""

    def faulty(seed, position, purpose):
        rank = torch.distributed.get_rank() if purpose == "noise" else 0
        return generator(seed + 1000 * rank, position, purpose)

    return patch.object(stream, "generator", faulty)


def gather_without_backward():
    """The gather of inference code, lifted into a trainer: no gradient comes back through it."""
    return patch.object(AllGather, "backward", staticmethod(lambda ctx, grad: (None, None)))


@contextmanager
def nothing():
    yield


TRAINING = {  # fault: the layouts of two processes that must notice it
    nothing: [{"sp": 1}, {"ulysses": 2}, {"ring": 2}],
    padding_attended: [{"ulysses": 2}, {"ring": 2}],
    rotary_restarts: [{"ulysses": 2}, {"ring": 2}],
    gradients_averaged: [{"sp": 1}, {"ulysses": 2}, {"ring": 2}],
    stale_keys: [{"ring": 2}],
    noise_per_rank: [{"ulysses": 2}, {"ring": 2}],
}


def run_faulty(folder, faults):
    """[fault][layout]: the runs with each fault planted."""
    results = []
    for fault in faults:
        with fault():
            results.append(
                runs.run_all(folder, [dict(steps=2, optimizer="sgd", **layout) for layout in TRAINING[fault]])
            )
    return results


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """What the layout test finds wrong with each fault: {fault: [layouts that fail]}."""
    folder = tmp_path_factory.mktemp("faults")
    runs.prepare(folder)
    references = {"sgd": runs.run(folder, steps=2, optimizer="sgd")}
    results = spawn(run_faulty, 2, folder, list(TRAINING))
    found = {}
    for i, (fault, layouts) in enumerate(TRAINING.items()):
        cases = [layout | {"optimizer": "sgd"} for layout in layouts]
        failures = failures_of(cases, [rank[i] for rank in results], references)
        found[fault] = [layout for layout in layouts if any(f[0] == layout | {"optimizer": "sgd"} for f in failures)]
    return found


@pytest.mark.parametrize("fault", TRAINING, ids=lambda fault: fault.__name__)
def test_layout_tests_notice(verdicts, fault):
    """If this goes, the layout tests are blind to a fault that other trainers really had (or see one in clean code)."""
    assert verdicts[fault] == ([] if fault is nothing else TRAINING[fault])


def faulty_gather():
    with gather_without_backward():
        return through_gather([(2, 1)])


def test_gather_test_notices():
    """If this goes, the gather's gradient is no longer tested."""
    assert gather_error(2, [(2, 1)], spawn(faulty_gather, 2)) > TOLERANCE

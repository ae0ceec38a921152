"""--cost fit: how a step is divided over ranks by measured times, without a trace in what is trained."""

import dataclasses
import json
import os
from unittest.mock import patch

import pytest
import runs
from spawn import spawn
from test_layouts import TOLERANCE

import stream
from stream import Cost

ALIKE, LINEAR = Cost(0.0, 0.0, 1.0), Cost(1.0, 0.0, 0.0)  # all samples cost the same, or as many as they have tokens
OPTIONS = dict(cost="fit", lr_schedule="constant", save_every=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cost")
    runs.prepare(folder)
    return folder


def run_measured(folder, cases: list[tuple[Cost, dict]]) -> list[dict]:
    """Runs that measure these costs, on rank 0 and nowhere else."""
    records = []
    for cost, options in cases:

        def measure(block_pass, packs, cost=cost):
            assert os.environ["RANK"] == "0"
            return cost

        with patch.object(stream, "measure_cost", measure):
            records.append(runs.run(folder, **OPTIONS, **options))
    return records


def test_cost_divides_and_changes_nothing_else(folder):
    """If this goes, ranks divide a step by times of their own, or the curve follows the clock, or a resumed run
    measures again and adds up in another order than the run that it goes on with."""
    reference = runs.run(folder, lr_schedule="constant")
    cases = [(ALIKE, {"run": "alike"}), (LINEAR, {"run": "linear"})]
    cases += [(ALIKE, {"run": "resumed", "steps": 2}), (LINEAR, {"run": "resumed", "resume": "latest"})]
    ranks = spawn(run_measured, 2, folder, cases)
    alike, linear, _, resumed = ranks[0]
    for record in alike, linear:
        assert max(runs.worst(record, reference).values()) < TOLERANCE
    assert set(idle(folder, "alike")) == {0.0} and min(idle(folder, "linear")) > 0  # by each one's own measure
    assert alike["digests"] != linear["digests"]  # rounding shows that they divided otherwise
    assert resumed["digests"][-1] == alike["digests"][-1]
    assert [r["digests"] for r in ranks[0]] == [r["digests"] for r in ranks[1]]
    for file in ("config.json", "step-000004/config.json"):
        assert json.loads((folder / "runs" / "resumed" / file).read_text())["cost"] == dataclasses.asdict(ALIKE)


def idle(folder, run: str) -> list[float]:
    return [json.loads(line)["idle"] for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]


def test_cost_is_measured(folder):
    """If this goes, --cost fit times nothing, and the default something."""
    runs.run(folder, cost="fit", steps=1, run="fit")
    cost = json.loads((folder / "runs" / "fit" / "config.json").read_text())["cost"]
    assert cost.keys() == vars(ALIKE).keys() and 0 < Cost(**cost)(45) < 10  # seconds
    runs.run(folder, steps=1, run="flops")
    assert json.loads((folder / "runs" / "flops" / "config.json").read_text())["cost"] is None

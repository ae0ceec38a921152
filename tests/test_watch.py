"""What a run shows of itself: validation, videos, the first batch, the losses taken apart, and steps left out."""

import dataclasses
import json
import math
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import runs
import torch
from safetensors.torch import load_file
from spawn import spawn
from torch.distributed.tensor import DTensor

import batch
import flow
import model
import presets
import stream
import train
import watch

TOLERANCE = 1e-9
HELD_OUT = {"x": (9, 32, 48), "y": (1, 64, 32), "z": (5, 16, 16)}  # 18 + 8 + 2 tokens
SIGMAS = 2
LAYOUTS = {"ddp": {}, "grads": {"shard": "grads"}, "full": {"shard": "full"}, "sp": {"ulysses": 2}}
BROKEN = 5  # the position whose loss is no number, where that is wanted: of the second step


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watch")
    runs.prepare(folder)
    runs.write_files(folder / "held", HELD_OUT)
    (folder / "prompts.txt").write_text("a moves left\nb moves up\nc moves down\n")
    return folder


def looking(folder, **changes) -> dict:
    """Options of a run of three steps that validates, with videos, after the second and at the end."""
    shown = dict(validation=str(folder / "held"), validate_every="2", validation_sigmas=SIGMAS)
    return dict(steps=3, ema=0.7, sample=True, prompts=str(folder / "prompts.txt")) | shown | changes


def metrics(folder, run: str) -> list[dict]:
    """What was logged of each step: of training, and in a line of its own of validation."""
    steps: dict[int, dict] = {}
    for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        steps.setdefault(record["step"], {}).update(record)
    return list(steps.values())


def run(folder, broken: bool = False, **options) -> dict:
    """runs.run, sampling few and small frames. The record also has modes: is the whole model in train mode, and
    states: of what a step changes, this rank's, before each step and at the end."""
    whole_loss, whole_step = batch.pack_loss, train.train_step
    modes, states = [], []

    def pack_loss(wrapped, pack, layout, dtype):
        loss = whole_loss(wrapped, pack, layout, dtype)
        return loss * math.nan if broken and BROKEN in pack.positions else loss

    def train_step(step, now, parts, *rest):
        modes.append(all(module.training for module in parts[""].wrapped.modules()))
        states.append(state_of(parts[""]))
        record = whole_step(step, now, parts, *rest)
        states[step + 1 :] = [state_of(parts[""])]
        return record

    small = dataclasses.replace(presets.PRESETS["demo"].sampling, height=16, width=16, frames=5, steps=1)
    demo = dataclasses.replace(presets.PRESETS["demo"], sampling=small)
    with (
        patch.dict(presets.PRESETS, demo=demo),
        patch.object(batch, "pack_loss", pack_loss),
        patch.object(train, "train_step", train_step),
    ):
        record = runs.run(folder, **options)
    return record | {"modes": modes, "states": states}


def state_of(part) -> list[torch.Tensor]:
    moments = [x for state in part.optimizer.state.values() for x in state.values()]
    tensors = [*part.parameters, *moments, *part.ema.values()]
    return [(x.to_local() if isinstance(x, DTensor) else x).detach().clone() for x in tensors]


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ones) == len(others) and all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def run_all(folder, cases: list[dict]) -> list[dict]:
    return [run(folder, **case) for case in cases]


@pytest.fixture(scope="module")
def one(folder):
    """One process that looks, and one that does not."""
    return {name: run(folder, **looking(folder, run=f"one-{name}", **options)) for name, options in LOOKS.items()}


LOOKS = {"looking": {}, "blind": {"validation": "", "validate_every": "0", "sample": False}}
BLIND = ("ddp", "grads", "full")


@pytest.fixture(scope="module")
def two(folder, one):
    """Two processes in every layout, looking and not, and with a step that is no number: {run: [record by rank]}."""
    cases = [looking(folder, run=f"{layout}-looking", **options) for layout, options in LAYOUTS.items()]
    cases += [looking(folder, run=f"{layout}-blind", **LAYOUTS[layout], **LOOKS["blind"]) for layout in BLIND]
    cases += [
        dict(run=f"{layout}-skip", broken=True, on_nonfinite="skip", ema=0.7, pack_tokens=45) | LAYOUTS[layout]
        for layout in ("ddp", "full")
    ]
    results = spawn(run_all, 2, folder, cases)
    return {case["run"]: [records[i] for records in results] for i, case in enumerate(cases)}


# ---------------------------------------------------------------------------------------------------------------------
# Validation


def test_the_validation_loss_does_not_depend_on_the_layout(folder, two):
    """If this goes, two curves of held-out loss are not comparable: the layout shows in them, or in the averaged
    weights they are made with, or in the files of these that a run leaves."""
    expected = [line["validation"] for line in metrics(folder, "one-looking")[1:]]
    assert expected[0]["loss"] != expected[1]["loss"] and len(expected[0]["loss_sigma"]) == SIGMAS
    average = load_file(folder / "runs" / "one-looking" / "step-000003" / "ema.safetensors")
    for layout in LAYOUTS:
        found = [line["validation"] for line in metrics(folder, f"{layout}-looking")[1:]]
        for now, wanted in zip(found, expected, strict=True):
            assert flat(now) == pytest.approx(flat(wanted), rel=TOLERANCE), layout
        saved = load_file(folder / "runs" / f"{layout}-looking" / "step-000003" / "ema.safetensors")
        assert max(runs.distance(saved[name], x) for name, x in average.items()) < TOLERANCE, layout


def flat(record: dict) -> dict[str, float]:
    return dict(watch.flat(record))


def test_training_does_not_notice_that_it_is_watched(one, two):
    """If this goes, a validation changes what is trained: averaged weights, gradients or a mode stay behind in the
    model, or random numbers are used up. Under FSDP2 it is the gathered weights of a pass that may stay."""
    pairs = [(one["looking"], one["blind"])]
    pairs += [pair for layout in BLIND for pair in zip(two[f"{layout}-looking"], two[f"{layout}-blind"], strict=True)]
    for watched, blind in pairs:
        assert watched["digests"] == blind["digests"] and watched["loss"] == blind["loss"]
        assert all(watched["modes"])
        assert all(same(a, b) for a, b in zip(watched["states"], blind["states"], strict=True))
        for now, then in zip(watched["grads"], blind["grads"], strict=True):
            assert all(torch.equal(now[name], x) for name, x in then.items())


def test_the_validation_loss_is_the_averaged_model_s(folder):
    """If this goes, the loss is another model's than the one that is sampled and saved, or of other noise, sigmas or
    captions than every other time. Computed again here from the file of averaged weights, a sample at a time."""
    kept, whole = [], watch.Validation.loss

    def loss(self, parts):
        kept.append(self.held_out)
        return whole(self, parts)

    with patch.object(watch.Validation, "loss", loss):
        run(folder, **looking(folder, run="average", sample=False))
    saved = folder / "runs" / "average" / "step-000003"
    dataset, lines = kept[-1], metrics(folder, "average")
    averaged, last = (loss_of(load_file(saved / f"{name}.safetensors"), dataset) for name in ("ema", "model"))
    assert lines[-1]["validation"]["loss"] == pytest.approx(averaged, rel=1e-12)
    assert abs(averaged - last) / last > 1e-3


def loss_of(weights: dict[str, torch.Tensor], dataset) -> float:
    """Mean squared error of the velocity over all items and places of the schedule, without a pack or a weight."""
    dit, losses = model.WanDiT(runs.TINY).double(), []
    dit.load_state_dict(weights)
    for i in range(len(dataset)):
        x, text = dataset.sample(i, 0)["latents"].double(), dataset.text(i).double()
        for k in range(SIGMAS):
            place = torch.tensor([(k + 0.5) / SIGMAS], dtype=torch.float64)
            sigma = flow.shift_sigmas(place, presets.PRESETS["demo"].sampling.shift)
            noise = torch.randn(x.shape, generator=stream.generator(0, -1 - i * SIGMAS - k, "noise")).double()
            with torch.no_grad():
                velocity = dit([(1 - sigma) * x + sigma * noise], 1000 * sigma, [text])[0]
            losses.append(float((velocity - (noise - x)).square().mean()))
    return sum(losses) / len(losses)


def test_the_same_weights_have_the_same_validation_loss(folder):
    """If this goes, the curve of the held-out loss shows the luck of the draw. The model stands still here, the draws
    of training do not; and packs of any size give the same number."""
    still = looking(folder, validate_every="1", sample=False, lr=0.0, run="still")
    losses = [line["validation"]["loss"] for line in run(folder, **still) and metrics(folder, "still")]
    assert len(losses) == 3 and len(set(losses)) == 1
    run(folder, **still | {"steps": 1, "pack_tokens": 45})
    assert metrics(folder, "still")[0]["validation"]["loss"] == pytest.approx(losses[0], rel=1e-12)


def test_what_fits_no_pack_is_found_at_the_start(folder):
    """If this goes, a run fails days later, at the step that draws its longest sample, or at its first validation."""
    runs.write_files(folder / "long", {"long": (9, 80, 80)})
    with pytest.raises(
        ValueError, match="a sample of 45 tokens does not fit --pack-tokens 44; use --pack-tokens 45 or"
    ):
        runs.run(folder, run="unfit", pack_tokens=44)
    with pytest.raises(
        ValueError, match="a sample of 75 tokens does not fit --pack-tokens 74; use --pack-tokens 75 or"
    ):
        runs.run(folder, run="unfit", pack_tokens=74, validation=str(folder / "long"), cache=str(folder / "fresh"))
    (folder / "broken").mkdir()
    (folder / "broken" / "x.mp4").write_bytes(b"no video")
    (folder / "broken" / "x.txt").write_text("nothing")
    with pytest.raises(ValueError, match="none of its samples can be used:\n  .*x.mp4"):
        runs.run(folder, run="unfit", validation=str(folder / "broken"), cache=str(folder / "fresh"))
    assert not [*(folder / "fresh").glob("*/*.safetensors")]  # before anything was encoded
    with pytest.raises(
        ValueError, match=r"75 tokens, which 2 ranks share, .* --pack-tokens 37; use --pack-tokens 38 or"
    ):
        stream.check_fits(75, 37, 2)
    assert not (folder / "runs" / "unfit" / "metrics.jsonl").exists()


def test_validation_takes_no_larger_batch_than_training(folder):
    """If this goes, a run that fits its memory dies in its first validation: all held-out items at once."""
    sizes, whole = [], batch.divide

    def divide(drawn, *rest):
        if drawn[0].position < 0:  # held out
            sizes.append(len(drawn))
        return whole(drawn, *rest)

    with patch.object(batch, "divide", divide):
        run(folder, **looking(folder, sample=False, steps=1, batch_size=2, run="sizes"))
    assert sizes == [2, 2, 2] and sum(sizes) == len(HELD_OUT) * SIGMAS


def test_validate_every_is_steps_or_epochs(folder):
    """If this goes, validations come at other steps than asked for, or a slip of the pen shows after hours."""
    assert watch.steps_between("500", 9, 4) == 500 and watch.steps_between("0", 9, 4) == 0
    assert watch.steps_between("2ep", 9, 4) == 5  # the first step that has seen all of both epochs
    assert watch.steps_between("1ep", 8, 4) == 2
    for value in ("often", "ep", "-1", "1.5ep", "2 ep", "2epochs"):
        with pytest.raises(ValueError, match="--validate-every"):
            train.check(train.settle(runs.config(folder, validate_every=value)))
    with pytest.raises(ValueError, match="--validation nowhere"):
        train.check(train.settle(runs.config(folder, validation="nowhere")))
    with pytest.raises(ValueError, match="--validation-sigmas 0"):
        train.check(train.settle(runs.config(folder, validation_sigmas=0)))


def test_validations_come_when_due(folder):
    """If this goes, --validate-every 2ep validates at other steps, or the end of a run goes unlooked at."""
    run(folder, **looking(folder, sample=False, steps=3, batch_size=4, validate_every="2ep", run="epochs"))
    assert ["validation" in line for line in metrics(folder, "epochs")] == [False, True, True]
    run(folder, **looking(folder, sample=False, steps=2, validate_every="0", run="end"))
    assert ["validation" in line for line in metrics(folder, "end")] == [False, True]


def test_videos_land_where_they_belong(folder, two):
    """If this goes, a validation writes over the one before, or the last videos are not in samples/ itself."""
    for layout in LAYOUTS:
        samples = folder / "runs" / f"{layout}-looking" / "samples"
        files = {"contact_sheet.png"} | {f"00{i}.{kind}" for i in range(3) for kind in ("mp4", "txt")}
        for place in (samples / "step-000002", samples):
            assert {path.name for path in place.iterdir() if path.is_file()} == files, place
        assert [path.name for path in samples.iterdir() if path.is_dir()] == ["step-000002"]
        assert (samples / "001.txt").read_text() == "b moves up"
    assert not (folder / "runs" / "one-blind" / "samples").exists()


def test_the_text_encoder_does_not_stay(folder):
    """If this goes, a run keeps 11 GB of umT5 on its GPU from the first validation on."""
    kept, whole = [], watch.Validation.__call__

    def call(self, step, parts):
        before = len(self.components.encoder)
        record = whole(self, step, parts)
        kept.append((before, len(self.components.encoder)))
        return record

    with patch.object(watch.Validation, "__call__", call):
        run(folder, **looking(folder, steps=1, run="encoder"))
    assert kept == [(0, 0)]


# ---------------------------------------------------------------------------------------------------------------------
# The record of a step


def test_losses_add_up(folder, two):
    """If this goes, metrics.jsonl says of single samples what does not make up the loss: a rank's share is missing or
    there twice."""
    lines = metrics(folder, "one-looking")
    for layout in LAYOUTS:
        for line, wanted in zip(metrics(folder, f"{layout}-looking"), lines, strict=True):
            assert line["loss_raw"] == pytest.approx(line["loss"], rel=1e-12), layout
            assert line["loss_sigma"] == pytest.approx(wanted["loss_sigma"], rel=TOLERANCE)


@pytest.mark.parametrize("experts", [False, True])
def test_losses_taken_apart(folder, experts):
    """If this goes, the raw loss is weighted, a bin of sigma holds other samples' losses, or an expert's loss is not
    the mean over its own samples."""
    seen, whole = [], watch.losses_of

    def losses_of(now, shares, config):
        seen.append((now, shares))
        return whole(now, shares, config)

    changes = dict(model="demo-t2v-experts", checkpoint="scratch") if experts else {}
    changes |= dict(steps=2, batch_size=6, sample=False)
    runs.run(folder, run="plain", **changes)
    with patch.object(watch, "losses_of", losses_of):
        runs.run(folder, run="bell", loss_weight="bell", **changes)
    (now, shares), line, plain = seen[0], metrics(folder, "bell")[0], metrics(folder, "plain")[0]
    assert sum(shares) == pytest.approx(line["loss"], rel=1e-12) and abs(line["loss"] / plain["loss"] - 1) > 0.01
    assert line["loss_raw"] == pytest.approx(plain["loss"], rel=1e-12)  # the same weights and draws in a first step
    assert line["loss_sigma"] == pytest.approx(plain["loss_sigma"], rel=1e-9)
    counts = {key: sum(key == f"{math.floor(sigma * 10) / 10}" for sigma in now.sigmas) for key in line["loss_sigma"]}
    assert sum(counts.values()) == 6 and len(counts) > 2
    assert sum(counts[key] * line["loss_sigma"][key] for key in counts) / 6 == pytest.approx(
        line["loss_raw"], rel=1e-12
    )
    if experts:
        high, low = line["samples_high"], line["samples_low"]
        assert high + low == 6 and high and low and high == sum(sigma >= 0.875 for sigma in now.sigmas)
        mean = (high * line["loss_high"] + low * line["loss_low"]) / 6
        assert mean == pytest.approx(line["loss"], rel=1e-12)
        weighted = zip(now.sigmas, shares, strict=True)
        assert line["loss_high"] == pytest.approx(sum(x for s, x in weighted if s >= 0.875) * 6 / high, rel=1e-12)


def test_first_batch_shows_what_the_first_step_sees(folder):
    """If this goes, people look at other clips and captions than the model is trained on."""
    packs, shown, given, whole = [], [], [], (batch.pack_loss, watch.first_batch, watch.contact_sheet)

    def pack_loss(wrapped, pack, layout, dtype):
        packs.append(pack)
        return whole[0](wrapped, pack, layout, dtype)

    def first_batch(config, dataset, decode, *rest):
        given.extend((dataset, decode))
        return whole[1](config, dataset, decode, *rest)

    def contact_sheet(path, videos):
        shown.extend(videos)
        whole[2](path, videos)

    with (
        patch.object(batch, "pack_loss", pack_loss),
        patch.object(watch, "first_batch", first_batch),
        patch.object(watch, "contact_sheet", contact_sheet),
    ):
        runs.run(folder, steps=1, caption_dropout=0.5, batch_size=6, run="first")
    (pack,), (dataset, decode) = packs, given
    lines = dict(zip(range(6), (folder / "runs" / "first" / "first_batch.txt").read_text().splitlines(), strict=True))
    dropped = []
    for position, index, clean, text in zip(pack.positions, pack.samples, pack.clean, pack.text, strict=True):
        item = dataset.items[index]
        dropped.append(torch.equal(text, dataset.empty_text))
        assert lines[position] == f"{item.path}: {'(dropped) ' if dropped[-1] else ''}{item.caption}"
        assert torch.equal(shown[position], decode(clean))
    assert any(dropped) and not all(dropped)
    assert (folder / "runs" / "first" / "first_batch.png").read_bytes()[:4] == b"\x89PNG"


def test_tensorboard_has_what_the_metrics_have(folder, two):
    """If this goes, runs of several processes die where TensorBoard is installed (its writer cannot be sent to other
    ranks), or a short run's numbers never reach its file."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for layout in LAYOUTS:
        events = accumulator.EventAccumulator(str(folder / "runs" / f"{layout}-looking" / "tensorboard")).Reload()
        for line in metrics(folder, f"{layout}-looking"):
            for name, value in watch.flat(line):
                assert name in events.Tags()["scalars"], name
                at = {event.step: event.value for event in events.Scalars(name)}
                assert at[line["step"]] == pytest.approx(value, rel=1e-6), name
    assert {"loss", "seconds/forward", "validation/loss", "validation/loss_sigma/0.9"} <= set(events.Tags()["scalars"])


def test_tensorboard_may_be_absent(folder):
    """If this goes, picowan needs TensorBoard."""
    with patch("watch.importlib.util.find_spec", lambda name: None if name == "tensorboard" else find_spec(name)):
        runs.run(folder, steps=1, run="bare")
    assert len(metrics(folder, "bare")) == 1 and not (folder / "runs" / "bare" / "tensorboard").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Steps that are left out


@pytest.mark.parametrize("name", ["one", "ddp", "full"])
def test_a_skipped_step_changes_nothing(folder, two, name):
    """If this goes, --on-nonfinite skip lets a NaN into weights, averages or the optimizer's moments on some rank, does
    not say which samples it came from, or does not go on."""
    options = dict(broken=True, on_nonfinite="skip", ema=0.7, pack_tokens=45, run="one-skip")
    for record in [run(folder, **options)] if name == "one" else two[f"{name}-skip"]:
        states = record["states"]
        assert [same(a, b) for a, b in zip(states, states[1:], strict=False)] == [False, True, False, False]
        assert all(x.isfinite().all() for x in states[-1]) and math.isnan(record["loss"][1])
    lines = metrics(folder, f"{name}-skip")
    assert [line["step"] for line in lines if "skipped" in line] == [2] and len(lines) == 4
    assert "was not applied" in lines[1]["skipped"]
    named = lines[1]["skipped"].partition("Positions: ")[2].partition(".")[0].split(", ")
    assert str(BROKEN) in named and len(named) < 4  # its pack, not the whole batch
    saved = load_file(folder / "runs" / f"{name}-skip" / "step-000004" / "model.safetensors")
    assert all(x.isfinite().all() for x in saved.values())

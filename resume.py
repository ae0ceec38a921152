"""Training state on disk, by torch.distributed.checkpoint: every tensor whole under its official name, whatever held
it when it was saved; so it loads under any number of processes and any sharding.

    runs/NAME/step-000100/model.safetensors      weights in official names, in the master dtype
    runs/NAME/step-000100/ema.safetensors        their moving average, with --ema
    runs/NAME/step-000100/state/                 weights, optimizer and average, sharded
    runs/NAME/step-000100/config.json            the options and the layout that wrote it
    runs/NAME/latest                             the name of the newest complete checkpoint
"""

import json
import os
import shutil
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from weights import whole_weights, write_weights


def save(run: Path, step: int, model: nn.Module, optimizer, ema: dict[str, Tensor], config: dict, layout, keep: int):
    """Write runs/NAME/step-STEP and name it in `latest`; every rank calls. Of older checkpoints the last `keep` stay
    (0: all)."""
    final = run / f"step-{step:06d}"
    partial = run / f"{final.name}.partial"
    layout.on_rank_0(prepare_folder, partial)
    dcp.save(training_state(model, optimizer, ema), checkpoint_id=partial / "state", no_dist=layout.world == 1)
    weights = whole_weights(dict(model.named_parameters()), layout.rank)
    averages = whole_weights(ema, layout.rank)
    layout.on_rank_0(finish, run, partial, final, weights, averages, {**config, "step": step}, keep)


def prepare_folder(partial: Path):
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def finish(run: Path, partial: Path, final: Path, weights: dict, averages: dict, config: dict, keep: int):
    """Rank 0's part of `save`: the weights files, then the names under which others find the checkpoint."""
    write_weights(weights, partial / "model.safetensors")
    if averages:
        write_weights(averages, partial / "ema.safetensors")
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    temporary = run / "latest.partial"
    temporary.write_text(final.name)
    os.replace(temporary, run / "latest")
    for old in sorted(run.glob("step-*[0-9]"))[:-keep] if keep else []:
        shutil.rmtree(old)


def find(run: Path, which: str) -> Path:
    """The checkpoint folder that --resume names: "latest", or a path."""
    if which != "latest":
        folder = Path(which).expanduser()
    elif (run / "latest").is_file():
        folder = run / (run / "latest").read_text().strip()
    else:
        raise ValueError(f"--resume latest: {run} holds no checkpoint; start without --resume, or name one by its path")
    if not (folder / "config.json").is_file():
        raise ValueError(f"--resume {which}: {folder} is not a complete checkpoint")
    return folder


def load(folder: Path, model: nn.Module, optimizer, ema: dict[str, Tensor], layout) -> int:
    """Restore weights, optimizer and average in place; returns how many steps they have seen."""
    state = training_state(model, optimizer, ema)
    dcp.load(state, checkpoint_id=folder / "state", no_dist=layout.world == 1)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for name, tensor in state["ema"].items():
        ema[name].copy_(tensor)
    return json.loads((folder / "config.json").read_text())["step"]


def training_state(model: nn.Module, optimizer, ema: dict[str, Tensor]) -> dict:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "ema": ema,
    }

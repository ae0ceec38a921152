"""Training state on disk, by torch.distributed.checkpoint: every tensor whole under its official name, whatever held
it when it was saved; so it loads under any number of processes and any sharding.

    runs/NAME/step-000100/model.safetensors      weights in official names, in the master dtype
    runs/NAME/step-000100/ema.safetensors        their moving average, with --ema
    runs/NAME/step-000100/state/                 weights, optimizer and average, sharded
    runs/NAME/step-000100/high-model.safetensors ... where there are two experts, each has files of its own
    runs/NAME/step-000100/config.json            the options and the layout that wrote it
    runs/NAME/latest                             the name of the newest complete checkpoint
"""

import json
import os
import shutil
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from weights import whole_weights, write_weights

TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)  # frozen weights come from --checkpoint


def save(run: Path, step: int, parts: dict, config: dict, layout, keep: int):
    """Write runs/NAME/step-STEP and name it in `latest`; every rank calls. parts: {expert: train.Part}. Of older
    checkpoints the last `keep` stay (0: all)."""
    final = run / f"step-{step:06d}"
    partial = run / f"{final.name}.partial"
    layout.on_rank_0(prepare_folder, partial)
    dcp.save(training_state(parts), checkpoint_id=partial / "state", no_dist=layout.world == 1)
    files = {}
    for expert, part in parts.items():
        prefix = f"{expert}-" if expert else ""
        files[f"{prefix}model.safetensors"] = whole_weights(dict(part.model.named_parameters()), layout.rank)
        if part.ema:
            files[f"{prefix}ema.safetensors"] = whole_weights(part.ema, layout.rank)
    layout.on_rank_0(finish, run, partial, final, files, {**config, "step": step}, keep)


def prepare_folder(partial: Path):
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def finish(run: Path, partial: Path, final: Path, files: dict, config: dict, keep: int):
    """Rank 0's part of `save`: the weights files, then the names under which others find the checkpoint."""
    for name, named in files.items():
        write_weights(named, partial / name)
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


def load(folder: Path, parts: dict, layout) -> int:
    """Restore weights, optimizer and average in place; returns how many steps they have seen."""
    state = training_state(parts)
    dcp.load(state, checkpoint_id=folder / "state", no_dist=layout.world == 1)
    for expert, part in parts.items():
        mine = state[expert] if expert else state
        set_model_state_dict(part.model, mine["model"], options=TRAINED)
        set_optimizer_state_dict(part.model, part.optimizer, mine["optimizer"], options=TRAINED)
        for name, tensor in mine["ema"].items():
            part.ema[name].copy_(tensor)
    return json.loads((folder / "config.json").read_text())["step"]


def training_state(parts: dict) -> dict:
    """What is trained of each expert, and all that belongs to it; of a single model without a name around it."""
    states = {
        expert: {
            "model": get_model_state_dict(part.model, options=TRAINED),
            "optimizer": get_optimizer_state_dict(part.model, part.optimizer, options=TRAINED),
            "ema": part.ema,
        }
        for expert, part in parts.items()
    }
    return states.get("", states)

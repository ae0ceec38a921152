"""Weights and training state on disk.

Weights: official files, `.safetensors` (one, or shards with an index) and `.pth` (tensors only), loaded strictly.
Training state: torch.distributed.checkpoint, every tensor whole under its official name, whatever held it when it was
saved; so it loads under any number of processes and any sharding.

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

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

# ---------------------------------------------------------------------------------------------------------------------
# Weights


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a weights file, or of a folder that holds one. ValueError, naming the file, where that fails."""
    files = weight_files(Path(path).expanduser())
    state = {}
    for file in files:
        try:
            if file.suffix == ".safetensors":
                part = load_file(file)
            else:  # official .pth and .bin files: tensors only, no code
                part = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # truncated, not a weights file, a pickle that holds code: one line for each
            raise ValueError(f"{file} cannot be read as weights: {type(error).__name__}: {error}") from error
        state |= part
    return state


def weight_files(path: Path) -> list[Path]:
    if path.is_file() and path.name.endswith(".index.json"):
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        files = [path.parent / name for name in names]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ValueError(f"{path}: {len(missing)} of {len(files)} shards are missing: {', '.join(missing)}")
        return files
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    for pattern in ("*.safetensors.index.json", "*.safetensors", "*.pth"):
        if found := sorted(path.glob(pattern)):
            if len(found) > 1:
                raise ValueError(
                    f"{path} holds {len(found)} files {pattern}; name one: {', '.join(f.name for f in found)}"
                )
            return weight_files(found[0])
    raise ValueError(f"{path} holds no .safetensors or .pth file")


def load_weights(module: nn.Module, path: str | Path, what: str) -> nn.Module:
    """Load a weights file into `module`, every name and shape; ValueError that says what differs."""
    state, own = read_weights(path), module.state_dict()
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or extra:
        lists = [
            f"{len(names)} {kind} (first {names[0]})"
            for kind, names in (("missing", missing), ("extra", extra))
            if names
        ]
        raise ValueError(f"{path} is not {what}: of its {len(state)} tensors for {len(own)} names, {', '.join(lists)}")
    wrong = [name for name in own if own[name].shape != state[name].shape]
    if wrong:
        shapes = f"{wrong[0]} is {tuple(state[wrong[0]].shape)}, not {tuple(own[wrong[0]].shape)}"
        raise ValueError(f"{path} is not {what}: {len(wrong)} shapes differ, {shapes}")
    module.load_state_dict(state)
    return module


# Official names, left, that diffusers' WanTransformer3DModel spells differently; tensors are the same.
DIFFUSERS_NAMES = {
    "text_embedding.0.": "condition_embedder.text_embedder.linear_1.",
    "text_embedding.2.": "condition_embedder.text_embedder.linear_2.",
    "time_embedding.0.": "condition_embedder.time_embedder.linear_1.",
    "time_embedding.2.": "condition_embedder.time_embedder.linear_2.",
    "time_projection.1.": "condition_embedder.time_proj.",
    "img_emb.proj.0.": "condition_embedder.image_embedder.norm1.",
    "img_emb.proj.1.": "condition_embedder.image_embedder.ff.net.0.proj.",
    "img_emb.proj.3.": "condition_embedder.image_embedder.ff.net.2.",
    "img_emb.proj.4.": "condition_embedder.image_embedder.norm2.",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
    "head.head.": "proj_out.",
    "head.modulation": "scale_shift_table",
    ".modulation": ".scale_shift_table",
    ".norm3.": ".norm2.",
    ".ffn.0.": ".ffn.net.0.proj.",
    ".ffn.2.": ".ffn.net.2.",
    ".self_attn.": ".attn1.",
    ".cross_attn.": ".attn2.",
    ".q.": ".to_q.",
    ".k.": ".to_k.",
    ".v.": ".to_v.",
    ".o.": ".to_out.0.",
    ".k_img.": ".add_k_proj.",
    ".v_img.": ".add_v_proj.",
    ".norm_k_img.": ".norm_added_k.",
}


def diffusers_name(name: str) -> str:
    """The name that diffusers gives to the official parameter `name`."""
    for official, theirs in DIFFUSERS_NAMES.items():
        name = name.replace(official, theirs)
    return name


def whole_weights(named: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Whole tensors on the CPU of rank 0 (an empty dict elsewhere) of tensors that may be sharded; one at a time."""
    whole = {}
    for name, tensor in named.items():
        tensor = tensor.detach()
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if rank == 0:
            whole[name] = tensor.to("cpu", copy=True).contiguous()
    return whole


def write_weights(named: dict[str, Tensor], path: Path):
    """Write under another name, read the header back, rename: no half file ever has the name of a whole one."""
    temporary = path.with_name(path.name + ".partial")
    save_file(named, temporary)
    with safe_open(temporary, "pt") as file:
        whole = set(file.keys()) == named.keys()
    if not whole:
        raise OSError(f"{temporary} does not hold what was written to it; is the disk full or failing?")
    os.replace(temporary, path)


# ---------------------------------------------------------------------------------------------------------------------
# Training state


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

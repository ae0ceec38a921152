"""Files of weights: reading them, loading them into a module, writing them.

`.safetensors` (one, or shards with an index) and `.pth` (tensors only). What the names in them mean is checkpoint.py's.
"""

import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


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

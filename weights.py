"""Files of weights: opening them, loading them into a module, writing them. What their names mean is formats.py's.

A file is opened by its header alone (`.safetensors`, one or in shards; `.pth` of tensors only) and checked before any
tensor is read; then tensors, or a rank's rows of them, are read one at a time with plain reads. So a process never
holds more than what it keeps and one tensor; pages of a memory map would count as well, for as long as it is open.
"""

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from formats import ADAPTER, NEVER_COMPUTED, Found, describe, fields_of, find_models, join, presets_of
from model import CONFIGS

DTYPES = {  # the file format's names
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
EXPERTS = {  # folders of Wan 2.2's repositories: the official one's, diffusers'
    "high": ("high_noise_model", "transformer"),
    "low": ("low_noise_model", "transformer_2"),
}
AGAIN = "download or write it again"

# ---------------------------------------------------------------------------------------------------------------------
# Finding the files


def expert_path(path: str | Path, expert: str = "") -> Path:
    """Where in a repository's folder a DiT is: "high" or "low" is one of Wan 2.2's two experts, "" the only one it has.
    A file, or a folder with weights and none of these sub-folders, is itself. ValueError where the folder lacks it."""
    path = Path(path).expanduser()
    present = {name: path / name for names in EXPERTS.values() for name in names if (path / name).is_dir()}
    if not present:
        return path
    if not expert:
        if set(present) == {"transformer"}:
            return path / "transformer"
        raise ValueError(f"{path} holds two experts; name one of them: {', '.join(map(str, present.values()))}")
    for name in EXPERTS[expert]:
        if name in present:
            return present[name]
    raise ValueError(f"{path} has no {expert}-noise expert: no folder {' or '.join(EXPERTS[expert])}")


def weight_files(path: Path) -> list[Path]:
    """The files of one checkpoint: a file itself, the shards of an index, or what a folder holds, if that is clear."""
    if path.is_file() and path.name.endswith(".index.json"):
        return shards(path)
    if path.is_file():
        if (match := re.search(r"-(\d+)-of-(\d+)\.\w+$", path.name)) and int(match[2]) > 1:
            raise ValueError(f"{path} is one of {int(match[2])} shards; name their index, or the folder {path.parent}")
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    for pattern in ("*.safetensors.index.json", "*.safetensors", "*.pth"):
        if found := sorted(path.glob(pattern)):
            if len(found) > 1:
                names = ", ".join(f.name for f in found)
                raise ValueError(f"{path} holds {len(found)} files {pattern} and no index; name one: {names}")
            return weight_files(found[0])
    raise ValueError(f"{path} holds no .safetensors or .pth file")


def shards(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of shards ({type(error).__name__}); {AGAIN}") from error
    files = [index.parent / name for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{index}: {len(missing)} of {len(files)} shards are missing: {', '.join(missing)}; {AGAIN}")
    return files


# ---------------------------------------------------------------------------------------------------------------------
# Headers


class Entry(NamedTuple):
    """Where a tensor lies."""

    file: Path
    offset: int  # of its first element, in bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements

    def read(self, rows: slice = slice(None)) -> Tensor:
        """The tensor, or `rows` of its first axis, on the CPU."""
        shape, first = self.shape, 0
        if shape:
            start, stop, _ = rows.indices(shape[0])
            shape, first = (max(0, stop - start), *shape[1:]), start * self.stride[0]
        span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, self.stride, strict=True))
        flat = torch.empty(span, dtype=self.dtype)
        with open(self.file, "rb") as file:
            file.seek(self.offset + first * flat.itemsize)
            if file.readinto(flat.view(torch.uint8).numpy()) != flat.nbytes:
                raise OSError(f"{self.file} ends before its header says; it was cut while open: {AGAIN}")
        return flat.as_strided(shape, self.stride) if span else flat.view(shape)


def open_weights(path: str | Path) -> dict[str, Entry]:
    """Every tensor of a checkpoint by its name in the file; reads headers alone. ValueError, in one line, for what is
    cut short, damaged, incomplete, or would run code."""
    path = Path(path).expanduser()
    entries: dict[str, Entry] = {}
    for file in weight_files(path):
        header = open_safetensors(file) if file.suffix in (".safetensors", ".sft") else open_pickle(file)
        if twice := entries.keys() & header.keys():
            raise ValueError(f"{file} and another shard both hold {min(twice)}; {AGAIN}")
        entries |= header
    index = path if path.is_file() else next(iter(sorted(path.glob("*.safetensors.index.json"))), path)
    if index.name.endswith(".index.json"):
        promised = json.loads(index.read_text())["weight_map"].keys()
        if absent := sorted(promised - entries.keys()):
            raise ValueError(f"{index} names {len(absent)} tensors that no shard holds (first {absent[0]}); {AGAIN}")
    return entries


def open_safetensors(file: Path) -> dict[str, Entry]:
    refuse_stand_ins(file)
    try:
        with safe_open(file, "pt"), open(file, "rb") as data:  # the library checks sizes and offsets
            length = int.from_bytes(data.read(8), "little")
            header = json.loads(data.read(length))
    except SafetensorError as error:
        raise ValueError(f"{file} is cut short, damaged or no .safetensors file ({error}); {AGAIN}") from error
    header.pop("__metadata__", None)
    entries = {}
    for name, record in header.items():
        if record["dtype"] not in DTYPES:
            raise ValueError(f"{file}: {name} is of type {record['dtype']}; picowan reads {', '.join(DTYPES)}")
        shape = tuple(record["shape"])
        stride = torch.empty(shape, device="meta").stride()
        entries[name] = Entry(file, 8 + length + record["data_offsets"][0], DTYPES[record["dtype"]], shape, stride)
    return entries


def metadata_of(file: Path) -> dict[str, str]:
    """The words that a `.safetensors` file carries beside its tensors; of another file none."""
    if file.suffix != ".safetensors":
        return {}
    with safe_open(file, "pt") as opened:
        return opened.metadata() or {}


def open_pickle(file: Path) -> dict[str, Entry]:
    """A file by torch.save, whose storages lie in it as they are. Unpickled without code and without its data."""
    refuse_stand_ins(file)
    try:
        with FakeTensorMode():
            state = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} holds more than tensors: reading it would run code that it brings. It was not run; "
            "get the checkpoint as .safetensors"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{file} is cut short, damaged or no file by torch.save; {AGAIN}") from error
    except AttributeError as error:  # what torch's reader of its format before 1.6 comes to in this mode
        raise ValueError(old_format(file)) from error
    if not isinstance(state, dict):
        raise ValueError(f"{file} is no dict of tensors but {type(state).__name__}; save the tensors alone, by name")
    if others := [name for name, x in state.items() if not isinstance(x, Tensor)]:
        raise ValueError(f"{file} holds {others[0]!r}, which is no tensor; save the tensors alone, by name")
    entries = {}
    for name, x in state.items():
        start = x.untyped_storage()._checkpoint_offset
        if start is None:
            raise ValueError(old_format(file))
        entries[name] = Entry(file, start + x.storage_offset() * x.itemsize, x.dtype, tuple(x.shape), x.stride())
    return entries


def old_format(file: Path) -> str:
    return f"{file} is in PyTorch's format before 1.6, one stream; torch.load it and torch.save it again"


def refuse_stand_ins(file: Path):
    with open(file, "rb") as data:
        head = data.read(40)
    if not head:
        raise ValueError(f"{file} is empty (0 bytes); {AGAIN}")
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{file} is a Git LFS pointer to the weights, not the weights; run `git lfs pull` there")


# ---------------------------------------------------------------------------------------------------------------------
# One model, in official names


class Weights:
    """The model in a file or folder, in whatever form, as official names: `shapes`, and `read` of one tensor at a time.
    Where a file holds several models, `kind` (of formats.TABLES) says which."""

    def __init__(self, path: str | Path, kind: str = ""):
        self.path = expert_path(path)
        self.entries = open_weights(self.path)
        models = find_models({name: (entry.shape, entry.dtype) for name, entry in self.entries.items()})
        if not models:
            first = min(self.entries, default="none")
            way = "; merge a LoRA into its base: checkpoint.py merge" if any(map(ADAPTER.search, self.entries)) else ""
            raise ValueError(
                f"{path} holds no model that picowan knows ({len(self.entries)} tensors, first {first}){way}"
            )
        self.found: Found = next((model for model in models if model.kind == kind), models[0])
        self.others = [model for model in models if model is not self.found]
        self.shapes = self.found.shapes

    def dtype(self, name: str) -> torch.dtype:
        """What `read` returns: the file's, and float32 for fp8 with a scale."""
        source = self.found.sources[name]
        return torch.float32 if source.scales[0] else self.entries[source.names[0]].dtype

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """A tensor, or `rows` of its first axis, on the CPU. ValueError where it holds NaN or infinity."""
        source = self.found.sources[name]
        if len(source.names) == 1 and self.entries[source.names[0]].shape == self.shapes[name]:
            tensor = self.part(source.names[0], source.scales[0], rows)
        else:  # CLIP from transformers: put together, then cut
            parts = [self.part(*pair) for pair in zip(source.names, source.scales, strict=True)]
            tensor = join(name, parts)[rows]
        refuse_nan(tensor, f"{self.path}: {name}")
        return tensor

    def part(self, name: str, scale: str | None, rows: slice = slice(None)) -> Tensor:
        """A tensor by its name in the file; fp8 times its scale, one number or one per row."""
        tensor = self.entries[name].read(rows)
        if scale is None:
            return tensor
        scales = self.entries[scale].read().float()
        if scales.numel() > 1:
            scales = scales.flatten()[rows].view(-1, *[1] * (tensor.ndim - 1))
        return tensor.float() * scales


def refuse_nan(tensor: Tensor, what: str):
    if tensor.numel() and tensor.is_floating_point():
        wide = tensor.float() if tensor.itemsize == 1 else tensor  # fp8 has no comparisons
        if not all(x.isfinite() for x in wide.aminmax()):
            raise ValueError(f"{what} holds NaN or infinity: the weights are damaged; {AGAIN}")


# ---------------------------------------------------------------------------------------------------------------------
# Into a module


def load_weights(
    module: nn.Module, path: str | Path, what: str, device=None, dtype=None, skip: Callable[[str], bool] | None = None
) -> nn.Module:
    """Load the model at `path` into `module`, every name and shape, tensor by tensor; returns the module.

    what: a preset of model.py, or words ("a Wan 2.1 VAE"); for the messages. device and dtype: where the parameters
    are to be, as in `module.to`; None: where and what they are (meta: the CPU). Parameters on the meta device get their
    memory here, of FSDP2's each rank only its shard, and each rank reads only its rows. skip(name): parameters, of the
    file or the module, that are left alone: adapters that the file does not have, blocks that the module does not have.

    ValueError, before anything is touched, where the file is another model's or damaged. NaN is found on the way: then
    the module is half loaded and good for nothing. (RuntimeError where it is sharded: other ranks may not see it.)
    """
    skip = skip or (lambda name: False)
    own = {name: x for name, x in module.state_dict().items() if not skip(name)}
    ours = find_models({name: (tuple(x.shape), x.dtype) for name, x in own.items()})
    weights = Weights(path, ours[0].kind if ours else "")
    for name in filter(skip, list(weights.shapes)):
        del weights.shapes[name]
    refuse_others(weights, {name: tuple(x.shape) for name, x in own.items()}, ours[0].kind if ours else "", what)
    if any(x.is_meta for x in own.values()):
        module.to(dtype=dtype).to_empty(device=device or "cpu")
    else:
        module.to(device=device, dtype=dtype)
    for name, mine in module.state_dict().items():
        if skip(name):
            continue
        if name not in weights.shapes:
            mine.zero_()
            continue
        try:
            rows = weights.read(name, own_rows(mine))
        except ValueError as error:
            raise (RuntimeError(error) if isinstance(mine, DTensor) else error) from error
        (mine.to_local() if isinstance(mine, DTensor) else mine).copy_(rows)
    return module


def own_rows(tensor: Tensor) -> slice:
    """The rows of the whole tensor's first axis that this rank holds: all, or its part as torch.chunk cuts (FSDP2)."""
    if not isinstance(tensor, DTensor):
        return slice(None)
    start, stop = 0, tensor.shape[0]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_shard(0):
            size = -(-(stop - start) // tensor.device_mesh.size(axis))
            start = min(stop, start + size * tensor.device_mesh.get_local_rank(axis))
            stop = min(stop, start + size)
        elif not placement.is_replicate():
            raise ValueError(f"weights load into shards of the first axis, not into {placement}")
    return slice(start, stop)


def refuse_others(weights: Weights, shapes: dict[str, tuple[int, ...]], kind: str, what: str):
    """ValueError that says what the file is and what it was given to, unless it holds exactly these shapes."""
    found, path = weights.found, weights.path
    given = f"given to --model {what}" if what in CONFIGS else f"not {what}"
    if found.kind != kind:
        raise ValueError(f"{path} is {describe(found.kind, fields_of(found.kind, found.shapes))}, {given}")
    theirs, ours = fields_of(kind, found.shapes), fields_of(kind, shapes)
    differ = [name for name in ours if theirs[name] != ours[name] and (theirs[name] or name == "clip_dim")]
    if differ:
        shown = [name for name in differ if name != "clip_dim" or "in_dim" not in differ]
        sizes = ", ".join(f"{name} {ours[name]}" for name in shown if name != "model_type")
        presets = presets_of(theirs) if kind == "dit" else []
        way = f"; it fits --model {' or '.join(presets)}" if presets else ""
        raise ValueError(f"{path} is {describe(kind, theirs, shown)}, {given} ({sizes}){way}")
    missing, extra = sorted(shapes.keys() - found.shapes.keys()), sorted(found.shapes.keys() - shapes.keys())
    if found.form == "diffusers":
        missing = [name for name in missing if name not in NEVER_COMPUTED]
    if missing or extra:
        lists = [
            f"{len(names)} {kind} (first {names[0]})"
            for kind, names in (("missing", missing), ("extra", extra))
            if names
        ]
        raise ValueError(f"{path} is not {what}: of {len(shapes)} names, {', '.join(lists)}; {AGAIN}")
    if wrong := [name for name in found.shapes if shapes[name] != found.shapes[name]]:
        sizes = f"{wrong[0]} is {found.shapes[wrong[0]]}, not {shapes[wrong[0]]}"
        raise ValueError(f"{path} is not {what}: {len(wrong)} shapes differ, {sizes}")


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def whole_weights(named: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Whole tensors on the CPU of rank 0 (an empty dict elsewhere) of tensors that may be sharded; one at a time."""
    whole = {}
    for name, tensor in named.items():
        tensor = tensor.detach()
        tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if rank == 0:
            whole[name] = tensor.to("cpu", copy=True).contiguous()
    return whole


def write_weights(named: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None):
    """Write tensors as `.safetensors`."""
    header = {name: (tuple(x.shape), x.dtype) for name, x in named.items()}
    stream_weights(header, named.__getitem__, path, metadata)


def stream_weights(header: dict, read: Callable[[str], Tensor], path: Path, metadata: dict[str, str] | None = None):
    """Write a `.safetensors` file of {name: (shape, dtype)}, asking `read` for one tensor at a time.

    Written under another name, read back and renamed: no half file ever has the name of a whole one, and where writing
    fails (a full disk) nothing is left.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    order = sorted(header, key=lambda name: (-header[name][1].itemsize, name))  # so that every tensor is aligned
    records, end = {"__metadata__": {"format": "pt"} | (metadata or {})}, 0
    for name in order:
        shape, dtype = header[name]
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        records[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [start, end]}
    words = json.dumps(records).encode()
    words += b" " * (-len(words) % 8)
    temporary = path.with_name(path.name + ".partial")
    try:
        with open(temporary, "wb") as file:
            file.write(len(words).to_bytes(8, "little") + words)
            for name in order:
                file.write(bytes_of(read(name), *header[name]))
            file.flush()
            os.fsync(file.fileno())
        if open_safetensors(temporary).keys() != header.keys():
            raise OSError(f"{temporary} does not hold what was written to it; is the disk failing?")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def bytes_of(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> memoryview:
    assert tuple(tensor.shape) == shape and tensor.dtype == dtype
    return memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())

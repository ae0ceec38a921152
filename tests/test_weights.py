"""Weights files: opened by their headers, loaded tensor by tensor into any kind of parameter, refused in one line."""

import copy
import dataclasses
import json
import os
import pickle
import random
import resource
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from spawn import spawn
from torch.distributed.tensor import DTensor

import parallel
from model import CONFIGS, WanConfig, WanDiT
from text_encoder import UMT5_CONFIGS, UMT5Encoder
from vae import VAE_CONFIGS, WanVAE
from weights import expert_path, load_weights, open_weights, stream_weights, write_weights

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import measure_loading

TINY = WanConfig(dim=48, ffn_dim=80, num_heads=4, num_layers=2, text_dim=24, text_len=12, freq_dim=16)


def tiny_dit(seed=0, **changes):
    torch.manual_seed(seed)
    model = WanDiT(dataclasses.replace(TINY, **changes))
    torch.nn.init.normal_(model.head.head.weight, std=0.1)
    return model


def save_shards(state, folder: Path):
    """Three shards and their index, as diffusers writes them."""
    homes = {}
    for i in range(3):
        part = {name: state[name] for name in sorted(state)[i::3]}
        file = f"model-{i + 1:05d}-of-00003.safetensors"
        save_file(part, folder / file)
        homes |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))


@pytest.fixture
def files(tmp_path):
    """The same state as one file, as shards and as .pth; (state, {kind: path})."""
    state = tiny_dit().state_dict()
    (tmp_path / "shards").mkdir()
    save_file(state, tmp_path / "one.safetensors")
    save_shards(state, tmp_path / "shards")
    torch.save(state, tmp_path / "one.pth")
    return state, {name: tmp_path / name for name in ("one.safetensors", "shards", "one.pth")}


# --- reading --------------------------------------------------------------------------------------------------------


def test_every_container_reads_alike(files):
    """If this goes, a tensor or some of its rows come from the wrong place of a single file, of shards or of a .pth."""
    state, paths = files
    for path in paths.values():
        entries = open_weights(path)
        assert entries.keys() == state.keys()
        for name, entry in entries.items():
            assert torch.equal(entry.read(), state[name])
            for rows in (slice(1, 3), slice(0, 0), slice(-1, None), slice(5, 5)):
                assert torch.equal(entry.read(rows), state[name][rows]), (path, name, rows)


def test_pth_of_views_and_dtypes(tmp_path):
    """If this goes, transposed or shared tensors, numbers and half precision of an official .pth are read wrongly."""
    base = torch.randn(6, 4)
    state = {"transposed": base.t(), "view": base[2:4], "half": base.bfloat16()[1:], "number": torch.tensor(2.5)}
    torch.save(state, tmp_path / "a.pth")
    for name, entry in open_weights(tmp_path / "a.pth").items():
        assert torch.equal(entry.read(), state[name])
        if entry.shape:
            assert torch.equal(entry.read(slice(1, 2)), state[name][1:2])


def test_writing_then_the_library_reads(tmp_path):
    """If this goes, what picowan writes is no .safetensors file for others."""
    state = {
        "odd": torch.randn(3, 5).bfloat16(),
        "wide": torch.randn(7).double(),
        "number": torch.tensor(1.5),
        "none": torch.empty(0, 4),
        "fp8": torch.randn(3, 3).to(torch.float8_e4m3fn),
        "strided": torch.randn(4, 6).t(),
    }
    write_weights(state, tmp_path / "a.safetensors")
    back = load_file(tmp_path / "a.safetensors")
    assert back.keys() == state.keys()
    assert all(
        torch.equal(back[name].double(), x.double()) and back[name].dtype == x.dtype for name, x in state.items()
    )


def test_a_full_disk_leaves_nothing(tmp_path):
    """If this goes, a checkpoint that did not fit leaves a file behind that looks like one."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError):
            write_weights({"a": torch.zeros(100_000)}, tmp_path / "a.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


# --- into modules ---------------------------------------------------------------------------------------------------


def test_into_any_parameters(files):
    """If this goes, casting while loading, or making meta parameters real, loses values, dtype or requires_grad."""
    state, paths = files
    with torch.device("meta"):
        blank = WanDiT(TINY)
    blank.blocks.requires_grad_(False)
    for path in paths.values():
        for start in (tiny_dit(1), tiny_dit(1).double(), copy.deepcopy(blank)):
            for dtype in (None, torch.bfloat16):
                model = copy.deepcopy(start)
                before = {name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()}
                assert load_weights(model, path, "a tiny DiT", dtype=dtype) is model
                for name, p in model.named_parameters():
                    assert (p.dtype, p.requires_grad) == (dtype or before[name][0], before[name][1])
                    assert p.device.type == "cpu" and torch.equal(p, state[name].to(p.dtype))


def load_sharded(paths: list[str], bad: str) -> str:
    """On each rank: load into FSDP2's shards, real and still on meta; and a file with NaN in its last rows."""
    layout = parallel.Layout(torch.distributed.get_rank(), torch.distributed.get_world_size())
    for path in paths:
        reference = load_weights(tiny_dit(1), path, "a tiny DiT")
        for meta in (False, True):
            with torch.device("meta" if meta else "cpu"):
                model = WanDiT(TINY)
            parallel.parallelize(model, layout, "full", "fp32", "none", False)
            load_weights(model, path, "a tiny DiT", dtype=torch.float64 if meta else None)
            for name, p in model.named_parameters():
                assert isinstance(p, DTensor) and p.dtype == (torch.float64 if meta else torch.float32)
                whole = reference.get_parameter(name)
                assert torch.equal(p.full_tensor(), whole.to(p.dtype)), name
        torch.manual_seed(0)
        inputs = [torch.randn(16, 2, 4, 6).double()], torch.tensor([500.0]), [torch.randn(5, 24).double()]
        with torch.no_grad():
            ours, theirs = model(*inputs)[0], reference.double()(*inputs)[0]
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    try:
        load_weights(model, bad, "a tiny DiT")
    except RuntimeError as error:
        return str(error)
    return ""


def test_into_shards(files, tmp_path):
    """If this goes, FSDP2's ranks (three, so that no width divides) get other rows than theirs, or a rank that finds
    NaN among its own rows keeps it to itself."""
    state, paths = files
    state["blocks.1.ffn.0.weight"][-1, 0] = float("nan")
    save_file(state, tmp_path / "bad.safetensors")
    said = spawn(load_sharded, 3, list(map(str, paths.values())), str(tmp_path / "bad.safetensors"))
    assert said[:2] == ["", ""] and "blocks.1.ffn.0.weight holds NaN" in said[2]


def measured(path: str, small: str) -> tuple[int, int, float]:
    measure_loading.measure(small, 128)  # so that the code itself is in memory
    return measure_loading.measure(path, 512)


def test_memory_of_loading(tmp_path):
    """If this goes, a rank holds more while loading than its own shards and a tensor: 14B no longer fits. A file with
    the 14B's names and 290 MB; peak resident memory above the start, against what the rank keeps."""
    path, small = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    measure_loading.write_file(path, 512)
    measure_loading.write_file(small, 128)
    for world in (1, 4):
        for kept, peak, _ in spawn(measured, world, str(path), str(small)):
            assert kept < 1.02 * path.stat().st_size / world
            assert peak < 1.1 * kept


# --- refusals -------------------------------------------------------------------------------------------------------


class Trap:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def damage(folder: Path, state) -> dict[str, tuple[Path, str]]:
    """{case: (path, words of its refusal)}."""
    good = (folder / "one.safetensors").read_bytes()
    zipped = (folder / "one.pth").read_bytes()
    cases = {
        "cut": (good[:-5], "a.safetensors", "cut short"),
        "cut header": (good[:200], "a.safetensors", "cut short"),
        "empty": (b"", "a.safetensors", "empty"),
        "garbage": (random.Random(0).randbytes(5000), "a.safetensors", "damaged"),
        "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a.safetensors", "git lfs pull"),
        "cut pth": (zipped[: len(zipped) // 2], "a.pth", "cut short"),
        "garbage pth": (random.Random(1).randbytes(5000), "a.pth", "more than tensors|damaged"),
        "pickle": (pickle.dumps({"a": Trap(folder / "sprung")}, protocol=2), "a.pth", "run code"),
    }
    paths = {}
    for case, (content, name, words) in cases.items():
        (folder / case).mkdir()
        (folder / case / name).write_bytes(content)
        paths[case] = (folder / case / name, words)
    for case, words, content in (
        ("trap", "run code", {**state, "x": Trap(folder / "sprung")}),
        ("nested", "'state_dict', which is no tensor", {"state_dict": state}),
        ("list", "no dict of tensors but list", [1]),
    ):
        torch.save(content, folder / f"{case}.pth")
        paths[case] = (folder / f"{case}.pth", words)
    torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)
    paths["old"] = (folder / "old.pth", "before 1.6")
    for case, words in (("lost", "1 of 3 shards are missing"), ("thin", "names 1 tensors that no shard holds")):
        (folder / case).mkdir()
        save_shards(state, folder / case)
        paths[case] = (folder / case, words)
    (folder / "lost" / "model-00002-of-00003.safetensors").unlink()
    file = folder / "thin" / "model-00002-of-00003.safetensors"
    save_file({name: x for name, x in list(load_file(file).items())[1:]}, file)
    paths["one shard"] = (folder / "shards" / "model-00001-of-00003.safetensors", "one of 3 shards")
    paths["nothing"] = (folder / "nothing", "no such file or folder")
    return paths


def test_damaged_files_are_refused(files, tmp_path):
    """If this goes, a damaged or hostile file crashes deep inside, runs its code, or changes the model half way."""
    state, _ = files
    with torch.device("cpu"):
        model = tiny_dit(1)
    before = copy.deepcopy(model.state_dict())
    for case, (path, words) in damage(tmp_path, state).items():
        with pytest.raises(ValueError, match=words) as caught:
            load_weights(model, path, "a tiny DiT")
        assert "\n" not in str(caught.value) and str(path.name) in str(caught.value), case
    assert not (tmp_path / "sprung").exists()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_flipped_header_bits(files, tmp_path):
    """If this goes, one wrong bit in a header ends in a traceback, or loads other weights."""
    state, paths = files
    good, flips = paths["one.safetensors"].read_bytes(), random.Random(0)
    length = int.from_bytes(good[:8], "little")
    for _ in range(150):
        bad = bytearray(good)
        bad[flips.randrange(8 + length)] ^= 1 << flips.randrange(8)
        (tmp_path / "bad.safetensors").write_bytes(bad)
        model = tiny_dit(1)
        try:
            load_weights(model, tmp_path / "bad.safetensors", "a tiny DiT")
        except ValueError as error:
            assert "bad.safetensors" in str(error) and "\n" not in str(error)
        else:
            assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers(files, tmp_path, value):
    """If this goes, damaged weights are trained on or sampled from until somebody sees noise."""
    state, _ = files
    state["blocks.1.norm3.bias"][7] = value
    save_file(state, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match="blocks.1.norm3.bias holds NaN or infinity"):
        load_weights(tiny_dit(1), tmp_path / "bad.safetensors", "a tiny DiT")


def presets_file(preset: str, path: Path) -> Path:
    """A file with the preset's names and shapes, at one number per tensor (a hole on disk)."""
    with torch.device("meta"):
        header = {
            name: (tuple(x.shape), torch.float8_e4m3fn) for name, x in WanDiT(CONFIGS[preset]).state_dict().items()
        }
    records, end = {}, 0
    for name, (shape, _) in header.items():
        size = torch.Size(shape).numel()
        records[name] = {"dtype": "F8_E4M3", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    words = json.dumps(records).encode()
    with open(path, "wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        file.truncate(8 + len(words) + end)
    return path


@pytest.mark.parametrize(
    "holds, given, words",
    [
        ("wan2.2-i2v-a14b", "wan2.1-t2v-14b", r"is an image-to-video checkpoint \(in_dim 36\), given to --model "
         r"wan2.1-t2v-14b \(in_dim 16\); it fits --model wan2.2-i2v-a14b"),
        ("wan2.1-i2v-14b", "wan2.2-i2v-a14b", r"image-to-video checkpoint \(clip_dim 1280\), given to --model wan2.2"),
        ("wan2.1-t2v-1.3b", "wan2.1-t2v-14b", r"text-to-video checkpoint \(dim 1536, .*num_layers 30\), given to"),
        ("wan2.1-flf2v-14b", "wan2.1-i2v-14b", r"a first-and-last-frame-to-video checkpoint, given to --model"),
        ("wan2.2-ti2v-5b", "wan2.1-t2v-1.3b", r"text-and-image-to-video checkpoint \(in_dim 48, out_dim 48, dim 3072"),
    ],
)  # fmt: skip
def test_wrong_variant_is_named(tmp_path, holds, given, words):
    """If this goes, an I2V checkpoint in a T2V run says "36 channels where 16" or less."""
    path = presets_file(holds, tmp_path / "a.safetensors")
    with torch.device("meta"):
        model = WanDiT(CONFIGS[given])
    with pytest.raises(ValueError, match=words):
        load_weights(model, path, given)
    assert all(p.is_meta for p in model.parameters())


def test_other_models_are_named(tmp_path):
    """If this goes, a VAE given as --checkpoint, or a model with a layer more, is refused without saying what it is."""
    save_file(WanVAE(VAE_CONFIGS["demo"]).state_dict(), tmp_path / "vae.safetensors")
    save_file(UMT5Encoder(UMT5_CONFIGS["demo"]).state_dict(), tmp_path / "text.safetensors")
    factors = ("blocks.0.ffn.0.lora_A.weight", "blocks.0.ffn.0.lora_B.weight", "blocks.0.ffn.0.alpha")
    save_file({name: torch.zeros(1, 1) for name in factors}, tmp_path / "lora.safetensors")
    save_file(tiny_dit(num_layers=3).state_dict(), tmp_path / "deep.safetensors")
    state = tiny_dit().state_dict()
    del state["blocks.1.ffn.2.bias"]
    save_file(state, tmp_path / "poor.safetensors")
    save_file({**tiny_dit().state_dict(), "camera.weight": torch.zeros(2)}, tmp_path / "rich.safetensors")
    for name, words in {
        "vae": "is a Wan 2.1 VAE, given to --model demo",
        "text": "is a umT5 encoder, given to --model demo",
        "lora": "holds no model .* merge a LoRA into its base",
        "deep": r"text-to-video checkpoint \(num_layers 3\), given to --model demo \(num_layers 2\)",
        "poor": r"is not demo: of \d+ names, 1 missing \(first blocks.1.ffn.2.bias\)",
        "rich": r"1 extra \(first camera.weight\)",
    }.items():
        with pytest.raises(ValueError, match=words):
            load_weights(tiny_dit(), tmp_path / f"{name}.safetensors", "demo")
    with pytest.raises(ValueError, match="is a umT5 encoder, not a Wan 2.1 VAE"):
        load_weights(WanVAE(VAE_CONFIGS["demo"]), tmp_path / "text.safetensors", "a Wan 2.1 VAE")


def test_experts_of_a_repository(tmp_path):
    """If this goes, the low-noise expert trains on the high-noise one's weights."""
    for repo, folders in {
        "official": ("high_noise_model", "low_noise_model"),
        "diffusers": ("transformer", "transformer_2"),
        "one": ("transformer", "vae"),
        "half": ("low_noise_model",),
        "plain": (),
    }.items():
        for folder in (".", *folders):
            (tmp_path / repo / folder).mkdir(parents=True, exist_ok=True)
    for repo, expert, folder in (
        ("official", "high", "high_noise_model"),
        ("official", "low", "low_noise_model"),
        ("diffusers", "high", "transformer"),
        ("diffusers", "low", "transformer_2"),
        ("one", "", "transformer"),
        ("plain", "", "."),
        ("plain", "low", "."),
    ):
        assert expert_path(tmp_path / repo, expert) == tmp_path / repo / folder
    for repo, expert, words in (("official", "", "two experts"), ("half", "high", "no high"), ("one", "low", "no low")):
        with pytest.raises(ValueError, match=words):
            expert_path(tmp_path / repo, expert)


def test_a_reader_that_lies_is_caught(tmp_path):
    """If this goes, a tensor of another shape than its header says shifts every tensor behind it."""
    with pytest.raises(AssertionError):
        stream_weights({"a": ((2,), torch.float32)}, lambda name: torch.zeros(3), tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []

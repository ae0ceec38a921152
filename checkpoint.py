"""Look into checkpoints and LoRAs, convert them, merge them.

    python checkpoint.py inspect FILE...                        what it is, in which format, what is missing
    python checkpoint.py convert IN OUT --to diffusers          official | diffusers | comfyui; a LoRA: also kohya
    python checkpoint.py merge BASE LORA... OUT --scale 0.8     the base with LoRAs in its weights

IN and BASE: a file, an index of shards or a folder, in any of the formats (also Wan 2.2's in fp8 for ComfyUI). OUT: a
`.safetensors` file, or with --to diffusers a folder that diffusers' (for umT5 and CLIP transformers') from_pretrained
opens. Tensors pass through one at a time. What is there already is never overwritten.
"""

import dataclasses
import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from formats import describe, diffusers_names, fields_of, presets_of, split
from image_encoder import CLIP_CONFIGS, CLIPConfig, CLIPVision
from lora import Adapter, LoRA, add_wide, grown
from lora_formats import LORA_FORMS, is_lora, lora_form, match_lora, read_lora, write_lora
from model import CONFIGS, WanConfig, WanDiT
from options import exit_with, parse
from text_encoder import UMT5Config, UMT5Encoder
from vae import VAE_CONFIGS, VAEConfig, WanVAE
from weights import Weights, expert_path, open_weights, refuse_nan, refuse_others, stream_weights

SHARD_BYTES = 10 * 10**9
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Inspect:
    expert: Literal["", "high", "low"] = ""  # of a Wan 2.2 repository, or of a LoRA for both


@dataclass(frozen=True)
class Convert:
    to: Literal["official", "diffusers", "comfyui", "kohya"] = "official"  # format to write; kohya: of a LoRA
    dtype: Literal["same", "fp32", "bf16", "fp16"] = "same"  # of what is written; same: scaled fp8 becomes bf16
    heads: int = 0  # attention heads, where no preset and no config.json beside the file says
    expert: Literal["", "high", "low"] = ""  # of a Wan 2.2 repository, or of a LoRA for both


@dataclass(frozen=True)
class Merge(Convert):
    scale: tuple[float, ...] = (1.0,)  # of the LoRA; of each, where there are several


# ---------------------------------------------------------------------------------------------------------------------
# inspect


def inspect(path: str, options: Inspect) -> tuple[str, bool]:
    """(what is in the file, in lines; whether it is a whole model)."""
    where = expert_path(path, options.expert)
    entries = open_weights(where)
    if is_lora(entries):
        return inspect_lora(path, list(entries), read_lora(where, options.expert)), True
    weights = Weights(where)
    found, fields = weights.found, fields_of(weights.found.kind, weights.shapes)
    lines = [f"{path}: {describe(found.kind, fields)}"]
    if found.kind == "dit":
        lines.append(f"model       {' or '.join(presets_of(fields)) or 'no preset of picowan'}")
    lines.append("sizes       " + ", ".join(f"{name} {value}" for name, value in fields.items()))
    scaled = ", fp8 with scales" if found.scaled else ""
    lines.append(f"format      {found.format}, prefix {found.prefix or 'none'}{scaled}")
    sizes = {name: math.prod(shape) for name, shape in weights.shapes.items()}
    its = [entries[name] for source in found.sources.values() for name in source.names]
    dtypes = Counter(str(entry.dtype).removeprefix("torch.") for entry in its)
    size = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in its)
    lines.append(f"parameters  {sum(sizes.values()):,} in {len(sizes)} tensors, {size / 2**30:.2f} GiB")
    lines.append("dtypes      " + ", ".join(f"{name} ({n})" for name, n in dtypes.most_common()))
    for other in weights.others:
        lines.append(f"also holds  {describe(other.kind, fields_of(other.kind, other.shapes))}, prefix {other.prefix}")
    try:
        complete(weights)
        lines.append("complete    yes")
        return "\n  ".join(lines), True
    except ValueError as error:
        lines.append(f"complete    no: {error}")
        return "\n  ".join(lines), False


def inspect_lora(path: str, names: list[str], lora: LoRA) -> str:
    ranks = " ".join(map(str, sorted({len(adapter.down) for adapter in lora.adapters.values()})))
    alphas = " ".join(f"{alpha:g}" for alpha in sorted({adapter.alpha for adapter in lora.adapters.values()}))
    fits = []
    for preset, config in CONFIGS.items():
        try:
            match = match_lora(lora, shapes_of(WanDiT, config))
        except ValueError:
            continue
        fits.append(preset if len(match.placed) == match.total else f"{preset} in part ({match})")
    lines = [
        f"{path}: a LoRA",
        f"format      {lora_form(names)}",
        f"adapters    {len(lora.adapters)}, rank {ranks}, alpha {alphas}",
        f"differences {len(lora.diffs)}",
        f"fits        {'; '.join(fits) or 'no preset of picowan'}",
    ]
    return "\n  ".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# The model that a file should hold


def shapes_of(cls: type[nn.Module], config) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(x.shape) for name, x in cls(config).state_dict().items()}


def complete(weights: Weights):
    """ValueError, saying what is missing or extra, unless every tensor of such a model is there and no other."""
    kind, shapes = weights.found.kind, weights.shapes
    fields = fields_of(kind, shapes)
    if unknown := [name for name, value in fields.items() if not value and name != "clip_dim"]:
        raise ValueError(f"{weights.path} lacks the tensors that say its {', '.join(unknown)}; download it again")
    if kind == "dit":
        cls, config = WanDiT, WanConfig(**fields, num_heads=1)  # no shape depends on the heads
    elif kind == "umt5":
        cls, config = UMT5Encoder, UMT5Config(**fields)
    elif kind == "clip":
        cls, config = CLIPVision, clip_config(shapes, 1)
    else:
        cls, config = WanVAE, vae_config(kind, fields)
    refuse_others(weights, shapes_of(cls, config), kind, describe(kind, fields))


def vae_config(kind: str, fields: dict) -> VAEConfig:
    """The preset of these sizes, with its statistics; else Wan's own VAE at these sizes."""
    whole = VAE_CONFIGS["wan" + kind.removeprefix("vae")]
    for config in VAE_CONFIGS.values():
        sizes = {"z_dim": config.z_dim, "dim": config.dim, "dec_dim": config.dec_dim or config.dim}
        if config.is_residual == whole.is_residual and sizes == fields:
            return config
    return dataclasses.replace(whole, **fields)


def clip_config(shapes: dict[str, tuple[int, ...]], heads: int) -> CLIPConfig:
    fields = fields_of("clip", shapes)
    grid = math.isqrt(shapes["visual.pos_embedding"][1] - 1)
    ratio = shapes["visual.transformer.0.mlp.0.weight"][0] // fields["dim"]
    out = shapes.get("visual.head", (0, CLIPConfig.out_dim))[1]
    return CLIPConfig(grid * fields["patch_size"], mlp_ratio=ratio, out_dim=out, num_heads=heads, **fields)


def heads_of(weights: Weights, given: int) -> int:
    """Attention heads, which no shape tells: as given, or of the preset, or of a config.json beside the file."""
    fields = fields_of(weights.found.kind, weights.shapes)
    if given:
        return given
    if weights.found.kind == "clip":
        sizes = (fields["dim"], fields["num_layers"])
        heads = next((c.num_heads for c in CLIP_CONFIGS.values() if (c.dim, c.num_layers) == sizes), 0)
    else:
        heads = next((CONFIGS[name].num_heads for name in presets_of(fields)), 0)
    folder = weights.path if weights.path.is_dir() else weights.path.parent
    if not heads and (folder / "config.json").is_file():
        config = json.loads((folder / "config.json").read_text())
        heads = config.get("num_heads") or config.get("num_attention_heads") or 0
    if not heads:
        raise ValueError(f"{weights.path} does not say into how many heads its width {fields['dim']} splits: --heads N")
    return heads


# ---------------------------------------------------------------------------------------------------------------------
# convert, merge


def convert(source: str, out: str, options: Convert):
    where = expert_path(source, options.expert)
    if is_lora(open_weights(where)):
        target = new_path(out, folder=False)
        if options.to not in LORA_FORMS:
            raise ValueError(f"{source} is a LoRA, which is written as {', '.join(LORA_FORMS)}, not as {options.to}")
        write_lora(read_lora(where, options.expert), target, options.to)
    else:
        write_model(Weights(where), Path(out), options)
    print(f"{out}: written and read back")


def merge(base: str, loras: list[str], out: str, options: Merge):
    if len(options.scale) != len(loras) and len(options.scale) != 1:
        raise ValueError(f"--scale names {len(options.scale)} scales for {len(loras)} LoRAs; give one, or one for each")
    scales = options.scale * len(loras) if len(options.scale) == 1 else options.scale
    weights = Weights(expert_path(base, options.expert), "dit")
    if weights.found.kind != "dit":
        raise ValueError(f"{base} is {describe(weights.found.kind, {})}: LoRAs are merged into a DiT")
    read = [read_lora(path, options.expert) for path in loras]
    for path, lora, scale in zip(loras, read, scales, strict=True):
        print(f"{path} at scale {scale:g}: {match_lora(lora, weights.shapes)}")

    def merged(name: str, weight: Tensor) -> Tensor:
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))  # so that it is rounded once, as written
        for lora, scale in zip(read, scales, strict=True):
            adapter, diff = lora.adapters.get(name.removesuffix(".weight")), lora.diffs.get(name)
            if adapter and name.endswith(".weight") and fits(adapter, weight):
                weight = grown(weight, adapter, scale)
            if diff is not None and diff.shape == weight.shape:
                weight = add_wide(weight, diff, scale)
        return weight

    write_model(weights, Path(out), options, merged)
    print(f"{out}: written and read back")


def fits(adapter: Adapter, weight: Tensor) -> bool:
    return (len(adapter.up), adapter.down.shape[1]) == (len(weight), weight[0].numel())


def write_model(weights: Weights, out: Path, options: Convert, change: Callable[[str, Tensor], Tensor] | None = None):
    """Write a whole model as options.to says, each tensor passed through change(official name, tensor)."""
    if options.to == "kohya":
        raise ValueError(f"{weights.path} is no LoRA: --to kohya is a format of LoRAs")
    complete(weights)
    kind = weights.found.kind  # ComfyUI keeps umT5 and CLIP under transformers' names, and the rest under official ones
    theirs = options.to == "diffusers" or (options.to == "comfyui" and kind in ("umt5", "clip"))
    prefix = "model.diffusion_model." if options.to == "comfyui" and kind == "dit" else ""
    config = diffusers_config(weights, options.heads) if options.to == "diffusers" else {}
    places, header = {}, {}  # by the name written: (official name, which part of it); (shape, dtype)
    for name, shape in weights.shapes.items():
        dtype = DTYPES.get(options.dtype) or (torch.bfloat16 if weights.found.scaled else weights.dtype(name))
        parts = split(name, torch.empty(shape, device="meta")) if theirs else [torch.empty(shape, device="meta")]
        for i, written in enumerate(diffusers_names(kind, name) if theirs else [prefix + name]):
            places[written], header[written] = (name, i), (tuple(parts[i].shape), dtype)

    def read(written: str) -> Tensor:
        name, part = places[written]
        tensor = weights.read(name)
        tensor = (change(name, tensor) if change else tensor).to(header[written][1])
        refuse_nan(tensor, f"{name} as {tensor.dtype}")  # beyond float16's range, or a LoRA's doing
        return split(name, tensor)[part] if theirs else tensor

    target = new_path(str(out), folder=options.to == "diffusers")
    if options.to == "diffusers":
        write_folder(header, read, target, config, "model" if kind in ("umt5", "clip") else "diffusion_pytorch_model")
    else:
        stream_weights(header, read, target)


def new_path(out: str, folder: bool) -> Path:
    path = Path(out).expanduser()
    if path.exists():
        raise ValueError(f"{path} is there already; name another, or remove it")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent}: no such folder")
    if folder == (path.suffix == ".safetensors"):
        raise ValueError(f"{path}: this format is {'a folder' if folder else 'a .safetensors file'}; name it so")
    return path


def write_folder(header: dict, read: Callable[[str], Tensor], out: Path, config: dict, stem: str):
    """Shards of at most SHARD_BYTES with their index, or one file, and config.json; under another name until all is
    there."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in header.items()}
    groups, used = [[]], 0
    for name in sorted(header):
        if groups[-1] and used + sizes[name] > SHARD_BYTES:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += sizes[name]
    n = len(groups)
    files = [f"{stem}-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)] if n > 1 else [f"{stem}.safetensors"]
    partial = out.with_name(out.name + ".partial")
    try:
        partial.mkdir()
        for file, names in zip(files, groups, strict=True):
            stream_weights({name: header[name] for name in names}, read, partial / file)
        if n > 1:
            homes = {name: file for file, names in zip(files, groups, strict=True) for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": homes}
            (partial / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
        (partial / "config.json").write_text(json.dumps(config, indent=2))
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def diffusers_config(weights: Weights, heads: int) -> dict:
    """config.json of the class that opens the folder."""
    kind, shapes = weights.found.kind, weights.shapes
    fields = fields_of(kind, shapes)
    if kind == "dit":
        return dit_config(WanConfig(**fields, num_heads=heads_of(weights, heads)))
    if kind == "umt5":
        return umt5_config(UMT5Config(**fields))
    if kind == "clip":
        cls = "CLIPVisionModelWithProjection" if "visual.head" in shapes else "CLIPVisionModel"
        return {"architectures": [cls], **clip_vision_config(clip_config(shapes, heads_of(weights, heads)))}
    return autoencoder_config(vae_config(kind, fields))


def umt5_config(c: UMT5Config) -> dict:
    return {
        "architectures": ["UMT5EncoderModel"],
        "model_type": "umt5",
        "vocab_size": c.vocab,
        "d_model": c.dim,
        "d_kv": c.dim_attn // c.num_heads,
        "d_ff": c.dim_ffn,
        "num_layers": c.num_layers,
        "num_heads": c.num_heads,
        "relative_attention_num_buckets": c.num_buckets,
        "feed_forward_proj": "gated-gelu",
    }


def clip_vision_config(c: CLIPConfig) -> dict:
    return {
        "model_type": "clip_vision_model",
        "hidden_size": c.dim,
        "intermediate_size": c.dim * c.mlp_ratio,
        "projection_dim": c.out_dim,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "image_size": c.image_size,
        "patch_size": c.patch_size,
        "hidden_act": "gelu",
        "layer_norm_eps": c.norm_eps,
    }


def autoencoder_config(c: VAEConfig) -> dict:
    if c.num_res_blocks != 2:
        raise ValueError(
            f"this VAE has {c.num_res_blocks} residual blocks per stage; --to diffusers knows Wan's 2 alone"
        )
    config = {
        "_class_name": "AutoencoderKLWan",
        "base_dim": c.dim,
        "decoder_base_dim": c.dec_dim,
        "z_dim": c.z_dim,
        "dim_mult": c.dim_mult,
        "num_res_blocks": c.num_res_blocks,
        "temperal_downsample": c.temperal_downsample,
        "latents_mean": c.latents_mean,
        "latents_std": c.latents_std,
    }
    if not c.is_residual:
        return config
    channels = 3 * c.patch_size**2
    config |= {"is_residual": True, "patch_size": c.patch_size, "in_channels": channels, "out_channels": channels}
    return config | {"scale_factor_spatial": c.spatial, "scale_factor_temporal": c.temporal}


def dit_config(c: WanConfig) -> dict:
    """The arguments of diffusers' WanTransformer3DModel."""
    return {
        "_class_name": "WanTransformer3DModel",
        "patch_size": c.patch_size,
        "num_attention_heads": c.num_heads,
        "attention_head_dim": c.dim // c.num_heads,
        "in_channels": c.in_dim,
        "out_channels": c.out_dim,
        "text_dim": c.text_dim,
        "freq_dim": c.freq_dim,
        "ffn_dim": c.ffn_dim,
        "num_layers": c.num_layers,
        "cross_attn_norm": c.cross_attn_norm,
        "qk_norm": "rms_norm_across_heads",
        "eps": c.eps,
        "image_dim": c.clip_dim if c.reads_clip else None,
        "added_kv_proj_dim": c.dim if c.reads_clip else None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": 2 * 257 if c.model_type == "flf2v" else None,
    }


# ---------------------------------------------------------------------------------------------------------------------


def command(argv: list[str]) -> int:
    words = 1
    while words < len(argv) and not argv[words].startswith("--"):
        words += 1
    paths, rest = argv[1:words], argv[words:]
    if argv[:1] == ["inspect"] and (paths or rest):
        found = [inspect(path, parse(Inspect, rest, __doc__)) for path in paths]
        print("\n".join(text for text, _ in found))
        return 0 if all(whole for _, whole in found) else 1
    if argv[:1] == ["convert"] and (len(paths) == 2 or "--help" in rest):
        convert(*paths, parse(Convert, rest, __doc__))
        return 0
    if argv[:1] == ["merge"] and (len(paths) > 2 or "--help" in rest):
        options = parse(Merge, rest, __doc__)
        merge(paths[0], paths[1:-1], paths[-1], options)
        return 0
    raise ValueError(
        "usage: checkpoint.py inspect FILE... | convert IN OUT --to FORMAT | merge BASE LORA... OUT; --help after these"
    )


if __name__ == "__main__":
    try:
        sys.exit(command(sys.argv[1:]))
    except (ValueError, OSError) as error:
        exit_with("checkpoint.py", error)

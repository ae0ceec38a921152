"""What the names in a weights file say: which model it is, and what other programs call the same tensors.

Pure logic on {name: (shape, dtype)}; nothing here opens a file. Official names are the language in between:

    form        names
    official    Wan-Video's own; ComfyUI and DiffSynth use them as well, behind a prefix
    diffusers   diffusers' for the DiT and the VAEs, transformers' for umT5 and CLIP

A name is a module's path and a leaf ("weight", "bias", "gamma"); the tables below pair the modules, `{}` being the
block's number. Tensors are the same in both forms, but for three of CLIP's that change shape and its q, k and v, one
tensor in the official form and three in the other. ComfyUI's fp8 files carry a scale beside each weight.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model import CONFIGS, WanConfig

# ---------------------------------------------------------------------------------------------------------------------
# Tables: {official module: the other form's}


def dit_table() -> dict[str, str]:
    """diffusers' WanTransformer3DModel."""
    embedder = "condition_embedder"
    table = {
        "patch_embedding": "patch_embedding",
        "text_embedding.0": f"{embedder}.text_embedder.linear_1",
        "text_embedding.2": f"{embedder}.text_embedder.linear_2",
        "time_embedding.0": f"{embedder}.time_embedder.linear_1",
        "time_embedding.2": f"{embedder}.time_embedder.linear_2",
        "time_projection.1": f"{embedder}.time_proj",
        "img_emb.proj.0": f"{embedder}.image_embedder.norm1",
        "img_emb.proj.1": f"{embedder}.image_embedder.ff.net.0.proj",
        "img_emb.proj.3": f"{embedder}.image_embedder.ff.net.2",
        "img_emb.proj.4": f"{embedder}.image_embedder.norm2",
        "img_emb.emb_pos": f"{embedder}.image_embedder.pos_embed",
        "head.head": "proj_out",
        "head.modulation": "scale_shift_table",
        "blocks.{}.modulation": "blocks.{}.scale_shift_table",
        "blocks.{}.norm3": "blocks.{}.norm2",
        "blocks.{}.ffn.0": "blocks.{}.ffn.net.0.proj",
        "blocks.{}.ffn.2": "blocks.{}.ffn.net.2",
    }
    parts = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
    image = {"k_img": "add_k_proj", "v_img": "add_v_proj", "norm_k_img": "norm_added_k"}
    for ours, theirs, layers in (("self_attn", "attn1", parts), ("cross_attn", "attn2", parts | image)):
        table |= {f"blocks.{{}}.{ours}.{a}": f"blocks.{{}}.{theirs}.{b}" for a, b in layers.items()}
    return table


def vae_table(version: str) -> dict[str, str]:
    """diffusers' AutoencoderKLWan. Wan 2.1 numbers all layers of one side in a row, Wan 2.2 numbers them by stage."""
    table = {"conv1": "quant_conv", "conv2": "post_quant_conv"}
    residual = {}  # residual blocks, whose layers have names of their own
    for side in ("encoder", "decoder"):
        table[f"{side}.conv1"] = f"{side}.conv_in"
        table[f"{side}.head.0"] = f"{side}.norm_out"
        table[f"{side}.head.2"] = f"{side}.conv_out"
        table[f"{side}.middle.1"] = f"{side}.mid_block.attentions.0"
        residual |= {f"{side}.middle.{2 * i}": f"{side}.mid_block.resnets.{i}" for i in (0, 1)}
    down, up = "encoder.downsamples", "decoder.upsamples"
    if version == "2.1":
        residual |= {f"{down}.{i}": f"encoder.down_blocks.{i}" for i in (0, 1, 3, 4, 6, 7, 9, 10)}
        table |= {f"{down}.{i}": f"encoder.down_blocks.{i}" for i in (2, 5, 8)}
        residual |= {f"{up}.{4 * i + j}": f"decoder.up_blocks.{i}.resnets.{j}" for i in range(4) for j in range(3)}
        table |= {f"{up}.{4 * i + 3}": f"decoder.up_blocks.{i}.upsamplers.0" for i in range(3)}
    else:
        for i in range(4):
            residual |= {f"{down}.{i}.downsamples.{j}": f"encoder.down_blocks.{i}.resnets.{j}" for j in range(2)}
            residual |= {f"{up}.{i}.upsamples.{j}": f"decoder.up_blocks.{i}.resnets.{j}" for j in range(3)}
            table[f"{down}.{i}.downsamples.2"] = f"encoder.down_blocks.{i}.downsampler"
            table[f"{up}.{i}.upsamples.3"] = f"decoder.up_blocks.{i}.upsampler"
    layers = {f"residual.{i}": name for i, name in ((0, "norm1"), (2, "conv1"), (3, "norm2"), (6, "conv2"))}
    layers["shortcut"] = "conv_shortcut"
    return table | {f"{o}.{a}": f"{t}.{b}" for o, t in residual.items() for a, b in layers.items()}


def umt5_table() -> dict[str, str]:
    """transformers' UMT5EncoderModel."""
    attention, feed_forward = "encoder.block.{}.layer.0", "encoder.block.{}.layer.1"
    return {
        "token_embedding": "shared",
        "norm": "encoder.final_layer_norm",
        "blocks.{}.norm1": f"{attention}.layer_norm",
        **{f"blocks.{{}}.attn.{x}": f"{attention}.SelfAttention.{x}" for x in "qkvo"},
        "blocks.{}.pos_embedding.embedding": f"{attention}.SelfAttention.relative_attention_bias",
        "blocks.{}.norm2": f"{feed_forward}.layer_norm",
        "blocks.{}.ffn.gate.0": f"{feed_forward}.DenseReluDense.wi_0",
        "blocks.{}.ffn.fc1": f"{feed_forward}.DenseReluDense.wi_1",
        "blocks.{}.ffn.fc2": f"{feed_forward}.DenseReluDense.wo",
    }


def clip_table() -> dict[str, str]:
    """transformers' CLIPVisionModel (as files have it; "pre_layrnorm" is theirs)."""
    layer, ours = "vision_model.encoder.layers.{}", "visual.transformer.{}"
    return {
        "visual.cls_embedding": "vision_model.embeddings.class_embedding",
        "visual.pos_embedding": "vision_model.embeddings.position_embedding.weight",
        "visual.patch_embedding": "vision_model.embeddings.patch_embedding",
        "visual.pre_norm": "vision_model.pre_layrnorm",
        "visual.post_norm": "vision_model.post_layernorm",
        "visual.head": "visual_projection.weight",
        f"{ours}.norm1": f"{layer}.layer_norm1",
        f"{ours}.attn.to_qkv": f"{layer}.self_attn.[qkv]_proj",  # three modules, in this order
        f"{ours}.attn.proj": f"{layer}.self_attn.out_proj",
        f"{ours}.norm2": f"{layer}.layer_norm2",
        f"{ours}.mlp.0": f"{layer}.mlp.fc1",
        f"{ours}.mlp.2": f"{layer}.mlp.fc2",
    }


TABLES = {
    "dit": dit_table(),
    "vae2.1": vae_table("2.1"),
    "vae2.2": vae_table("2.2"),
    "umt5": umt5_table(),
    "clip": clip_table(),
}
INVERSE = {
    kind: {theirs.replace("[qkv]", x): ours for ours, theirs in table.items() for x in "qkv"}
    for kind, table in TABLES.items()
}

# ---------------------------------------------------------------------------------------------------------------------
# Names and tensors from one form into the other


def translate(name: str, table: dict[str, str]) -> str | None:
    """`name` with the longest module path that `table` knows replaced; None where it knows none."""
    number = re.search(r"(?<=\.)\d+(?=\.)", name)  # the block's; some modules carry numbers that are part of the name
    templates = [(name, "")]
    if number:
        templates.append((f"{name[: number.start()]}{{}}{name[number.end() :]}", number[0]))
    for template, n in templates:
        parts = template.split(".")
        for cut in range(len(parts), 0, -1):
            if found := table.get(".".join(parts[:cut])):
                return ".".join((found, *parts[cut:])).replace("{}", n)
    return None


def diffusers_names(kind: str, name: str) -> list[str]:
    """What diffusers (or transformers) calls the official tensor: one name, three for CLIP's q, k and v; [] where it
    has no such tensor."""
    theirs = translate(name, TABLES[kind])
    if theirs is None:
        return []
    return [theirs.replace("[qkv]", x) for x in "qkv"] if "[qkv]" in theirs else [theirs]


def diffusers_name(name: str) -> str:
    """The name that diffusers gives to the DiT's official parameter or module `name`."""
    theirs = translate(name, TABLES["dit"])
    return name if theirs is None else theirs


def official_name(kind: str, name: str) -> str | None:
    """The inverse of `diffusers_names`. Newer transformers leave out CLIP's "vision_model."."""
    if kind == "clip" and name.startswith(("embeddings.", "pre_layrnorm.", "encoder.layers.", "post_layernorm.")):
        name = "vision_model." + name
    return translate(name, INVERSE[kind])


def join(name: str, parts: list[Tensor]) -> Tensor:
    """The official tensor `name` of diffusers' tensors in the order of `diffusers_names`."""
    x = torch.cat(parts) if len(parts) > 1 else parts[0]
    if name == "visual.head":
        return x.T  # (out, C) -> (C, out)
    shape = {"visual.cls_embedding": (1, 1, -1), "visual.pos_embedding": (1, *x.shape)}.get(name)
    return x.reshape(shape) if shape else x


def split(name: str, x: Tensor) -> list[Tensor]:
    """The inverse of `join`."""
    if name == "visual.head":
        return [x.T]
    if name in ("visual.cls_embedding", "visual.pos_embedding"):
        return [x.flatten() if name == "visual.cls_embedding" else x[0]]
    return list(x.chunk(3)) if ".attn.to_qkv." in name and name.startswith("visual.") else [x]


# ---------------------------------------------------------------------------------------------------------------------
# What is in a file

COMFY = ("model.diffusion_model.", "diffusion_model.", "first_stage_model.", "text_encoders.umt5xxl.transformer.")
DIFFSYNTH = ("pipe.dit.", "dit.")
PREFIXES = (*COMFY, *DIFFSYNTH, "vae.", "module.", "_orig_mod.", "")  # "module." and "_orig_mod.": torch's wrappers
SCALES, UNUSED_SCALES = (".scale_weight", ".weight_scale"), (".scale_input", ".input_scale", ".comfy_quant")
ADAPTER = re.compile(r"\.lora|\.(alpha|diff|diff_b|diff_m)$")  # a LoRA's names are the model's, with these behind

# Tensors of the files that the models here have no use for: CLIP's text side, a second name of umT5's embedding, and
# the tokenizer that ComfyUI packs beside it.
CLIP_TEXT = ("textual.", "log_scale", "text_model.", "logit_scale", "text_projection.")
UNUSED = {
    "clip": (*CLIP_TEXT, "vision_model.embeddings.position_ids"),
    "umt5": ("encoder.embed_tokens.", "spiece_model"),
}
NEVER_COMPUTED = ("visual.head",)  # of the models here, and not in every file of transformers: loads as zeros

Header = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape, dtype)


class Source(NamedTuple):
    """Where an official tensor comes from: names in the file (three for transformers' q, k, v), each with the name of
    its fp8 scale or None."""

    names: tuple[str, ...]
    scales: tuple[str | None, ...]


@dataclass(frozen=True)
class Found:
    """One model in a file."""

    kind: str  # of TABLES
    form: str  # official | diffusers
    prefix: str
    sources: dict[str, Source]  # by official name
    shapes: dict[str, tuple[int, ...]]  # by official name
    scaled: bool  # fp8 with scales

    @property
    def format(self) -> str:
        """Whose way of writing it is."""
        if self.prefix in COMFY or self.scaled:
            return "ComfyUI"
        if self.prefix in DIFFSYNTH:
            return "DiffSynth"
        if self.form == "official":
            return "official"
        return "transformers" if self.kind in ("umt5", "clip") else "diffusers"


def find_models(header: Header) -> list[Found]:
    """Every model that a file holds, a DiT first, then the one with most tensors; ComfyUI packs several into a file."""
    rest, found = set(header), []
    for prefix in PREFIXES:
        names = sorted(name for name in rest if name.startswith(prefix))
        short = {name.removeprefix(prefix) for name in names}
        best = max((fits(short, kind, form), kind, form) for kind in TABLES for form in ("official", "diffusers"))
        if best[0] > len(plain(short)) / 2:
            found.append(gather(header, names, prefix, best[1], best[2]))
            rest -= set(names)
    return sorted(found, key=lambda model: (model.kind != "dit", -len(model.shapes)))


def plain(names: Iterable[str]) -> list[str]:
    """Names without those of fp8 scales."""
    return [name for name in names if not name.endswith((*SCALES, *UNUSED_SCALES, "scaled_fp8"))]


def fits(names: set[str], kind: str, form: str) -> int:
    """How many names belong to the model; those that it leaves unused count, as they tell it as well."""
    known = diffusers_names if form == "official" else official_name
    whole = (name for name in plain(names) if not ADAPTER.search(name))
    return sum(bool(known(kind, name)) or unused(kind, name) for name in whole)


def unused(kind: str, name: str) -> bool:
    return name.startswith(UNUSED.get(kind, ()))


def gather(header: Header, names: list[str], prefix: str, kind: str, form: str) -> Found:
    """The model `kind` that `names` are, in official names. A name that it does not know stays as it is."""
    parts: dict[str, list[str]] = {}
    for name in plain(names):
        short = name.removeprefix(prefix)
        if unused(kind, short):
            continue
        official = official_name(kind, short) if form == "diffusers" else short
        parts.setdefault(official or short, []).append(name)
    present, sources, shapes = set(names), {}, {}
    for official, its in parts.items():
        if len(its) > 1:  # CLIP's q, k, v, in this order
            its = sorted(its, key=lambda name: "qkv".index(name[name.index("_proj") - 1]))
        modules = [name.removesuffix(".weight") for name in its]
        scales = [next((m + s for s in SCALES if m + s in present), None) for m in modules]
        sources[official] = Source(tuple(its), tuple(scales))
        empty = [torch.empty(header[name][0], device="meta") for name in its]
        shapes[official] = tuple((join(official, empty) if form == "diffusers" else empty[0]).shape)
    scaled = any(any(source.scales) for source in sources.values())
    return Found(kind, form, prefix, sources, shapes, scaled)


# ---------------------------------------------------------------------------------------------------------------------
# Which model it is, from shapes

SAYS = {
    "t2v": "a text-to-video checkpoint",
    "i2v": "an image-to-video checkpoint",
    "flf2v": "a first-and-last-frame-to-video checkpoint",
    "ti2v": "a text-and-image-to-video checkpoint",
    "vae2.1": "a Wan 2.1 VAE",
    "vae2.2": "a Wan 2.2 VAE",
    "umt5": "a umT5 encoder",
    "clip": "a CLIP vision tower",
}


def fields_of(kind: str, shapes: dict[str, tuple[int, ...]]) -> dict:
    """The configuration's fields as far as shapes give them away. The number of heads is in no shape but umT5's."""
    numbers = [int(n) for name in shapes for n in re.findall(r"^(?:visual\.transformer|blocks)\.(\d+)\.", name)]
    layers = {"num_layers": max(numbers) + 1} if numbers else {}
    at = lambda name, axis: shapes[name][axis] if len(shapes.get(name, ())) > axis else 0  # noqa: E731
    if kind == "dit":
        return dit_fields(shapes, at) | layers
    if kind in ("vae2.1", "vae2.2"):
        sizes = {"z_dim": at("conv2.weight", 0), "dim": at("encoder.conv1.weight", 0)}
        return sizes | {"dec_dim": at("decoder.head.0.gamma", 0)}
    if kind == "umt5":
        bias = "blocks.0.pos_embedding.embedding.weight"
        sizes = {"vocab": at("token_embedding.weight", 0), "dim": at("token_embedding.weight", 1)}
        sizes |= {"dim_attn": at("blocks.0.attn.q.weight", 0), "dim_ffn": at("blocks.0.ffn.fc1.weight", 0)}
        return sizes | {"num_heads": at(bias, 1), "num_buckets": at(bias, 0)} | layers
    return {"dim": at("visual.pos_embedding", 2), "patch_size": at("visual.patch_embedding.weight", 2)} | layers


def dit_fields(shapes: dict[str, tuple[int, ...]], at) -> dict:
    """in_dim and out_dim tell the variants apart, as do the tensors for CLIP features."""
    patch = tuple(shapes.get("patch_embedding.weight", ())[2:])
    in_dim = at("patch_embedding.weight", 1)
    out_dim = at("head.head.weight", 0) // max(1, torch.Size(patch).numel())
    clip_dim = at("img_emb.proj.0.weight", 0)
    if "img_emb.emb_pos" in shapes:
        model_type = "flf2v"
    elif clip_dim or in_dim > out_dim:
        model_type = "i2v"
    else:
        model_type = "ti2v" if out_dim == 48 else "t2v"  # 48: the latents of Wan 2.2's VAE, which only TI2V uses
    return {
        "model_type": model_type,
        "in_dim": in_dim,
        "out_dim": out_dim,
        "dim": at("patch_embedding.weight", 0),
        "ffn_dim": at("blocks.0.ffn.0.weight", 0),
        "text_dim": at("text_embedding.0.weight", 1),
        "freq_dim": at("time_embedding.0.weight", 1),
        "patch_size": patch,
        "clip_dim": clip_dim,
    }


def preset_fields(config: WanConfig) -> dict:
    """`fields_of` a model of this configuration."""
    names = "model_type in_dim out_dim dim ffn_dim text_dim freq_dim patch_size num_layers".split()
    return {name: getattr(config, name) for name in names} | {"clip_dim": config.clip_dim if config.reads_clip else 0}


def presets_of(fields: dict) -> list[str]:
    """The presets of model.py that such a DiT can be: two for Wan 2.1's 14B T2V, whose shapes are also Wan 2.2's."""
    return [name for name, config in CONFIGS.items() if preset_fields(config) == fields]


def describe(kind: str, fields: dict, only: Iterable[str] = ()) -> str:
    """ "an image-to-video checkpoint (in_dim 36)": what it is, with the fields named in `only`."""
    shown = ", ".join(f"{name} {fields[name]}" for name in only if name in fields and name != "model_type")
    return SAYS[fields.get("model_type", kind)] + (f" ({shown})" if shown else "")

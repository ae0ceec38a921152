"""LoRA files: reading and writing the ways in which others write them, and finding their places in a model.

    comfyui     diffusion_model.blocks.0.self_attn.q.lora_A.weight, .lora_B.weight, .alpha, .diff, .diff_b
    diffusers   transformer.blocks.0.attn1.to_q.lora_A.weight, .lora_B.weight; PEFT, DiffSynth: .lora_A.default.weight
    kohya       lora_unet_blocks_0_self_attn_q.lora_down.weight, .lora_up.weight, .alpha (musubi-tuner's as well)

Inside, a LoRA is lora.py's: adapters by official module name.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from formats import TABLES, diffusers_name, official_name
from lora import Adapter, LoRA
from model import CONFIGS
from weights import metadata_of, open_weights, refuse_nan, weight_files, write_weights

LORA_FORMS = ("comfyui", "diffusers", "kohya")
PREFIXES = re.compile(r"^(model\.diffusion_model|diffusion_model|pipe\.dit|dit|transformer(_2)?)\.")
FACTOR = re.compile(  # PEFT puts the adapter's name, "default", before the leaf
    r"\.(lora_A|lora_B|lora_down|lora_up|lora\.down|lora\.up)(?:\.(?!weight$|bias$)[^.]+)?(?:\.(weight|bias))?$"
)
OTHER = re.compile(r"\.(alpha|diff|diff_b|diff_m)$")
DOWN = ("lora_A", "lora_down", "lora.down")
KOHYA = "lora_unet_"
BARE = ("modulation", "emb_pos")  # modules that are one parameter themselves, with no leaf

# Official and diffusers' modules by their names with underscores: k_img has one of its own, so splitting cannot work.
FLAT = {name.replace(".", "_"): official for official, theirs in TABLES["dit"].items() for name in (official, theirs)}


def is_lora(names) -> bool:
    """Do most of a file's names belong to low-rank adapters or differences?"""
    return sum(bool(FACTOR.search(name) or OTHER.search(name)) for name in names) > len(names) / 2


def lora_form(names) -> str:
    """Which of LORA_FORMS a file's names are nearest to; "diffsynth" where official names stand alone."""
    first = min(names)
    if first.startswith(KOHYA):
        return "kohya"
    if any(".attn1." in name or ".attn2." in name for name in names):
        return "diffusers"
    return "comfyui" if "diffusion_model." in first else "diffsynth"


def official_module(name: str) -> str:
    """The official name of the module that a LoRA's key is about; a name that nobody knows stays as it is."""
    name = PREFIXES.sub("", name.removeprefix("base_model.model."))
    if name.startswith(KOHYA):
        name = name.removeprefix(KOHYA)
        block = re.match(r"blocks_(\d+)_", name)
        flat = FLAT.get(name.replace(block[0], "blocks_{}_", 1) if block else name)
        return flat.replace("{}", block[1]) if flat and block else flat or name
    return official_name("dit", name) or name


def read_lora(path: str | Path, expert: str = "") -> LoRA:
    """A LoRA file in any of the forms, in official names; tensors on the CPU as they are, factors of convolutions
    flattened to matrices.

    expert: diffusers keeps LoRAs for both experts of Wan 2.2 in one file, as transformer (high) and transformer_2
    (low); this names the one wanted. ValueError, in one line, where the file is damaged or something else.
    """
    path = Path(path).expanduser()
    entries = open_weights(path)
    if not entries or not is_lora(entries):
        raise ValueError(f"{path} is no LoRA file: of {len(entries)} tensors, first {min(entries, default='none')}")
    names = of_expert(path, entries, expert)
    factors: dict[str, dict[str, Tensor]] = {}
    alphas, diffs = {}, {}
    for name in names:
        tensor = entries[name].read()
        refuse_nan(tensor, f"{path}: {name}")
        if match := FACTOR.search(name):
            module = official_module(name[: match.start()])
            if match[2] == "bias":
                diffs[f"{module}.bias"] = tensor
            else:
                factors.setdefault(module, {})["down" if match[1] in DOWN else "up"] = tensor.flatten(1)
        elif match := OTHER.search(name):
            module = official_module(name[: match.start()])
            if match[1] == "alpha":
                alphas[module] = float(tensor)
            else:
                diffs[difference_of(module, match[1])] = tensor
        else:
            raise ValueError(f"{path} holds {name}: picowan reads low-rank adapters and whole differences only")
    return LoRA(adapters_of(path, factors, alphas, peft_alpha(path)), diffs)


def of_expert(path: Path, names, expert: str) -> list[str]:
    second = {name for name in names if "transformer_2." in name}
    if not second:
        return sorted(names)
    chosen = {"high": set(names) - second, "low": second}
    if expert not in chosen and all(chosen.values()):
        raise ValueError(f"{path} holds LoRAs for both experts (transformer, transformer_2); say which: high or low")
    return sorted(chosen.get(expert) or second)


def difference_of(module: str, kind: str) -> str:
    """The parameter whose difference `module`.diff, .diff_b or .diff_m is."""
    if kind == "diff_m":
        return f"{module}.modulation"
    return module if module.endswith(BARE) else f"{module}.{'bias' if kind == 'diff_b' else 'weight'}"


def adapters_of(path: Path, factors: dict, alphas: dict[str, float], default: float) -> dict[str, Adapter]:
    adapters = {}
    for module, pair in factors.items():
        if len(pair) < 2:
            raise ValueError(f"{path}: {module} has {next(iter(pair))} and lacks the other factor; download it again")
        down, up = pair["down"], pair["up"]
        if up.shape[1] != down.shape[0]:
            raise ValueError(f"{path}: {module} has rank {down.shape[0]} on one side and {up.shape[1]} on the other")
        adapters[module] = Adapter(down, up, alphas.get(module, default or float(down.shape[0])))
    return adapters


def peft_alpha(path: Path) -> float:
    """The one alpha that PEFT keeps for all adapters in a file beside the weights, diffusers in the file's metadata;
    0 where there is none."""
    (file,) = weight_files(path)
    beside = file.with_name("adapter_config.json")
    if beside.is_file():
        config = json.loads(beside.read_text())
    else:
        config = json.loads(metadata_of(file).get("lora_adapter_metadata", "{}"))
        config = {name.split(".", 1)[1]: value for name, value in config.items()}  # transformer.lora_alpha
    for option in ("use_rslora", "use_dora", "alpha_pattern"):
        if config.get(option):
            raise ValueError(f"{path} has PEFT's {option}, which picowan does not read")
    return float(config.get("lora_alpha", 0))


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write_lora(lora: LoRA, path: str | Path, form: str):
    """Write in one of LORA_FORMS, each read by the programs of that name with the same result."""
    if form not in LORA_FORMS:
        raise ValueError(f"a LoRA is written as {', '.join(LORA_FORMS)}, not as {form}")
    named = diffusers_lora(lora) if form == "diffusers" else alpha_lora(lora, form == "kohya")
    write_weights(named, Path(path).expanduser())


def alpha_lora(lora: LoRA, kohya: bool) -> dict[str, Tensor]:
    named, (down, up) = {}, ("lora_down", "lora_up") if kohya else ("lora_A", "lora_B")
    spell = (lambda m: KOHYA + m.replace(".", "_")) if kohya else (lambda m: f"diffusion_model.{m}")
    for module, adapter in lora.adapters.items():
        key = spell(module)
        named[f"{key}.{down}.weight"], named[f"{key}.{up}.weight"] = convolution_factors(module, adapter)
        named[f"{key}.alpha"] = torch.tensor(adapter.alpha)
    for name, diff in lora.diffs.items():
        module, _, leaf = name.rpartition(".")
        bare = name.endswith(BARE)
        named[f"{spell(name if bare else module)}.{'diff_b' if leaf == 'bias' and not bare else 'diff'}"] = diff
    return named


def diffusers_lora(lora: LoRA) -> dict[str, Tensor]:
    """PEFT's files have no place for alpha: up takes alpha / r with it. Of differences they know an adapter's bias."""
    named = {}
    for module, adapter in lora.adapters.items():
        key = f"transformer.{diffusers_name(module)}"
        down, up = convolution_factors(module, adapter)
        exact = up.float() * (adapter.alpha / len(adapter.down))
        narrow = exact.to(up.dtype)
        named[f"{key}.lora_A.weight"] = down
        named[f"{key}.lora_B.weight"] = narrow if torch.equal(narrow.float(), exact) else exact
    homeless = [name for name in lora.diffs if name.removesuffix(".bias") not in lora.adapters]
    if homeless:
        raise ValueError(
            f"diffusers' LoRA files have no place for {len(homeless)} whole differences (first {homeless[0]}); "
            "write comfyui or kohya, or merge the LoRA"
        )
    for name, diff in lora.diffs.items():
        named[f"transformer.{diffusers_name(name.removesuffix('.bias'))}.lora_B.bias"] = diff
    return named


def convolution_factors(module: str, adapter: Adapter) -> tuple[Tensor, Tensor]:
    """(down, up) in the shapes of files: those of the patch embedding, the one convolution, get its kernel back."""
    if module != "patch_embedding":
        return adapter.down, adapter.up
    kernel = CONFIGS["demo"].patch_size  # every Wan model's
    return adapter.down.unflatten(1, (-1, *kernel)), adapter.up[..., None, None, None]


# ---------------------------------------------------------------------------------------------------------------------
# Matching


@dataclass(frozen=True)
class Match:
    """How a LoRA fits a model; `str` of it is the report."""

    total: int  # adapters and differences of the file
    placed: list[str]  # modules and parameters that have a place
    absent: Counter  # kind of module -> how many the model has no such module for
    resized: Counter  # kind of module and both widths -> how many

    def __str__(self) -> str:
        text = f"of {self.total} adapters {len(self.placed)} match"
        for words, counts in (("without a place", self.absent), ("of another size", self.resized)):
            if counts:
                text += f"; {words}: " + ", ".join(f"{kind} {n}" for kind, n in sorted(counts.items()))
        return text


def match_lora(lora: LoRA, shapes: dict[str, tuple[int, ...]]) -> Match:
    """Find every adapter's place among a model's official {name: shape}. ValueError where none has one; a part without
    a place is for the caller to report (`str` of the result)."""
    wanted = {name: (len(a.up), a.down.shape[1]) for name, a in lora.adapters.items()}
    wanted |= {name: tuple(diff.shape) for name, diff in lora.diffs.items()}
    match = Match(len(wanted), [], Counter(), Counter())
    for name, size in wanted.items():
        there = shapes.get(f"{name}.weight" if name in lora.adapters else name)
        if there and name in lora.adapters:
            there = (there[0], torch.Size(there[1:]).numel())
        kind = re.sub(r"^blocks\.\d+\.", "", name)
        if there is None:
            match.absent[kind] += 1
        elif tuple(there) == size:
            match.placed.append(name)
        else:
            match.resized[f"{kind} ({' x '.join(map(str, size))} for {' x '.join(map(str, there))})"] += 1
    if not match.placed:
        raise ValueError(f"the LoRA is made for another model: {match}")
    return match

"""Files become the latents and text states that a model trains on: surveyed once, encoded once, by all ranks together.

What train.py does before its first step, and on its own the command

    torchrun --nproc-per-node 8 data.py cache clips/ --model wan2.1-t2v-14b --vae V --text-encoder T --tokenizer S

which fills the cache ahead, so that training, on other machines perhaps, finds everything in it.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import cache
import demo
import parallel
import sample
import survey
import weights
from memory import Memory
from presets import PRESETS


@dataclass(frozen=True)
class EncodeOptions(survey.DataOptions):
    """The options of train.py and of `data.py cache` that say what the samples are made with."""

    vae: str = ""  # weights of the VAE; empty: the demo's
    text_encoder: str = ""  # weights of the umT5 encoder; empty: the demo's
    tokenizer: str = ""  # SentencePiece file; empty: the demo's
    text_precision: Literal["", "fp32", "bf16"] = ""  # of the umT5 encoder; empty: bf16, as released, the demo's fp32
    image_encoder: str = ""  # weights of the CLIP vision tower, for Wan 2.1's image to video; empty: the demo's
    vae_tile: int = 0  # edge of the VAE's tiles, in latents (of 8 x 8 pixels, 16 x 16 in Wan 2.2); 0: whole frames
    vae_overlap: int = 8  # of tiles, in latents


def open_dataset(
    config: EncodeOptions, paths: dict[str, str], components: sample.Components, layout, folder: str = ""
) -> cache.LatentDataset:
    """Look into every file (rank 0, once); the dataset is to be filled (`fill`) before it gives samples.

    config is settled (survey.settled), paths are as from sample.encoder_paths. folder: instead of --data."""
    entries = [folder] if folder else config.data or [str(layout.on_rank_0(demo.write_demo_set, "demo_data"))]
    if config.cache != "off":
        layout.check_shared(Path(config.cache).expanduser(), "--cache")
    found = layout.on_rank_0(survey.survey, config, entries)
    text_files = [*weights.weight_files(Path(paths["text_encoder"]).expanduser()), Path(paths["tokenizer"])]
    text_key = " ".join([*layout.on_rank_0(cache.digests, text_files), str(components.text_dtype)])
    return cache.LatentDataset(
        found.items,
        survey.clip_spec(config),
        (found.probes, found.digests),
        components.vae,
        components.encode_text,
        text_key,
        config.cache,
        PRESETS[config.model].condition,
        components.image_encoder,
        found.mixture,
    )


def fill(dataset: cache.LatentDataset, layout):
    """Encode what the cache lacks, all ranks, each its part."""
    dataset.fill(layout.rank, layout.world, layout.barrier, layout.on_rank_0)


@dataclass(frozen=True)
class CacheOptions(EncodeOptions):
    shard: Literal["none", "full"] = "none"  # full: the ranks share the text encoder's weights


def fill_cache(config: CacheOptions) -> int:
    """The command `cache`: what `fill` encodes, and no more. All ranks call; returns the exit code."""
    if config.cache == "off":
        raise ValueError("--cache off keeps nothing: name the folder to fill")
    config = replace(config, **survey.settled(config))
    survey.check(config)
    paths = sample.encoder_paths(config)
    layout = parallel.start()
    components = sample.load_components(config, paths, layout, Memory(device=layout.device))
    fill(open_dataset(config, paths, components, layout), layout)
    parallel.stop()
    return 0

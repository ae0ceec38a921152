"""What stands around each preset of the DiT: which VAE and encoders, what it is conditioned on, how it is sampled.

`CONFIGS` in model.py says what the network is, `PRESETS` here everything else that a released model fixes. The numbers
are those of the official wan/configs and generate.py (Wan2.1 and Wan2.2), the demo's are ours.
"""

from dataclasses import dataclass, field
from typing import Literal

# The released pipelines' negative prompt (wan/configs/shared_config.py): what to steer away from.
NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，"
    "背景人很多，倒着走"
)
STEADY = "镜头晃动，" + NEGATIVE  # image to video: no shaking camera either
UNCUT = "镜头切换，" + STEADY  # first and last frame: nor a cut between them


@dataclass(frozen=True)
class Sampling:
    """How a model is meant to be sampled."""

    height: int = 480
    width: int = 832
    frames: int = 81
    fps: int = 16  # also the rate at which it is trained
    steps: int = 50
    shift: float = 5.0
    guidance: float = 5.0
    guidance_low: float | None = None  # of the low-noise expert; None: the same
    negative: str = NEGATIVE
    solver: Literal["unipc", "euler", "dpm++"] = "unipc"


@dataclass(frozen=True)
class Preset:
    sampling: Sampling = field(default_factory=Sampling)
    vae: str = "wan2.1"  # of VAE_CONFIGS
    text_encoder: str = "umt5-xxl"  # of UMT5_CONFIGS
    image_encoder: str = ""  # of CLIP_CONFIGS; empty: none
    # What the model is given besides text. "first", "first-last": 4 mask channels and the latents of a video that holds
    # these frames and is grey elsewhere, behind the noisy latents. "first-latent": latent frame 0 is given clean.
    condition: Literal["", "first", "first-last", "first-latent"] = ""
    boundary: float = 0.0  # sigma, after the shift, from which up the high-noise expert works; 0: one model
    demo: bool = False  # its encoders ship in assets/

    @property
    def experts(self) -> tuple[str, ...]:
        return ("high", "low") if self.boundary else ("",)


SMALL = Sampling(64, 64, 17, 16, steps=20, shift=3.0, guidance=3.0, negative="")
DEMO = dict(vae="demo", text_encoder="demo", demo=True)
PRESETS = {
    "demo": Preset(SMALL, **DEMO),
    "demo-i2v": Preset(SMALL, image_encoder="demo", condition="first", **DEMO),
    "demo-flf2v": Preset(SMALL, image_encoder="demo", condition="first-last", **DEMO),
    "demo-t2v-experts": Preset(SMALL, boundary=0.875, **DEMO),
    "demo-i2v-experts": Preset(SMALL, condition="first", boundary=0.9, **DEMO),
    "demo-ti2v": Preset(SMALL, condition="first-latent", **(DEMO | dict(vae="demo-2.2"))),
    "wan2.1-t2v-1.3b": Preset(Sampling()),
    "wan2.1-t2v-14b": Preset(Sampling(720, 1280)),
    "wan2.1-i2v-14b": Preset(
        Sampling(720, 1280, steps=40, negative=STEADY), image_encoder="vit-h-14", condition="first"
    ),
    "wan2.1-flf2v-14b": Preset(
        Sampling(720, 1280, shift=16.0, negative=UNCUT), image_encoder="vit-h-14", condition="first-last"
    ),
    "wan2.2-t2v-a14b": Preset(
        Sampling(720, 1280, steps=40, shift=12.0, guidance=4.0, guidance_low=3.0), boundary=0.875
    ),
    "wan2.2-i2v-a14b": Preset(
        Sampling(720, 1280, steps=40, guidance=3.5, guidance_low=3.5), condition="first", boundary=0.9
    ),
    "wan2.2-ti2v-5b": Preset(Sampling(704, 1280, 121, 24), vae="wan2.2", condition="first-latent"),
}

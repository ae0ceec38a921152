"""What image-to-video models are given, against what the released pipelines gave them and made of it."""

import dataclasses

import pytest
import torch
from test_model import relative

from condition import padded, prepared, size_for, with_mask
from presets import Sampling
from sample import Given, generate
from vae import VAE_CONFIGS, WanVAE


def golden_vae(golden, name: str) -> WanVAE:
    """The tiny VAE that the released pipelines were recorded with, with the released one's statistics."""
    released, shape = VAE_CONFIGS["wan2.2" if name == "vae22_weights" else "wan2.1"], golden.config(name)
    names = {field.name for field in dataclasses.fields(released)}
    config = dataclasses.replace(released, **{k: v for k, v in shape.items() if k in names})
    vae = WanVAE(config).requires_grad_(False)
    vae.load_state_dict({k.removeprefix("w."): v for k, v in golden(name).items() if k.startswith("w.")})
    return vae


def test_sizes(golden):
    """If this goes, a picture becomes a video of another size than the released pipelines make of it, whose floating
    point turns 480 x 832 pixels into 464 x 832."""
    sizes = golden("cond_sizes")
    for (width, height, multiple, _, area), expected in sizes["best_output_size(w,h,dw,dh,area)"]:
        assert list(size_for("first-latent", height, width, area, multiple)) == expected[::-1]
    for (height, width, area), expected in sizes["i2v latent size (h,w,max_area) -> (lat_h,lat_w,pixel_h,pixel_w)"]:
        assert list(size_for("first", height, width, area, 16)) == expected[2:]


@pytest.mark.parametrize("name", ["cond_i2v_21", "cond_i2v_22"])
def test_first_frame_condition(golden, name):
    """If this goes, an image-to-video model is given another picture, mask or order of channels than before."""
    case = golden(name)
    expected = case["out.vae_input"]
    first = prepared(case["in.image_uint8_hwc"].numpy(), "first", tuple(expected.shape[2:]))
    video = padded(first, expected.shape[1])
    assert torch.equal(video, expected)
    latents = golden_vae(golden, "vae21_weights").encode(video)
    assert relative(latents, case["out.vae_latent"]) < 1e-5
    assert torch.equal(with_mask(case["out.vae_latent"], "first"), case["out.y"])


def test_first_and_last_frame_condition(golden):
    """As above, for the model that is given both ends: of the last latent frame only the last picture is known."""
    case = golden("cond_flf2v")
    size = tuple(case["out.vae_input_first"].shape[2:])
    ends = [prepared(case[f"in.{end}_uint8_hwc"].numpy(), "first-last", size) for end in ("first", "last")]
    assert torch.equal(ends[0], case["out.vae_input_first"]) and torch.equal(ends[1], case["out.vae_input_last"])
    latents = golden_vae(golden, "vae21_weights").encode(padded(ends[0], 81, ends[1]))
    assert relative(latents, case["out.vae_latent"]) < 1e-5
    assert torch.equal(with_mask(case["out.vae_latent"], "first-last"), case["out.y"])
    assert torch.equal(case["out.mask"], case["out.y"][:4])


def test_first_latent_condition(golden):
    """If this goes, the 5B model's picture is resized or encoded in another way than the released one's."""
    case = golden("cond_ti2v_i2v")
    expected = case["out.vae_input"]
    picture = prepared(case["in.image_uint8_hwc"].numpy(), "first-latent", tuple(expected.shape[2:]))
    assert torch.equal(picture, expected)
    assert relative(golden_vae(golden, "vae22_weights").encode(picture), case["out.vae_latent"]) < 1e-5


class StandIn(torch.nn.Module):
    """The function that stood in for the DiT when the cases were recorded; notes what it was told."""

    def __init__(self):
        super().__init__()
        self.timesteps = []

    def forward(self, latents, timesteps, text, sp=None, image=None, condition=None):
        self.timesteps.append(timesteps[0])
        y = [0.0] * len(latents) if condition is None else [0.01 * c.mean() for c in condition]
        return [0.2 * x + t.mean() + c for x, t, c in zip(latents, text, y, strict=True)]


PIPELINES = {  # case: (steps, shift, guidance of the high-noise expert or the only one, of the low-noise one, boundary)
    "cond_i2v_21": (4, 5.0, 5.0, None, 0.0),
    "cond_flf2v": (4, 16.0, 5.5, None, 0.0),
    "cond_i2v_22": (40, 5.0, 4.5, 3.5, 0.9),
    "cond_t2v_22": (40, 12.0, 4.0, 3.0, 0.875),
    "cond_ti2v_i2v": (4, 5.0, 5.0, None, 0.0),
    "cond_ti2v_t2v": (4, 5.0, 5.0, None, 0.0),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_the_released_pipelines(golden, name):
    """If this goes, a mode no longer samples as the released pipeline does: which expert works at which step and with
    which guidance, what each frame's timestep is, what is put back after each step, what the condition is."""
    case = golden(name)
    steps, shift, guidance, guidance_low, boundary = PIPELINES[name]
    how = Sampling(steps=steps, shift=shift, guidance=guidance, guidance_low=guidance_low)
    noise = case["out.noise"] if "out.noise" in case else case["out.x0"]  # the latter with the picture put in
    given = Given(case["out.final_latent"].shape, case.get("out.y"))
    if name == "cond_ti2v_i2v":
        given.first = case["out.vae_latent"]
    experts = {"high": StandIn(), "low": StandIn()} if boundary else {"": StandIn()}
    texts, negative = [torch.full((1, 1), 0.3)], torch.full((1, 1), -0.1)
    out = generate(experts, texts, negative, [given], how, [noise], torch.float32, boundary)[0]
    assert relative(out, case["out.final_latent"]) < 1e-5
    if boundary:
        calls = int(case["out.is_high"].sum())
        assert (len(experts["high"].timesteps), len(experts["low"].timesteps)) == (2 * calls, 2 * (steps - calls))
    if "out.token_t" in case:
        per_frame = torch.stack([t.expand(given.shape[1]) for t in experts[""].timesteps[::2]])  # (steps, F)
        tokens = case["out.token_t"].unflatten(1, (given.shape[1], -1))
        assert torch.equal(per_frame[..., None].expand_as(tokens), tokens.double())

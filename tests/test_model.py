"""The DiT against the released models' own outputs, against diffusers, and against its own rules."""

import pytest
import torch

from model import CONFIGS, WanConfig, WanDiT, patchify, unpatchify

CASES = {"dit_t2v": "t2v", "dit_i2v_21": "i2v", "dit_flf2v": "flf2v", "dit_i2v_22": "i2v", "dit_ti2v": "ti2v"}
KEYS = {
    "wan2.1-t2v-1.3b": "wan2.1-t2v-1.3B",
    "wan2.1-t2v-14b": "wan2.1-t2v-14B",
    "wan2.1-i2v-14b": "wan2.1-i2v-14B",
    "wan2.1-flf2v-14b": "wan2.1-flf2v-14B",
    "wan2.2-t2v-a14b": "wan2.2-t2v-A14B",
    "wan2.2-i2v-a14b": "wan2.2-i2v-A14B",
    "wan2.2-ti2v-5b": "wan2.2-ti2v-5B",
}


def rms(x):
    return x.double().square().mean().sqrt()


def relative(x, reference):
    """Largest difference over the reference's rms."""
    return float((x.double() - reference.double()).abs().max() / rms(reference))


def golden_inputs(case):
    """The keyword arguments of a golden DiT case's forward."""
    t = case["in.t"]
    frames = [case[f"in.x.{i}"].shape for i in range(2)]
    if t.ndim == 2:  # Wan 2.2's per-token timesteps: constant within a latent frame
        t = [row[: f * h * w // 4].view(f, -1)[:, 0] for row, (_, f, h, w) in zip(t, frames, strict=True)]
    inputs = {
        "latents": [case["in.x.0"], case["in.x.1"]],
        "timesteps": t,
        "text": [case["in.context.0"], case["in.context.1"]],
    }
    if "in.y.0" in case:
        inputs["condition"] = [case["in.y.0"], case["in.y.1"]]
    if "in.clip_fea" in case:
        inputs["image"] = case["in.clip_fea"]
    return inputs


def golden_model(golden, name):
    case, config = golden(name), dict(golden.config(name))
    clip_dim = case["in.clip_fea"].shape[-1] if "in.clip_fea" in case else 0
    model = WanDiT(WanConfig(**config, clip_dim=clip_dim))
    model.load_state_dict({k[2:]: v for k, v in case.items() if k.startswith("w.")})
    return model, case


@pytest.mark.parametrize("name", CASES)
def test_golden_forward(golden, name):
    """If this goes, released weights no longer give the released models' output (tolerance: golden's README)."""
    model, case = golden_model(golden, name)
    with torch.no_grad():
        out = model(**golden_inputs(case))
    for i in range(2):
        assert relative(out[i], case[f"out.{i}"]) < 1e-5


@pytest.mark.parametrize("name", ["dit_t2v", "dit_ti2v"])
def test_golden_gradients(golden, name):
    """If this goes, training follows another gradient than the official code's (loss: mean over samples of the mse)."""
    model, case = golden_model(golden, name)
    out = model(**golden_inputs(case))
    loss = sum((out[i] - case[f"in.target.{i}"]).square().mean() for i in range(2)) / 2
    loss.backward()
    assert abs(loss.item() - case["out.loss"].item()) < 1e-6 * case["out.loss"].item()
    for key, parameter in model.named_parameters():
        reference = case[f"grad.{key}"]
        assert (parameter.grad - reference).abs().max() < 5e-5 * reference.abs().max(), key


@pytest.mark.parametrize("name", KEYS)
def test_official_keys(golden, name):
    """If this goes, an official checkpoint no longer loads strictly."""
    with torch.device("meta"):
        model = WanDiT(CONFIGS[name])
    ours = {k: list(v.shape) for k, v in model.state_dict().items()}
    assert ours == golden.keys(KEYS[name])

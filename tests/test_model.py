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


TINY = dict(dim=96, ffn_dim=160, num_heads=4, num_layers=3, text_dim=24, text_len=20, freq_dim=32)


def tiny_model(seed=0, **changes):
    torch.manual_seed(seed)
    model = WanDiT(WanConfig(**(TINY | changes)))
    torch.nn.init.normal_(model.head.head.weight, std=0.1)
    return model


def pack_inputs(model, shapes=((3, 8, 12), (1, 6, 4), (2, 2, 10)), dtype=torch.float32):
    torch.manual_seed(1)
    c = model.config
    return {
        "latents": [torch.randn(c.in_dim, *shape, dtype=dtype) for shape in shapes],
        "timesteps": torch.tensor([937.25, 250.0, 31.5][: len(shapes)], dtype=torch.float64),
        "text": [torch.randn(n, c.text_dim, dtype=dtype) for n in (5, 9, 14)[: len(shapes)]],
    }


def test_forward_and_gradients_equal_diffusers():
    """If this goes, picowan trains another model than diffusers' on the same weights: outputs within 5e-5 of their
    rms, each parameter's gradient within 5e-4 of its rms (diffusers keeps its time sinusoid in float32)."""
    from bench import diffusers_model
    from formats import diffusers_name

    model = tiny_model()
    peer = diffusers_model(model)
    inputs = pack_inputs(model)
    ours = model(**inputs)
    upstream = [torch.randn_like(x) for x in ours]
    torch.autograd.backward(ours, upstream)
    for x, t, text, mine, up in zip(*inputs.values(), ours, upstream, strict=True):
        padded = torch.nn.functional.pad(text, (0, 0, 0, model.config.text_len - len(text)))
        theirs = peer(x[None], t[None].float(), padded[None], return_dict=False)[0][0]
        theirs.backward(up)
        assert relative(mine.detach(), theirs.detach()) < 5e-5
    reference = dict(peer.named_parameters())
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad, reference[diffusers_name(name)].grad) < 5e-4, name


def test_names_map_to_diffusers(golden):
    """If this goes, weights no longer pass between picowan and diffusers."""
    from formats import diffusers_name

    for preset, file in (("wan2.1-t2v-14B", "wan2.1-t2v-14B"), ("wan2.1-flf2v-14B", "wan2.1-flf2v-14B")):
        for official, theirs in golden.map(f"{file}.official-to-diffusers").items():
            assert diffusers_name(official) == theirs, preset


def test_a_pack_equals_its_samples_alone():
    """If this goes, samples of a pack see each other: batches above one train on mixed-up attention or modulation."""
    model = tiny_model().double()
    inputs = pack_inputs(model, dtype=torch.float64)
    together = model(**inputs)
    for i, out in enumerate(together):
        alone = model(**{name: values[i : i + 1] for name, values in inputs.items()})[0]
        assert relative(out.detach(), alone.detach()) < 1e-12


def test_timestep_per_frame():
    """If this goes, TI2V's clean first frame is modulated by another frame's timestep."""
    model = tiny_model().double()
    inputs = pack_inputs(model, dtype=torch.float64)
    plain = model(**inputs)
    per_frame = [t.repeat(x.shape[1]) for t, x in zip(inputs["timesteps"], inputs["latents"], strict=True)]
    for a, b in zip(plain, model(**(inputs | {"timesteps": per_frame})), strict=True):
        assert relative(a.detach(), b.detach()) < 1e-12
    per_frame[0][0] = 0
    changed = model(**(inputs | {"timesteps": per_frame}))
    assert relative(changed[0].detach(), plain[0].detach()) > 1e-3
    assert relative(changed[1].detach(), plain[1].detach()) < 1e-12


def test_gradients_of_modulation():
    """If this goes, modulated norms or gates train on a wrong gradient: of the tokens, or of a row's values."""
    from model import GatedAdd, ModulatedNorm

    runs = [(0, 3), (2, 1), (0, 4)]
    x, y = (torch.randn(8, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    shift, scale = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda *a: ModulatedNorm.apply(*a, runs, 1e-6), (x, shift, scale))
    assert torch.autograd.gradcheck(lambda *a: GatedAdd.apply(*a, runs), (x, y, scale))


def test_float64_stays_float64():
    """If this goes, a float32 cast hides in the model and layouts can no longer be compared to 1e-12."""
    model = tiny_model().double()
    exact = model(**pack_inputs(model, dtype=torch.float64))
    assert all(x.dtype == torch.float64 for x in exact)
    rough = tiny_model()(**pack_inputs(model))
    error = max(relative(a.detach(), b.detach()) for a, b in zip(rough, exact, strict=True))
    perturbed = pack_inputs(model, dtype=torch.float64)
    perturbed["latents"][0] += 1e-12
    shift = relative(model(**perturbed)[0].detach(), exact[0].detach())
    assert 0 < shift < 1e-9 < error  # a float32 anywhere inside would round a change of 1e-12 away, or blow it up


def test_recompute_changes_nothing():
    """If this goes, --recompute block trains differently, or the recomputed pass draws other numbers."""
    model = tiny_model().double()
    grads = []
    for recompute in (False, True):
        for block in model.blocks:
            block.recompute = recompute
        model.zero_grad()
        torch.stack([x.square().mean() for x in model(**pack_inputs(model, dtype=torch.float64))]).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_bfloat16_pass_over_float32_weights():
    """If this goes, --precision bf16 loses its float32 gradients, or more precision than bfloat16 costs."""
    model = tiny_model()
    exact = model(**pack_inputs(model))
    rough = model(**pack_inputs(model, dtype=torch.bfloat16))
    assert all(relative(a.detach(), b.detach()) < 0.1 for a, b in zip(rough, exact, strict=True))
    torch.stack([x.square().mean() for x in rough]).sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_patchify_and_back():
    """If this goes, targets no longer line up with predictions."""
    x = torch.randn(3, 4, 6, 10)
    tokens = patchify(x, (2, 2, 2))
    assert tokens.shape == (2 * 3 * 5, 24)
    assert torch.equal(unpatchify(tokens, x.shape, (2, 2, 2)), x)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"latents": [torch.zeros(16, 1, 3, 4)] * 3}, "whole patches"),
        ({"latents": [torch.zeros(8, 1, 4, 4)] * 3}, "8 channels, the model's in_dim is 16"),
        ({"timesteps": [torch.zeros(2)] * 3}, "2 timesteps for 3 latent frames"),
        ({"text": [torch.zeros(21, 24)] * 3}, "at most"),
        ({"image": torch.zeros(3, 257, 1280)}, "takes no CLIP"),
    ],
)
def test_wrong_inputs_are_refused(change, words):
    """If this goes, a wrong input fails deep inside, or not at all."""
    model = tiny_model()
    with pytest.raises(ValueError, match=words):
        model(**(pack_inputs(model) | change))

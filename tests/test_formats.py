"""Names of checkpoints and LoRAs against the released lists, and the formats against the classes that read them."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoint
from checkpoint import command
from formats import diffusers_names, fields_of, find_models, join, official_name, presets_of, split
from image_encoder import CLIPConfig, CLIPVision
from lora import Adapter, LoRA, grown
from lora_formats import LORA_FORMS, match_lora, read_lora, write_lora
from model import CONFIGS, WanConfig, WanDiT
from text_encoder import UMT5_CONFIGS, UMT5Encoder
from vae import VAE_CONFIGS, WanVAE
from weights import load_weights

PRESETS = {  # golden's key lists -> the presets that have exactly these names and shapes
    "wan2.1-t2v-1.3B": ["wan2.1-t2v-1.3b"],
    "wan2.1-t2v-14B": ["wan2.1-t2v-14b", "wan2.2-t2v-a14b"],
    "wan2.1-i2v-14B": ["wan2.1-i2v-14b"],
    "wan2.1-flf2v-14B": ["wan2.1-flf2v-14b"],
    "wan2.2-t2v-A14B": ["wan2.1-t2v-14b", "wan2.2-t2v-a14b"],
    "wan2.2-i2v-A14B": ["wan2.2-i2v-a14b"],
    "wan2.2-ti2v-5B": ["wan2.2-ti2v-5b"],
}
OTHERS = {"wan2.1-vae": "vae2.1", "wan2.2-vae": "vae2.2", "umt5-xxl-enc": "umt5"}
MAPS = {
    "wan2.1-t2v-14B.official-to-diffusers": "dit",
    "wan2.1-i2v-14B.official-to-diffusers": "dit",
    "wan2.1-flf2v-14B.official-to-diffusers": "dit",
    "wan2.2-ti2v-5B.official-to-diffusers": "dit",
    "wan2.1-vae.official-to-diffusers": "vae2.1",
    "wan2.2-vae.official-to-diffusers": "vae2.2",
    "umt5-xxl-enc.official-to-transformers": "umt5",
}
TINY = dict(dim=48, ffn_dim=80, num_heads=4, num_layers=2, text_dim=24, text_len=512, freq_dim=16)
VARIANTS = {
    "t2v": WanConfig("t2v", **TINY),
    "i2v 2.1": WanConfig("i2v", **TINY, in_dim=36, clip_dim=20),
    "flf2v": WanConfig("flf2v", **TINY, in_dim=36, clip_dim=20),
    "i2v 2.2": WanConfig("i2v", **TINY, in_dim=36, clip_dim=0),
    "ti2v": WanConfig("ti2v", **TINY, in_dim=48, out_dim=48),
}


def header(shapes, dtype=torch.bfloat16):
    return {name: (tuple(shape), dtype) for name, shape in shapes.items()}


def tiny(config, seed=0):
    torch.manual_seed(seed)
    model = WanDiT(config)
    for p in model.parameters():  # zeros (head, biases, emb_pos) would hide a tensor in the wrong place
        torch.nn.init.normal_(p, std=0.1)
    return model.requires_grad_(False)


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", MAPS)
def test_maps_both_ways(golden, file):
    """If this goes, tensors get the wrong name on the way to diffusers or transformers, or back."""
    for official, theirs in golden.map(file).items():
        assert diffusers_names(MAPS[file], official) == [theirs]
        assert official_name(MAPS[file], theirs) == official


def test_clip_names_both_ways(golden):
    """If this goes, CLIP from transformers does not load: its q, k, v are three, and newer files lack a prefix."""
    official = {k: v for k, v in golden.keys("clip-xlm-roberta-vit-h-14").items() if k.startswith("visual.")}
    theirs = golden.unfold("transformers.clip-vision-h-14")
    made = {}
    for name, shape in official.items():
        parts = split(name, torch.empty(shape, device="meta"))
        made |= dict(zip(diffusers_names("clip", name), [list(part.shape) for part in parts], strict=True))
        assert list(join(name, parts).shape) == shape
    assert made.pop("visual_projection.weight") == [1024, 1280]
    assert made == {f"vision_model.{name}": shape for name, shape in theirs.items()}
    for prefix in ("", "vision_model."):
        (found,) = find_models(header({prefix + name: shape for name, shape in theirs.items()}))
        assert found.shapes == {k: tuple(v) for k, v in official.items() if k != "visual.head"}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model.", "dit.", "pipe.dit."])
@pytest.mark.parametrize("file", PRESETS)
def test_every_dit_is_recognised(golden, file, prefix):
    """If this goes, a released DiT is taken for another variant, or not found behind ComfyUI's prefix or another."""
    official = golden.keys(file)
    for form, shapes in (("official", official), ("diffusers", golden.unfold(f"diffusers.{file}"))):
        (found,) = find_models(header({prefix + name: shape for name, shape in shapes.items()}))
        assert (found.kind, found.form, found.prefix) == ("dit", form, prefix)
        assert found.shapes == {name: tuple(shape) for name, shape in official.items()}
        assert presets_of(fields_of("dit", found.shapes)) == PRESETS[file]


@pytest.mark.parametrize("file", OTHERS)
def test_other_models_are_recognised(golden, file):
    """If this goes, a VAE or text encoder is taken for something else."""
    official = golden.keys(file)
    theirs = golden.unfold(f"{'transformers' if file == 'umt5-xxl-enc' else 'diffusers'}.{file}")
    for form, shapes in (("official", official), ("diffusers", theirs)):
        (found,) = find_models(header(shapes))
        assert (found.kind, found.form) == (OTHERS[file], form)
        assert found.shapes == {name: tuple(shape) for name, shape in official.items()}


# --- ComfyUI --------------------------------------------------------------------------------------------------------


def scaled_fp8(state, prefix):
    """ComfyUI's scaled fp8: (its file, what its tensors stand for)."""
    file, meant = {prefix + "scaled_fp8": torch.empty(2, dtype=torch.float8_e4m3fn)}, {}
    for i, (name, tensor) in enumerate(state.items()):
        if name.endswith("weight") and tensor.ndim == 2 and "blocks" in name:
            kind = (torch.float8_e4m3fn, torch.float8_e5m2)[i % 2]
            scale = tensor.abs().max() / 400 if i % 3 else tensor.abs().amax(1, keepdim=True) / 400  # also one per row
            narrow = (tensor / scale).to(kind)
            file[prefix + name] = narrow
            file[prefix + name.removesuffix("weight") + "scale_weight"] = scale
            file[prefix + name.removesuffix("weight") + "scale_input"] = torch.ones(())
            meant[name] = narrow.float() * scale
        else:
            file[prefix + name] = tensor.half()
            meant[name] = tensor.half().float()
    return file, meant


def test_scaled_fp8_with_a_vae_in_the_file(tmp_path):
    """If this goes, ComfyUI's fp8 files load without their scales (noise), or a merged file's VAE is not found."""
    file, meant = scaled_fp8(tiny(VARIANTS["i2v 2.1"]).state_dict(), "model.diffusion_model.")
    vae = WanVAE(VAE_CONFIGS["demo"]).state_dict()
    save_file(file | {f"vae.{name}": x for name, x in vae.items()}, tmp_path / "all.safetensors")
    model = load_weights(tiny(VARIANTS["i2v 2.1"], 1), tmp_path / "all.safetensors", "a tiny DiT")
    for name, x in model.state_dict().items():
        assert torch.equal(x, meant[name]), name
    loaded = load_weights(WanVAE(VAE_CONFIGS["demo"]), tmp_path / "all.safetensors", "a Wan 2.1 VAE")
    assert all(torch.equal(x, vae[name]) for name, x in loaded.state_dict().items())
    assert command(["convert", str(tmp_path / "all.safetensors"), str(tmp_path / "b.safetensors")]) == 0
    back = load_file(tmp_path / "b.safetensors")
    assert all(torch.equal(back[name], x.bfloat16()) for name, x in meant.items())


# --- through the classes that read the formats ----------------------------------------------------------------------


def relative(x, reference):
    return float((x - reference).abs().max() / reference.square().mean().sqrt())


def dit_inputs(config):
    """(arguments of our forward, keyword arguments of diffusers')."""
    torch.manual_seed(3)
    latents, text = torch.randn(config.in_dim, 2, 4, 6), torch.randn(512, config.text_dim)
    ours, images = [[latents], torch.tensor([450.0]), [text]], None
    if config.reads_clip:
        images = torch.randn(2 if config.model_type == "flf2v" else 1, 257, config.clip_dim)
        ours.append(images)
    theirs = dict(hidden_states=latents[None], timestep=torch.tensor([450.0]), encoder_hidden_states=text[None])
    return ours, theirs | {"encoder_hidden_states_image": images, "return_dict": False}


def outputs(model, peer):
    ours, theirs = dit_inputs(model.config)
    if len(ours[0][0]) > model.config.out_dim:  # ours takes latents and condition apart
        x = ours[0][0]
        ours = [[x[:16]], *ours[1:], *([None] if len(ours) < 4 else []), [x[16:]]]
    with torch.no_grad():
        return model(*ours)[0], peer(**theirs)[0][0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_dit_through_diffusers(tmp_path, variant, monkeypatch):
    """If this goes, a converted DiT opens in diffusers as another model (within 5e-5 of its rms), or does not come back
    bit by bit. In shards, and ComfyUI's file on the way."""
    from diffusers import WanTransformer3DModel

    config = VARIANTS[variant]
    model = tiny(config)
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 100_000)
    assert command(["convert", f"{tmp_path}/a.safetensors", f"{tmp_path}/d", "--to", "diffusers", "--heads", "4"]) == 0
    assert len(list((tmp_path / "d").glob("*-of-*.safetensors"))) > 2
    peer, report = WanTransformer3DModel.from_pretrained(tmp_path / "d", output_loading_info=True)
    assert not any(report.values())
    assert relative(*outputs(model, peer)) < 5e-5
    for source, to in (("d", "comfyui"), ("comfyui.safetensors", "official")):
        assert command(["convert", f"{tmp_path}/{source}", f"{tmp_path}/{to}.safetensors", "--to", to]) == 0
    back = load_file(tmp_path / "official.safetensors")
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], x) for name, x in model.state_dict().items())
    peer.save_pretrained(tmp_path / "theirs")  # their own writer
    again = load_weights(tiny(config, 1), tmp_path / "theirs", variant)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in again.state_dict().items())


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_vae_through_diffusers(tmp_path, version):
    """If this goes, a converted VAE gives other latents in diffusers."""
    from diffusers import AutoencoderKLWan

    sizes = dict(dim=4) if version == "2.1" else dict(dim=4, dec_dim=8)
    torch.manual_seed(0)
    vae = WanVAE(dataclasses.replace(VAE_CONFIGS[f"wan{version}"], **sizes)).eval()
    torch.save(vae.state_dict(), tmp_path / "a.pth")
    assert command(["convert", f"{tmp_path}/a.pth", f"{tmp_path}/d", "--to", "diffusers"]) == 0
    peer = AutoencoderKLWan.from_pretrained(tmp_path / "d")
    video = torch.rand(3, 5, 32, 32) * 2 - 1
    with torch.no_grad():
        mean, std = (torch.tensor(x)[:, None, None, None] for x in (vae.config.latents_mean, vae.config.latents_std))
        theirs = (peer.encode(video[None]).latent_dist.mode()[0] - mean) / std
        assert relative(vae.encode(video), theirs) < 1e-5
    loaded = load_weights(WanVAE(vae.config), tmp_path / "d", "a VAE")
    assert all(torch.equal(x, vae.state_dict()[name]) for name, x in loaded.state_dict().items())


def test_encoders_through_transformers(tmp_path):
    """If this goes, umT5 or CLIP from a diffusers repository give other states than the official files."""
    from transformers import CLIPVisionModel, UMT5EncoderModel

    torch.manual_seed(0)
    text = UMT5Encoder(UMT5_CONFIGS["demo"]).eval()
    clip = CLIPVision(CLIPConfig(image_size=28, patch_size=7, dim=32, out_dim=16, num_heads=2, num_layers=3)).eval()
    for name, model in (("text", text), ("clip", clip)):
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
        words = ["convert", f"{tmp_path}/{name}.safetensors", f"{tmp_path}/{name}", "--to", "diffusers", "--heads", "2"]
        assert command(words) == 0
        loaded = load_weights(type(model)(model.config), tmp_path / name, name)
        assert all(torch.equal(x, model.state_dict()[key]) for key, x in loaded.state_dict().items())
    ids, pixels = torch.randint(1, 128, (1, 9)), torch.randn(1, 3, 28, 28)
    with torch.no_grad():
        theirs = UMT5EncoderModel.from_pretrained(tmp_path / "text")(ids).last_hidden_state
        assert relative(text(ids, torch.ones_like(ids)), theirs) < 2e-5
        peer = CLIPVisionModel.from_pretrained(tmp_path / "clip", attn_implementation="eager")
        assert relative(clip(pixels), peer(pixels, output_hidden_states=True).hidden_states[-2]) < 1e-5
    peer.save_pretrained(tmp_path / "theirs")  # without the projection, which Wan does not compute
    loaded = load_weights(CLIPVision(clip.config), tmp_path / "theirs", "clip").state_dict()
    assert all(torch.equal(x, loaded[name]) for name, x in clip.state_dict().items() if name != "visual.head")
    assert not loaded["visual.head"].any()


# --- LoRA -----------------------------------------------------------------------------------------------------------


def some_lora(config, rank=4, alpha=2.0, diffs=False) -> LoRA:
    """Adapters of every linear layer of the blocks."""
    generator = torch.Generator().manual_seed(5)
    adapters, bias = {}, {}
    for name, module in tiny(config).named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("blocks."):
            out, wide = module.weight.shape
            down, up = torch.randn(rank, wide, generator=generator), torch.randn(out, rank, generator=generator)
            adapters[name] = Adapter(down, up, alpha)
            bias[f"{name}.bias"] = torch.randn(out, generator=generator)
    return LoRA(adapters, bias if diffs else {})


def assert_equal(a: LoRA, b: LoRA, products=False):
    assert a.adapters.keys() == b.adapters.keys() and a.diffs.keys() == b.diffs.keys()
    for name, x in a.adapters.items():
        y = b.adapters[name]
        if products:  # diffusers' form takes alpha / r into `up`
            assert torch.allclose(x.alpha / len(x.down) * x.up @ x.down, y.alpha / len(y.down) * y.up @ y.down)
        else:
            assert torch.equal(x.down, y.down) and torch.equal(x.up, y.up) and x.alpha == y.alpha
    assert all(torch.equal(x, b.diffs[name]) for name, x in a.diffs.items())


@pytest.mark.parametrize("form", LORA_FORMS)
def test_lora_written_is_read(tmp_path, form):
    """If this goes, a LoRA of picowan loses adapters (k_img and v_img before all), alpha or biases in a format."""
    lora = some_lora(VARIANTS["i2v 2.1"], diffs=True)
    assert len(lora.adapters) == 2 * 12
    write_lora(lora, tmp_path / "a.safetensors", form)
    assert_equal(lora, read_lora(tmp_path / "a.safetensors"), products=form == "diffusers")
    for other in LORA_FORMS:
        assert command(["convert", f"{tmp_path}/a.safetensors", f"{tmp_path}/{other}.safetensors", "--to", other]) == 0
        assert_equal(lora, read_lora(tmp_path / f"{other}.safetensors"), products="diffusers" in (form, other))


def test_lora_spellings(tmp_path):
    """If this goes, a LoRA of PEFT, DiffSynth, musubi or ComfyUI is not read, or is read without its alpha."""
    down, up = torch.randn(2, 6), torch.randn(4, 2)
    a, b = (down, up), ("lora_A", "lora_B")
    for prefix, factors, suffix, module in (
        ("", b, ".default.weight", "blocks.7.self_attn.q"),
        ("pipe.dit.", b, ".default.weight", "blocks.7.self_attn.q"),
        ("base_model.model.", b, ".default.weight", "blocks.7.self_attn.q"),
        ("base_model.model.transformer.", b, ".weight", "blocks.7.attn1.to_q"),
        ("transformer.", b, ".weight", "blocks.7.attn1.to_q"),
        ("diffusion_model.", b, ".weight", "blocks.7.self_attn.q"),
        ("diffusion_model.", ("lora_down", "lora_up"), ".weight", "blocks.7.self_attn.q"),
        ("lora_unet_", ("lora_down", "lora_up"), ".weight", "blocks_7_self_attn_q"),
        ("lora_unet_", ("lora_down", "lora_up"), ".weight", "blocks_7_attn1_to_q"),
    ):
        named = {f"{prefix}{module}.{factor}{suffix}": x for factor, x in zip(factors, a, strict=True)}
        for alpha in ({}, {f"{prefix}{module}.alpha": torch.tensor(1.0)}):
            save_file(named | alpha, tmp_path / "a.safetensors")
            lora = read_lora(tmp_path / "a.safetensors")
            assert_equal(lora, LoRA({"blocks.7.self_attn.q": Adapter(down, up, 1.0 if alpha else 2.0)}, {}))
    image = {"lora_unet_blocks_12_cross_attn_k_img.lora_down.weight": down}
    image["lora_unet_blocks_12_cross_attn_k_img.lora_up.weight"] = up
    save_file(image, tmp_path / "a.safetensors")
    assert list(read_lora(tmp_path / "a.safetensors").adapters) == ["blocks.12.cross_attn.k_img"]


def test_lora_alpha_of_peft(tmp_path):
    """If this goes, a LoRA of PEFT or diffusers whose alpha is beside the tensors acts at the wrong strength."""
    named = {"transformer.blocks.0.attn1.to_q.lora_A.weight": torch.ones(2, 3)}
    named["transformer.blocks.0.attn1.to_q.lora_B.weight"] = torch.ones(3, 2)
    save_file(named, tmp_path / "a.safetensors", {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 8})})
    assert read_lora(tmp_path / "a.safetensors").adapters["blocks.0.self_attn.q"].alpha == 8
    (tmp_path / "peft").mkdir()
    save_file({f"base_model.model.{k}": x for k, x in named.items()}, tmp_path / "peft" / "adapter_model.safetensors")
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps({"lora_alpha": 16, "r": 2}))
    assert read_lora(tmp_path / "peft").adapters["blocks.0.self_attn.q"].alpha == 16
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps({"lora_alpha": 16, "use_rslora": True}))
    with pytest.raises(ValueError, match="use_rslora"):
        read_lora(tmp_path / "peft")


def test_lora_of_two_experts(tmp_path):
    """If this goes, the low-noise expert gets the high-noise one's LoRA."""
    named = {}
    for i, prefix in enumerate(("transformer.", "transformer_2.")):
        named[f"{prefix}blocks.0.attn1.to_q.lora_A.weight"] = torch.full((1, 3), float(i))
        named[f"{prefix}blocks.0.attn1.to_q.lora_B.weight"] = torch.ones(3, 1)
    save_file(named, tmp_path / "a.safetensors")
    for i, expert in enumerate(("high", "low")):
        assert read_lora(tmp_path / "a.safetensors", expert).adapters["blocks.0.self_attn.q"].down[0, 0] == i
    with pytest.raises(ValueError, match="both experts"):
        read_lora(tmp_path / "a.safetensors")


def test_lora_differences_and_convolution(tmp_path):
    """If this goes, whole differences (.diff, .diff_b, modulation) or the patch embedding's adapter are lost."""
    adapters = {"patch_embedding": Adapter(torch.randn(2, 16 * 4), torch.randn(48, 2), 2.0)}
    diffs = {name: torch.randn(3) for name in ("blocks.0.norm3.weight", "blocks.0.norm3.bias", "blocks.1.modulation")}
    for form in ("comfyui", "kohya"):
        write_lora(LoRA(adapters, diffs), tmp_path / f"{form}.safetensors", form)
        assert_equal(LoRA(adapters, diffs), read_lora(tmp_path / f"{form}.safetensors"))
        file = load_file(tmp_path / f"{form}.safetensors")
        assert any(x.shape == (2, 16, 1, 2, 2) for x in file.values())
    with pytest.raises(ValueError, match="no place for 3 whole differences"):
        write_lora(LoRA(adapters, diffs), tmp_path / "c.safetensors", "diffusers")
    merged = grown(torch.zeros(48, 16, 1, 2, 2), adapters["patch_embedding"], 1.0)
    down = next(x for x in file.values() if x.shape == (2, 16, 1, 2, 2))
    theirs = torch.einsum("or,rikhw->oikhw", adapters["patch_embedding"].up, down)
    assert torch.allclose(merged, theirs, atol=1e-6)


def test_lora_against_a_model():
    """If this goes, a LoRA for another model is taken in silence, in part or as a whole."""
    shapes = {name: x.shape for name, x in tiny(VARIANTS["i2v 2.2"]).state_dict().items()}
    lora = some_lora(VARIANTS["i2v 2.1"])
    words = "of 24 adapters 20 match; without a place: cross_attn.k_img 2, cross_attn.v_img 2"
    assert str(match_lora(lora, shapes)) == words
    narrow = {name: tuple(2 * n for n in shape) for name, shape in shapes.items()}
    with pytest.raises(
        ValueError, match=r"another model: of 24 adapters 0 match.*self_attn.q \(48 x 48 for 96 x 96\) 2"
    ):
        match_lora(lora, narrow)
    with pytest.raises(ValueError, match="another model"):
        match_lora(LoRA({"blocks.0.mlp": lora.adapters["blocks.0.ffn.0"]}, {}), shapes)


@pytest.mark.parametrize("form", LORA_FORMS)
def test_merged_equals_peft(tmp_path, form):
    """If this goes, a merged LoRA gives another output than diffusers and PEFT with the same file (5e-5 of the rms)."""
    pytest.importorskip("peft")
    from diffusers.loaders import WanLoraLoaderMixin

    from bench import diffusers_model

    model = tiny(VARIANTS["i2v 2.1"])
    lora = some_lora(VARIANTS["i2v 2.1"], alpha=0.2)
    write_lora(lora, tmp_path / "lora.safetensors", form)
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    words = ["merge", "a.safetensors", "lora.safetensors", "lora.safetensors", "m.safetensors"]
    words = [words[0], *(str(tmp_path / word) for word in words[1:]), "--scale", "0.5", "0.25"]
    assert command(words) == 0
    peer = diffusers_model(model)
    theirs = WanLoraLoaderMixin.lora_state_dict(load_file(tmp_path / "lora.safetensors"))
    peer.load_lora_adapter(theirs, prefix="transformer", adapter_name="a")
    peer.set_adapters("a", 0.75)
    plain = outputs(model, peer)[0]
    merged = load_weights(model, tmp_path / "m.safetensors", "the merged model")
    ours, reference = outputs(merged, peer)
    assert relative(ours, reference) < 5e-5 < 1e-2 < relative(ours, plain)


# --- the command ----------------------------------------------------------------------------------------------------


def test_inspect(tmp_path, capsys):
    """If this goes, `inspect` names the wrong model, or does not see that a file is incomplete."""
    state = tiny(VARIANTS["flf2v"]).state_dict()
    save_file(state, tmp_path / "a.safetensors")
    shipped = sorted(map(str, (Path(__file__).parent.parent / "assets").glob("*.safetensors")))
    assert command(["inspect", str(tmp_path / "a.safetensors"), *shipped]) == 0
    text = capsys.readouterr().out
    total = sum(math.prod(x.shape) for x in state.values())
    for words in ("a first-and-last-frame-to-video", "no preset", "prefix none", f"{total:,} in", "demo", "bfloat16"):
        assert words in text
    del state["blocks.1.norm3.weight"]
    save_file({f"model.diffusion_model.{name}": x for name, x in state.items()}, tmp_path / "b.safetensors")
    assert command(["inspect", str(tmp_path / "b.safetensors")]) == 1
    text = capsys.readouterr().out
    assert "ComfyUI, prefix model.diffusion_model." in text and "1 missing (first blocks.1.norm3.weight)" in text
    write_lora(some_lora(CONFIGS["demo"]), tmp_path / "c.safetensors", "kohya")
    assert command(["inspect", str(tmp_path / "c.safetensors")]) == 0
    text = capsys.readouterr().out
    assert "kohya" in text and "40, rank 4, alpha 2" in text and "fits        demo; " in text and "wan2" not in text


@pytest.mark.parametrize(
    "words, said",
    [
        ("convert a.safetensors a.safetensors", "is there already"),
        ("convert a.safetensors x --to diffusers", ": --heads N"),
        ("convert a.safetensors x.safetensors --to diffusers --heads 4", "is a folder"),
        ("convert a.safetensors x --to comfyui", "is a .safetensors file"),
        ("convert a.safetensors no/x.safetensors", "no such folder"),
        ("convert a.safetensors x.safetensors --to kohya", "is no LoRA"),
        ("convert a.safetensors x.safetensors --dtype fp16", "as torch.float16 holds NaN or infinity"),
        ("convert nan.safetensors x --to diffusers --heads 4", "blocks.0.norm3.bias holds NaN"),
        ("convert poor.safetensors x.safetensors", "1 missing"),
        ("convert lora.safetensors x.safetensors --to official", "is a LoRA, which is written as"),
        ("merge lora.safetensors lora.safetensors x.safetensors", "holds no model"),
        ("merge a.safetensors a.safetensors x.safetensors", "is no LoRA file"),
        ("merge a.safetensors lora.safetensors x.safetensors --scale 1 2", "2 scales for 1 LoRAs"),
        ("merge a.safetensors lora.safetensors x.safetensors --scales 1", "did you mean --scale"),
        ("convert a.safetensors", "usage"),
    ],
)
def test_refusals_write_nothing(tmp_path, monkeypatch, words, said):
    """If this goes, a mistake on the command line leaves half a checkpoint, or ends in a traceback."""
    monkeypatch.chdir(tmp_path)
    state = tiny(VARIANTS["t2v"]).state_dict()
    state["blocks.0.norm3.bias"][0] = 1e6
    save_file(state, "a.safetensors")
    write_lora(some_lora(VARIANTS["t2v"]), "lora.safetensors", "comfyui")
    save_file({name: x for name, x in state.items() if name != "head.modulation"}, "poor.safetensors")
    state["blocks.0.norm3.bias"][0] = float("nan")
    save_file(state, "nan.safetensors")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=said) as caught:
        command(words.split())
    assert "\n" not in str(caught.value) and sorted(tmp_path.iterdir()) == before

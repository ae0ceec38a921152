"""The VAE against the official code's numbers, against diffusers' model, and streamed against in one piece."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vae import VAE_CONFIGS, Cache, VAEConfig, WanVAE, avg_down, dup_up, patchify, unpatchify

TINY = {  # the sizes of the golden cases
    "wan2.1": replace(VAE_CONFIGS["wan2.1"], dim=4),
    "wan2.2": replace(VAE_CONFIGS["wan2.2"], dim=4, dec_dim=6),
}
both_versions = pytest.mark.parametrize("config", TINY.values(), ids=TINY)


def make_vae(config: VAEConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> WanVAE:
    """A tiny VAE with random weights, the scales of its norms included (their initial 1 would hide a missing one)."""
    torch.manual_seed(seed)
    vae = WanVAE(config).to(dtype)
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if name.endswith("gamma"):
                parameter += 0.3 * torch.randn_like(parameter)
    return vae


def clip(config: VAEConfig, frames: int, seed: int = 1) -> torch.Tensor:
    """A video of 2 x 3 latents per frame."""
    shape, generator = (2 * config.spatial, 3 * config.spatial), torch.Generator().manual_seed(seed)
    return torch.rand(3, frames, *shape, generator=generator, dtype=torch.float64) * 2 - 1


def latent(config: VAEConfig, frames: int, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(config.z_dim, frames, 2, 3, generator=generator, dtype=torch.float64)


def in_one_piece(vae: WanVAE, video: torch.Tensor) -> torch.Tensor:
    """The clip's mean latents (not normalised) with all its frames as one chunk, so that no cache is ever read."""
    return vae.conv1(vae.encoder(video[None], Cache()))[0].chunk(2)[0]


def out_in_one_piece(vae: WanVAE, latents: torch.Tensor) -> torch.Tensor:
    return vae.decoder(vae.conv2(latents[None]), Cache())[0]


def normalise(config: VAEConfig, latents: torch.Tensor) -> torch.Tensor:
    mean, std = torch.tensor([config.latents_mean, config.latents_std], dtype=latents.dtype)[:, :, None, None, None]
    return (latents - mean) / std


def assert_near(result: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Root mean square of the difference against that of what is expected."""
    assert result.shape == expected.shape
    error = (result - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e}"


# The official code


@both_versions
@pytest.mark.parametrize("case, frames", [("a", 1), ("a", 5), ("9f", 9)])
@torch.no_grad()
def test_official_numbers(golden, config, case, frames):
    """Without it the VAE may drift from the released one: latents and videos of other tools would no longer fit."""
    name = "vae22" if config.is_residual else "vae21"
    vae = WanVAE(config)
    vae.load_state_dict({key.removeprefix("w."): tensor for key, tensor in golden(f"{name}_weights").items()})
    tensors = golden(f"{name}_{case}")
    video, z = tensors[f"in.video.{frames}"], tensors[f"in.z.{frames}"]
    assert_near(vae.posterior(video)[0], tensors[f"out.mu.{frames}"], 1e-5)
    assert_near(vae.encode(video[0]), tensors[f"out.mu_scaled.{frames}"][0], 1e-5)
    assert_near(vae.decode(z[0]), tensors[f"out.video_scaled.{frames}"][0], 1e-5)
    assert_near(vae.decode(normalise(config, z[0])), tensors[f"out.video.{frames}"][0], 1e-5)


def test_official_patches_and_shortcuts(golden):
    """Without it an error in the order of folded channels shows as a wrong video somewhere, but not where."""
    tensors = golden("vae22_blocks")
    assert torch.equal(patchify(tensors["in.x"], 2), tensors["out.patchify"])
    assert torch.equal(unpatchify(tensors["out.patchify"], 2), tensors["in.x"])
    for case, shortcut in {"a": (8, 2, 2), "b": (4, 1, 2), "c": (4, 1, 1)}.items():
        assert_near(avg_down(tensors["in.avg_x"], *shortcut), tensors[f"out.avgdown.{case}"], 1e-6)
    for case, shortcut in {"a": (8, 2, 2), "b": (4, 1, 2)}.items():
        assert torch.equal(dup_up(tensors["in.dup_x"], *shortcut, False), tensors[f"out.dupup.{case}"])
        assert torch.equal(dup_up(tensors["in.dup_x"], *shortcut, True), tensors[f"out.dupup_first.{case}"])


@pytest.mark.parametrize("version", TINY)
def test_official_names(golden, version):
    """Without it a released checkpoint may fail to load, or need a map of names."""
    with torch.device("meta"):
        vae = WanVAE(VAE_CONFIGS[version])
    assert {name: list(tensor.shape) for name, tensor in vae.state_dict().items()} == golden.keys(f"{version}-vae")


def test_presets_are_complete():
    """Without it a preset may lack a channel's statistics, or the demo be of another structure than the real VAE."""
    for config in VAE_CONFIGS.values():
        assert len(config.latents_mean) == len(config.latents_std) == config.z_dim
        assert (config.spatial, config.temporal) == (16 if config.is_residual else 8, 4)
    with torch.device("meta"):
        demo, real = (WanVAE(VAE_CONFIGS[name]).state_dict().keys() for name in ("demo", "wan2.1"))
    assert demo == real


# diffusers, same weights, float64


@pytest.fixture
def twins(monkeypatch, config):
    """(ours, diffusers', {our parameter's name: theirs}), with the same weights."""
    theirs = pytest.importorskip("diffusers.models.autoencoders.autoencoder_kl_wan", reason="diffusers is missing")
    # Theirs rounds to float32 before it repeats pixels, which would end the comparison at 1e-7.
    monkeypatch.setattr(theirs.WanUpsample, "forward", nn.Upsample.forward)
    sizes = dict(base_dim=config.dim, z_dim=config.z_dim)
    if config.is_residual:
        channels = 3 * config.patch_size**2
        sizes |= dict(decoder_base_dim=config.dec_dim, is_residual=True, patch_size=config.patch_size)
        sizes |= dict(in_channels=channels, out_channels=channels)
    ours, twin = make_vae(config), theirs.AutoencoderKLWan(**sizes).double()
    names = list(twin.state_dict())
    for part in ("encoder.mid_block.", "decoder.mid_block."):  # the one place where the order differs
        middle = [name for name in names if name.startswith(part)]
        start = names.index(middle[0])
        middle.sort(key=lambda name: ("resnets.0" not in name, "attentions" not in name))
        names[start : start + len(middle)] = middle
    state = ours.state_dict()
    twin.load_state_dict(dict(zip(names, state.values(), strict=True)))
    return ours, twin, dict(zip(state, names, strict=True))


@both_versions
@pytest.mark.parametrize("frames", [1, 9, 17])
def test_encode_as_diffusers(twins, config, frames):
    """Without it an error in encoding or in its gradients passes where no golden data is at hand; and the training of
    the demo VAE rests on those gradients."""
    ours, theirs, names = twins
    video = clip(config, frames).requires_grad_(), clip(config, frames)[None].requires_grad_()
    mean, log_variance = ours.posterior(video[0])
    mean_, log_variance_ = theirs._encode(video[1])[0].chunk(2)
    assert_near(mean, mean_, 1e-12)
    assert_near(log_variance, log_variance_, 1e-12)
    assert_near(ours.encode(video[0]), normalise(config, mean_), 1e-12)
    for m, v in ((mean, log_variance), (mean_, log_variance_)):
        (m * (v - m).cos()).sum().backward()
    assert_same_gradients(ours, theirs, names, "encoder.", frames)
    assert_near(video[0].grad, video[1].grad[0], 1e-11)


@both_versions
@pytest.mark.parametrize("frames", [1, 3, 5])
def test_decode_as_diffusers(twins, config, frames):
    """Without it an error in decoding or in its gradients passes where no golden data is at hand."""
    ours, theirs, names = twins
    z = latent(config, frames).requires_grad_(), latent(config, frames)[None].requires_grad_()
    video = ours.decode(normalise(config, z[0])).clamp(-1, 1)  # theirs clamps
    video_ = theirs.decode(z[1]).sample[0]
    assert_near(video, video_, 1e-12)
    for v in (video, video_):
        v.sin().sum().backward()
    assert_same_gradients(ours, theirs, names, "decoder.", frames)
    assert_near(z[0].grad, z[1].grad[0], 1e-11)


def assert_same_gradients(ours: WanVAE, theirs: nn.Module, names: dict[str, str], part: str, frames: int) -> None:
    """Parameters under PART: gradients agree. With one frame the convolutions over pairs of frames have none."""
    compared = 0
    for name, parameter in ours.named_parameters():
        if name.startswith(part) and not (frames == 1 and "time_conv" in name):
            assert_near(parameter.grad, theirs.get_parameter(names[name]).grad, 1e-11)
            compared += 1
    assert compared >= 80


# Streams


@both_versions
@pytest.mark.parametrize("frames", [1, 5, 17])
def test_stream_equals_one_piece(config, frames):
    """Without it a cache may hold the wrong frames and leave a seam every four frames; and a detached cache would cut
    the gradient at each seam, which no value shows."""
    vae = make_vae(config)
    results = []
    for encode, decode in ((vae.encode, vae.decode), (in_one_piece, out_in_one_piece)):
        video, z = clip(config, frames).requires_grad_(), latent(config, 1 + frames // 4).requires_grad_()
        if encode is in_one_piece:
            encoded, decoded = normalise(config, encode(vae, video)), decode(vae, z)
        else:
            encoded, decoded = encode(video), decode(normalise(config, z))
        vae.zero_grad()
        (encoded.sin().sum() + decoded.sin().sum()).backward()
        gradients = [p.grad for p in vae.parameters() if p.grad is not None]
        results.append([encoded, decoded, video.grad, z.grad, *gradients])
    assert len(results[0]) == len(results[1]) >= 190 - (8 if frames == 1 else 0)
    for streamed, whole in zip(*results, strict=True):
        assert_near(streamed, whole, 1e-11)


@both_versions
@torch.no_grad()
def test_streams_take_chunks_of_any_length(config):
    """Without it a video reader's chunks, which are not 1, 4, 4, ..., would give other latents or lose frames."""
    vae, video = make_vae(config), clip(config, 17)
    latents = vae.encode(video)
    for sizes in ([1, 4, 4, 4, 4], [3, 0, 7, 1, 6], [1] * 17, [17]):
        streamed = list(vae.encode_stream(iter(video.split(sizes, 1))))
        assert [z.shape[1] for z in streamed] == [1] * 5
        assert_near(torch.cat(streamed, 1), latents, 1e-13)
    for sizes in ([1] * 5, [2, 3]):
        frames = list(vae.decode_stream(iter(latents.split(sizes, 1))))
        assert [x.shape[1] for x in frames] == [1, 4, 4, 4, 4]
        assert_near(torch.cat(frames, 1), vae.decode(latents), 1e-13)


@both_versions
@torch.no_grad()
def test_latents_do_not_see_the_future(config):
    """Without it an image, or a video's prefix, could be encoded differently from the video that it begins."""
    vae, video, z = make_vae(config), clip(config, 17), latent(config, 5)
    latents, frames = vae.encode(video), vae.decode(z)
    for n in range(5):
        assert_near(vae.encode(video[:, : 4 * n + 1]), latents[:, : n + 1], 1e-13)
        assert_near(vae.decode(z[:, : n + 1]), frames[:, : 4 * n + 1], 1e-13)
    # And they do see the past: all later latents depend on frame 0.
    video[:, 0] += 0.5
    assert (vae.encode(video)[:, 1:] - latents[:, 1:]).abs().amax((0, 2, 3)).min() > 1e-6


@both_versions
@torch.no_grad()
def test_clips_side_by_side(config):
    """Without it clips encoded together could leak into each other, or frames be folded with the wrong clip."""
    vae = make_vae(config)
    pair = torch.stack([clip(config, 5), clip(config, 5, seed=3)])
    z = torch.stack([latent(config, 2), latent(config, 2, seed=4)])
    for i in range(2):
        assert_near(vae.encode(pair)[i], vae.encode(pair[i]), 1e-12)
        assert_near(vae.decode(z)[i], vae.decode(z[i]), 1e-12)


# Memory


class LiveBytes(TorchDispatchMode):
    """While entered, counts the bytes of the tensors that operations have made and someone still holds."""

    def __init__(self):
        super().__init__()
        self.holders, self.now, self.peak = {}, 0, 0  # holders: {storage address: tensors that view it}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                address, size = storage.data_ptr(), storage.nbytes()
                self.count(address, size, 1)
                weakref.finalize(tensor, self.count, address, size, -1)
        return out

    def count(self, address: int, size: int, change: int) -> None:
        before = self.holders.get(address, 0)
        self.holders[address] = before + change
        self.now += size * (bool(before + change) - bool(before))
        self.peak = max(self.peak, self.now)


@both_versions
@torch.no_grad()
def test_memory_does_not_grow_with_the_clip(config):
    """Without it the caches may grow, or keep whole chunks alive, and a long video may not fit."""
    vae = make_vae(config)

    def peak_and_held(stream):
        """Most bytes at any time, and bytes held while the stream waits for its next chunk."""
        with LiveBytes() as live:
            held = [live.now for _ in stream]
        assert live.now == 0
        return live.peak, max(held)

    def frames(chunks):
        return (clip(config, 1 if i == 0 else 4, seed=i) for i in range(chunks))

    def latents(chunks):
        return (latent(config, 1, seed=i) for i in range(chunks))

    limits = (500_000, 800_000) if config.is_residual else (300_000, 450_000)  # some 1.2 times what is held
    for stream, source, limit in zip((vae.encode_stream, vae.decode_stream), (frames, latents), limits, strict=True):
        short, long = (peak_and_held(stream(source(chunks))) for chunks in (5, 17))  # 17 and 65 frames
        assert long[0] <= 1.01 * short[0] and long[1] <= 1.01 * short[1]
        assert short[1] < limit


@both_versions
@torch.no_grad()
def test_no_state_stays_behind(config):
    """Without it the modules may keep a clip's history: memory never given back, or the next clip spoilt by it."""
    vae, video, z = make_vae(config), clip(config, 9), latent(config, 2)
    with LiveBytes() as live:
        first = vae.encode(video)
        next(vae.encode_stream(clip(config, 9, seed=5)))  # a stream left unfinished
        vae.decode(z)
        assert torch.equal(vae.encode(video), first)
        assert live.now == first.untyped_storage().nbytes()


# Errors and precision


@pytest.mark.parametrize("frames, nearest", [(0, "1"), (2, "1 or 5"), (4, "1 or 5"), (7, "5 or 9"), (80, "77 or 81")])
def test_wrong_lengths_are_refused(frames, nearest):
    """Without it trailing frames are dropped in silence, as the official code does."""
    vae = WanVAE(TINY["wan2.1"])
    message = rf"4n \+ 1 frames, not {frames}; the nearest is {nearest}$"
    video = torch.zeros(3, frames, 8, 8)
    for refused in (vae.encode, vae.posterior, lambda x: list(vae.encode_stream(iter(x.split(3, 1))))):
        with pytest.raises(ValueError, match=message):
            refused(video)


@both_versions
def test_latent_frames(config):
    """Without it data and sampling may plan another number of latent frames than the VAE gives."""
    vae = WanVAE(config)
    assert [vae.latent_frames(frames) for frames in (1, 5, 9, 81)] == [1, 2, 3, 21]
    for frames in (1, 5, 9):
        video = torch.zeros(3, frames, vae.spatial, 2 * vae.spatial)
        assert vae.encode(video).shape == (config.z_dim, vae.latent_frames(frames), 1, 2)


@pytest.mark.parametrize(
    "version, height, width, message",
    [
        ("wan2.1", 12, 16, "height must be a multiple of 8, not 12; nearest is 8 or 16"),
        ("wan2.1", 16, 35, "width must be a multiple of 8, not 35; nearest is 32 or 40"),
        ("wan2.1", 16, 5, "width must be a multiple of 8, not 5; nearest is 8"),
        ("wan2.2", 32, 40, "width must be a multiple of 16, not 40; nearest is 32 or 48"),
    ],
)
def test_wrong_sizes_are_refused(version, height, width, message):
    """Without it a picture is cropped in silence and comes back smaller than it went in."""
    with pytest.raises(ValueError, match=message):
        WanVAE(TINY[version]).encode(torch.zeros(3, 1, height, width))


@both_versions
@torch.no_grad()
def test_precision(config):
    """Without it some layer may round float64 to float32, and layouts could no longer be compared to 1e-12; or a VAE in
    bfloat16 may refuse float32 videos and latents."""
    vae, video, z = make_vae(config), clip(config, 5), latent(config, 2)
    latents, frames = vae.encode(video), vae.decode(z)
    assert latents.dtype == frames.dtype == torch.float64
    # A step too small for float32 moves the result by its own size.
    assert 1e-13 < (vae.encode(video + 1e-11) - latents).abs().max() < 1e-9
    assert 1e-13 < (vae.decode(z + 1e-11) - frames).abs().max() < 1e-9
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.3)):
        vae.to(dtype)
        coarse = vae.encode(video.float()), vae.decode(z.float())
        assert coarse[0].dtype == coarse[1].dtype == torch.float32
        assert_near(coarse[0].double(), latents, tolerance)
        assert_near(coarse[1].double(), frames, tolerance)

"""Memory modes, the VAE in tiles, and the text encoder split over processes: the same numbers in less memory."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from safetensors.torch import load_file
from spawn import spawn
from torch.distributed.tensor import DTensor

import memory
import parallel
import sample
from cache import LatentDataset
from clips import Variant
from memory import BlockStream, Memory, Weights
from model import WanConfig, WanDiT
from text_encoder import UMT5Config, UMT5Encoder, encode_prompts
from tiles import TiledVAE, cuts
from vae import VAE_CONFIGS, VAEConfig, WanVAE

TINY = WanConfig(dim=48, ffn_dim=80, num_heads=4, num_layers=4, text_dim=16, text_len=12, freq_dim=16)


# --- memory modes ---------------------------------------------------------------------------------------------------


def dit() -> WanDiT:
    torch.manual_seed(0)
    model = WanDiT(TINY).to(torch.float64).requires_grad_(False)
    torch.nn.init.normal_(model.head.head.weight, std=0.1)
    return model


@torch.no_grad()
def run(model) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(16, 2, 4, 6, generator=generator, dtype=torch.float64)
    return model([latents], [500.0], [torch.randn(5, 16, generator=generator, dtype=torch.float64)])[0]


def places(module) -> list[int]:
    return [x.data_ptr() for x in memory.tensors_of(module)]


def close(a, b) -> bool:
    return (a - b).abs().max() < 1e-13 * b.abs().max()


@pytest.mark.parametrize("mode", memory.MODES)
def test_modes_compute_alike(mode):
    """Each mode gives the whole model's output, twice; outside `using` the weights lie where `keep` put them, so that
    no step pays for another copy in host memory."""
    expected, model = run(dit()), dit()
    keeper = Memory(mode, "cpu")
    assert keeper.keep(model, model.blocks) is model
    home = places(model)
    for _ in range(2):
        with keeper.using(model):
            assert close(run(model), expected)
        assert places(model) == home


def test_idle_lends_and_takes_back():
    """In mode idle all weights are elsewhere inside `using`, at home after it, nested or broken off by an error."""
    model, keeper = dit(), Memory("idle", "cpu")
    home = places(keeper.keep(model))
    with pytest.raises(KeyError), keeper.using(model):
        with keeper.using(model):
            assert not set(places(model)) & set(home)
        assert not set(places(model)) & set(home)  # the inner `using` is not what they were lent for
        raise KeyError
    assert places(model) == home and not keeper.used


def test_experts_take_turns():
    """Sampling with two experts gives in mode idle what it gives with both on the device, and has one there at a time;
    an expert that nobody holds any more leaves host memory too."""
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(16, 2, 4, 6, generator=generator, dtype=torch.float64)]
    texts = [torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in (5, 1)]
    how = sample.Sampling(steps=4, shift=1.0, guidance=3.0, solver="euler")
    latents, seen = {}, []
    for mode in ("whole", "idle"):
        keeper, models = Memory(mode, "cpu"), {"high": dit(), "low": dit()}
        homes = {name: places(keeper.keep(model)) for name, model in models.items()}
        for name, model in models.items():

            def look(*_, name=name, models=models, homes=homes):
                seen.append((name, [other for other in models if places(models[other]) != homes[other]]))

            model.register_forward_pre_hook(look)
        arguments = models, texts[:1], texts[1], [sample.Given(noise[0].shape)], how, noise, torch.float64, 0.5
        latents[mode] = sample.generate(*arguments, memory=keeper)[0]
    assert close(latents["idle"], latents["whole"])
    names = [name for name, _ in seen]
    assert {"high", "low"} == set(names) and seen[8:] == [(name, [name]) for name in names[8:]]
    del model, models, look, arguments
    gc.collect()
    assert not keeper.kept


def test_blocks_are_there_one_ahead(monkeypatch):
    """While block i computes, its weights and those of block i + 1 are on the device and no other's: else the mode
    saves nothing, or the copy has not begun."""
    model, keeper = dit(), Memory("blocks", "cpu")
    keeper.keep(model, model.blocks)
    homes, seen = [places(block) for block in model.blocks], []
    rest, stream = keeper.kept[model]
    copies = []  # of each block, its first tensor on the device as long as nobody has taken it over
    fetch = Weights.fetch

    def counted(self, side=None):
        result = fetch(self, side)
        if self is not rest:
            copies.append(weakref.ref(result[0]))
        return result

    monkeypatch.setattr(Weights, "fetch", counted)
    for block in model.blocks:

        def body(*args, inner=block.body):
            lent = [n for n, block in enumerate(model.blocks) if places(block) != homes[n]]
            seen.append((lent, [n for n, copy in enumerate(copies) if copy() is not None]))
            return inner(*args)

        monkeypatch.setattr(block, "body", body)
    with keeper.using(model):
        run(model)
        assert seen == [([0], [1]), ([1], [2]), ([2], [3]), ([3], [])] and len(copies) == 4
        assert [places(block) for block in model.blocks] == homes and not stream.coming


def test_a_block_that_fails_gives_up_its_weights(monkeypatch):
    """After an error inside a block the model computes on, from weights at home: a caller may retry a smaller pack."""
    expected, model, keeper = run(dit()), dit(), Memory("blocks", "cpu")
    home = places(keeper.keep(model, model.blocks))
    with keeper.using(model):
        with monkeypatch.context() as patch:
            patch.setattr(model.blocks[1].ffn, "forward", lambda x: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run(model)
        assert all(set(places(block)) < set(home) for block in model.blocks)
        assert close(run(model), expected)
    assert places(model) == home


class LateStream:
    """Stands in for a CUDA stream whose copies arrive only when somebody waits for them, and hold NaN until then."""

    def __init__(self):
        self.queue = []

    def record_event(self):
        return len(self.queue)

    def run(self, count):
        for copy, x in self.queue[:count]:
            copy.copy_(x)
        self.queue[:count] = [(x, x) for _, x in self.queue[:count]]


def test_blocks_wait_for_their_weights(monkeypatch):
    """A block that computed before its copy had arrived would read whatever lies in the memory. (The waiting itself is
    CUDA's: see the next test.)"""
    expected, model, late = run(dit()), dit(), LateStream()
    keeper = Memory("blocks", "cpu")
    keeper.keep(model, model.blocks)
    keeper.kept[model][1].side = late

    def fetch(self, stream=None):
        copies = [torch.full_like(x, float("nan")) if stream else x.clone() for x in self.home]
        if stream:
            late.queue += zip(copies, self.home, strict=True)
        return copies

    monkeypatch.setattr(Weights, "fetch", fetch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=late.run))
    with keeper.using(model):
        assert close(run(model), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: streams, pinned memory and their order")
def test_modes_on_a_gpu():
    """On a GPU, where copies really overlap with computing, 20 passes give the whole model's output in less memory."""
    config = WanConfig(dim=1536, ffn_dim=8960, num_heads=12, num_layers=12, text_dim=16, text_len=12)
    torch.manual_seed(0)
    model = WanDiT(config).requires_grad_(False).to(torch.bfloat16)
    torch.nn.init.normal_(model.head.head.weight, std=0.1)
    latents = torch.randn(16, 5, 32, 32, device="cuda", dtype=torch.bfloat16)
    text = torch.randn(5, 16, device="cuda", dtype=torch.bfloat16)
    outputs, peaks = {}, {}
    for mode in ("blocks", "idle", "whole"):
        keeper = Memory(mode, "cuda")
        keeper.keep(model, model.blocks)
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad(), keeper.using(model):
            outputs[mode] = torch.stack([model([latents], [500.0], [text])[0] for _ in range(20)])
        torch.cuda.synchronize()
        peaks[mode] = torch.cuda.max_memory_allocated()
    assert torch.equal(outputs["blocks"], outputs["whole"]) and torch.equal(outputs["idle"], outputs["whole"])
    assert peaks["blocks"] < peaks["whole"] / 2


def test_blocks_compose_with_compile():
    """A compiled block body is traced once: weights that come and go must neither be baked in nor compile anew."""
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    expected, model, keeper = run(dit()), dit(), Memory("blocks", "cpu")
    keeper.keep(model, model.blocks)
    torch._dynamo.reset()
    for block in model.blocks:
        block.body = torch.compile(block.body, backend=backend)
    with keeper.using(model):
        assert close(run(model), expected)
        first = len(traced)
        assert close(run(model), expected)
    with keeper.using(model):
        assert close(run(model), expected)
    assert first > 0 and len(traced) == first


def test_pieces_hold_every_tensor(monkeypatch):
    """Weights packed into pieces keep values, dtype and shape, none overlap, and a piece never outgrows its limit."""
    monkeypatch.setattr(memory, "PIECE", 4096)
    shapes = [(3,), (), (7, 5), (100, 30), (1,), (40, 20)]
    dtypes = [torch.float64, torch.float32, torch.bfloat16]
    tensors = [torch.randn(shape).to(dtypes[i % 3]) for i, shape in enumerate(shapes)]
    before = [x.clone() for x in tensors]
    memory.move_to_host(tensors, torch.device("cpu"))
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors)
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(tensors, before, strict=True))
    assert all(stop <= start for (_, stop), (start, _) in zip(spans, spans[1:], strict=False))
    assert all(x.untyped_storage().nbytes() <= max(4096, x.nbytes + memory.ALIGNMENT) for x in tensors)


def test_memory_refuses():
    """What would lose weights or silently do nothing is refused: an unknown mode, trained weights, a backward."""
    with pytest.raises(ValueError, match="--memory half is none of whole, idle, blocks"):
        Memory("half", "cpu")
    with pytest.raises(ValueError, match="WanDiT is being trained"):
        Memory("idle", "cpu").keep(WanDiT(TINY))
    stream = BlockStream([torch.nn.Linear(2, 2)], torch.device("cpu"))
    stream.start()
    with pytest.raises(RuntimeError, match="no backward"):
        stream.blocks[0](torch.ones(2))


# --- tiles ----------------------------------------------------------------------------------------------------------

BIG = (5, 128, 160)  # T, H, W: 16 x 20 latents


def tiled(tile: int, overlap: int, cls=TiledVAE) -> WanVAE:
    vae = cls(VAE_CONFIGS["demo"], tile, overlap) if cls is TiledVAE else cls(VAE_CONFIGS["demo"])
    vae.load_state_dict(load_file(ROOT / "assets" / "vae.safetensors"))
    return vae.requires_grad_(False)


@pytest.fixture(scope="module")
def picture():
    """(video, latents, decoded) of the shipped VAE without tiles: two moving shapes over a plain ground."""
    T, H, W = BIG
    video = torch.full((3, T, H, W), -0.6)
    y, x = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
    for t in range(T):
        disc = (y - H / 2) ** 2 + (x - W * (0.3 + 0.03 * t)) ** 2 < (H / 4) ** 2
        video[:, t, disc] = torch.tensor([0.9, -0.8, -0.6])[:, None]
        video[2, t, ((y - H * 0.75).abs() < H / 8) & ((x - W * (0.7 - 0.02 * t)).abs() < W / 8)] = 0.8
    whole = tiled(0, 0, WanVAE)
    latents = whole.encode(video)
    return video, latents, whole.decode(latents)


def psnr(a, b) -> float:
    return (10 * torch.log10(4 / (a - b).square().mean())).item()


def test_one_tile_is_the_whole_frame(picture):
    """A frame that fits into a tile passes untouched, to the bit: small videos do not pay for the option."""
    video, latents, decoded = picture
    vae = tiled(20, 4)
    assert torch.equal(vae.encode(video), latents) and torch.equal(vae.decode(latents), decoded)


def test_tiles_come_close(picture):
    """Tiles that are put down in the wrong place, or blended with weights that do not add up to 1, are far from the
    whole frame's picture; frames must not drift in colour either (what users call blinking)."""
    video, latents, decoded = picture
    vae = tiled(12, 4)
    ours = vae.decode(latents)
    assert psnr(ours, decoded) > 38
    assert (ours.mean((0, 2, 3)) - decoded.mean((0, 2, 3))).abs().max() < 0.01
    assert psnr(tiled(0, 0, WanVAE).decode(vae.encode(video)[:, :1]), decoded[:, :1]) > 38
    pair = vae.decode(torch.stack([latents[:, :1], latents[:, 1:]]))  # two clips side by side
    assert pair.shape == (2, 3, 1, *BIG[1:]) and psnr(pair[0], decoded[:, :1]) > 35


def test_no_seam(picture):
    """Where tiles meet there is no step in the picture that the whole frame has not: at most 1 % of the range of pixels
    from any column or row to the next, on average. (Tiles cut off hard in the middle of the overlap: 2.3 %.)"""
    _, latents, decoded = picture
    ours = tiled(12, 4).decode(latents)
    for axis in (-2, -1):
        steps = (ours.diff(dim=axis) - decoded.diff(dim=axis)).abs().movedim(axis, 0).flatten(1).mean(1)
        assert steps.max() < 0.02


def test_a_tile_holds_less(picture):
    """No layer's output for a tile is larger than the tile's share of the frame: what the option is for."""
    _, latents, _ = picture
    largest = {}
    for name, vae in (("tiles", tiled(8, 4)), ("whole", tiled(0, 0, WanVAE))):

        def record(module, args, out, name=name):
            largest[name] = max(largest.get(name, 0), out.numel())

        for module in vae.decoder.modules():
            module.register_forward_hook(record)
        vae.decode(latents[:, :1])
    assert largest["tiles"] * 16 * 20 <= largest["whole"] * 8 * 8


def test_tiles_of_wan_22():
    """The 2.2 VAE's cells are 16 x 16 pixels: shapes fit, and a constant latent decodes to nearly one colour."""
    config = VAEConfig((0.0,) * 4, (1.0,) * 4, dim=8, dec_dim=8, z_dim=4, patch_size=2, is_residual=True)
    torch.manual_seed(0)
    vae = TiledVAE(config, 8, 2).requires_grad_(False)
    whole = WanVAE(config).requires_grad_(False)
    whole.load_state_dict(vae.state_dict())
    video = torch.rand(3, 5, 160, 208) * 2 - 1
    latents = vae.encode(video)
    assert latents.shape == (4, 2, 10, 13) and vae.decode(latents).shape == video.shape
    assert psnr(latents, whole.encode(video)) > 30


@pytest.mark.parametrize("size, tile, overlap", [(20, 12, 4), (33, 32, 8), (90, 32, 8), (160, 32, 16), (16, 16, 8)])
def test_cuts(size, tile, overlap):
    """Every cell is covered with weights that add up to 1, tiles are whole, overlap enough and are not too many. A gap
    is the black area of a public bug; a stride of a cell its 3124 tiles."""
    found = cuts(size, tile, overlap, 8)
    total = torch.zeros(size * 8, dtype=torch.float64)
    for start, weights in found:
        assert 0 <= start <= size - tile and weights.shape == (tile * 8,) and weights.min() > 0
        total[start * 8 : (start + tile) * 8] += weights
    assert (total - 1).abs().max() < 1e-12
    starts = [start for start, _ in found]
    assert starts[0] == 0 and starts[-1] == size - tile
    assert all(b - a <= tile - overlap for a, b in zip(starts, starts[1:], strict=False))
    assert len(found) <= 1 + 2 * size / tile


@pytest.mark.parametrize(
    "tile, overlap, message", [(7, 2, "7 is smaller than 8"), (8, 5, "5 is not in 1 ... 4"), (8, 0, "0 is not in")]
)
def test_tiles_refuse(tile, overlap, message):
    """Tiles that would leave gaps or never end are refused with both numbers."""
    with pytest.raises(ValueError, match=message):
        TiledVAE(VAE_CONFIGS["demo"], tile, overlap)


def test_tiled_latents_have_their_own_cache_files(tmp_path):
    """Latents encoded in tiles differ from the whole frame's, so neither may be read for the other."""
    found = [SimpleNamespace(variants=[Variant(0, 1, 64, 64)], timeline=None)], ["digest"]
    item = SimpleNamespace(path="a.png", caption="", first_frame=None, last_frame=None)
    files = [
        LatentDataset([item], SimpleNamespace(fps=16), found, vae, None, "text", tmp_path).sample_files[0][0]
        for vae in (tiled(0, 0, WanVAE), tiled(8, 2), tiled(8, 4))
    ]
    assert len(set(files)) == 3


# --- the text encoder over processes ----------------------------------------------------------------------------------

SMALL = UMT5Config(vocab=64, dim=32, dim_attn=32, dim_ffn=48, num_heads=4, num_layers=3)


def tokens(prompts):
    """Stands in for the tokenizer: a token per letter."""
    ids = torch.zeros(len(prompts), 12, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        letters = [2 + ord(letter) % 60 for letter in prompt] + [1]
        ids[row, : len(letters)] = torch.tensor(letters)
        mask[row, : len(letters)] = 1
    return ids, mask


def encoder() -> UMT5Encoder:
    torch.manual_seed(0)
    return UMT5Encoder(SMALL).to(torch.float64).eval().requires_grad_(False)


def sharded_states(prompts: list[list[str]], folder):
    """Per rank: the states of its prompts from a sharded encoder, the share of the weights it holds afterwards, and
    what it finds in a cache that the ranks filled together."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = parallel.Layout(rank, world)
    module = encoder()
    whole = sum(p.numel() for p in module.parameters())
    parallel.shard_frozen(module, module.blocks, layout)
    assert all(isinstance(p, DTensor) for p in module.parameters())
    with Memory("idle", "cpu").using(Memory("idle", "cpu").keep(module)):  # sharded: it stays as it is
        states = encode_prompts(module, tokens, prompts[rank])
    held = sum(p.to_local().numel() for p in module.parameters()) / whole
    with pytest.raises(ValueError, match="UMT5Encoder is sharded"):
        Memory("blocks", "cpu").keep(module, module.blocks)

    captions = ["a", "bc", "a"]  # with the empty prompt three texts for two ranks
    items = [
        SimpleNamespace(path=f"{i}.png", caption=c, first_frame=None, last_frame=None) for i, c in enumerate(captions)
    ]
    probe = SimpleNamespace(variants=[], timeline=None)
    encode = lambda texts: (encode_prompts(module, tokens, [text])[0] for text in texts)  # noqa: E731
    data = LatentDataset(items, None, ([probe] * 3, [""] * 3), tiled(8, 2), encode, "text", folder)
    data.fill(rank, world, dist.barrier, layout.on_rank_0)
    return states, held, [data.text(i) for i in range(3)] + [data.empty_text]


def test_sharded_text_encoder(tmp_path):
    """An encoder split over two ranks gives each rank the states of its own prompts, keeps half of the weights on each
    between the passes, and fills a cache with an odd number of texts; a rank with fewer passes would hang."""
    prompts = [["dog", ""], ["a cat", "up"]]
    results = spawn(sharded_states, 2, prompts, tmp_path, timeout=60)
    reference = encoder()
    for mine, (states, held, texts) in zip(prompts, results, strict=True):
        expected = encode_prompts(reference, tokens, mine)
        assert all(close(a, b) for a, b in zip(states, expected, strict=True))
        assert held < 0.53
        expected = encode_prompts(reference, tokens, ["a", "bc", "a", ""])
        assert all((a - b).abs().max() < 1e-6 * b.abs().max() for a, b in zip(texts, expected, strict=True))


def test_sharding_alone_is_nothing():
    """One process has nobody to share with: the module stays ordinary."""
    module = parallel.shard_frozen(encoder(), encoder().blocks, parallel.Layout())
    assert not any(isinstance(p, DTensor) for p in module.parameters())
    assert encode_prompts(module, tokens, ["dog"])[0].shape == (4, 32)

"""The cache of latents, conditions and text states."""

import threading
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from test_video import numbered, write_image, write_video

from cache import LatentDataset, digests, fingerprint, sample_key, text_key, write_tensors
from clips import ClipSpec, load_clip, probe
from manifests import Item


class ToyVAE(torch.nn.Module):
    """Averages of 8x8 pixels stand in for latents: 16 channels, one frame of each four after the first."""

    spatial, temporal = 8, 4

    def __init__(self, log):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.config = SimpleNamespace(z_dim=16)
        self.log = log

    def encode(self, clip):
        self.log.append("clip")
        small = torch.nn.functional.avg_pool2d(clip[:, ::4].mean(0), 8)
        return (small * self.scale).expand(16, -1, -1, -1)


class ToyText:
    def __init__(self, log):
        self.log = log

    def __call__(self, prompts):
        self.log.extend(prompts)
        return [torch.full((1 + len(prompt), 8), float(len(prompt))) for prompt in prompts]


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    """Three videos of two clips each and an image; two of the captions are the same after cleaning."""
    folder = tmp_path_factory.mktemp("set")
    made = []
    for i, caption in enumerate(["a dog", "a  dog ", "a cat"]):
        path = write_video(folder / f"{i}.mp4", [numbered(40 * i + k, 32, 64) for k in range(20)])
        made.append(Item(path, caption, "video"))
    write_image(folder / "p.png", numbered(7, 32, 64))
    return [*made, Item(folder / "p.png", "a bird", "image")]


TOY_SPEC = ClipSpec(height=32, width=64, frames=9, clip="all")


def make_dataset(items, cache, log, **options):
    found = [probe(item, TOY_SPEC) for item in items], digests([item.path for item in items])
    data = LatentDataset(items, TOY_SPEC, found, ToyVAE(log), ToyText(log), "text-1", cache)
    data.fill(**options)
    return data


def test_cache(items, tmp_path):
    """The cache gives what the VAE and the text encoder gave, encodes equal captions once, and is not filled twice."""
    log = []
    data = make_dataset(items, tmp_path, log)
    assert sorted(log) == ["", "a bird", "a cat", "a dog", *["clip"] * 7]
    assert len(data) == 4 and [data.variants(i) for i in range(4)] == [2, 2, 2, 1]
    assert [data.shape(i, 0) for i in range(4)] == [(16, 3, 4, 8)] * 3 + [(16, 1, 4, 8)]
    for i in range(4):
        for variant in range(data.variants(i)):
            latents = data.sample(i, variant)["latents"]
            clip = load_clip(items[i], data.probes[i], TOY_SPEC, variant)
            assert latents.shape == data.shape(i, variant) and latents.dtype == torch.float32
            assert torch.equal(latents, data.vae.encode(clip))
    assert data.text(0).shape == data.text(1).shape == (6, 8) and data.text(3)[0, 0] == 6
    assert torch.equal(data.empty_text, torch.zeros(1, 8))

    log.clear()
    again = make_dataset(items, tmp_path, log)
    assert log == [] and torch.equal(again.sample(2, 1)["latents"], data.sample(2, 1)["latents"])
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]


def test_cache_keys(items):
    """The key changes with all that latents and text states depend on, or a run would train on stale ones."""
    found = probe(items[0], TOY_SPEC)
    clip, slower = found.variants[0], replace(TOY_SPEC, fps=Fraction(8))
    base = sample_key("file", "vae", found, TOY_SPEC, clip)
    keys = [
        sample_key("other file", "vae", found, TOY_SPEC, clip),
        sample_key("file", "other vae", found, TOY_SPEC, clip),
        *(sample_key("file", "vae", found, TOY_SPEC, replace(clip, **{name: 1})) for name in vars(clip)),
        sample_key("file", "vae", found, slower, clip),
    ]
    assert len({base, *keys}) == 8
    texts = [text_key("a dog", "e"), text_key("a cat", "e"), text_key("a dog", "f"), text_key("", "e")]
    assert len(set(texts)) == 4 and text_key(" a  dog", "e") == texts[0]

    layer = torch.nn.Linear(2, 3)
    before = fingerprint(layer)
    assert before == fingerprint(layer) != fingerprint(layer.to(torch.float64))
    with torch.no_grad():
        layer.to(torch.float32).bias[1] += 1
    assert fingerprint(layer) != before
    zeros = [{"w": torch.zeros(4, dtype=dtype)} for dtype in (torch.float16, torch.bfloat16)]
    zeros += [{"w": torch.zeros(2, 2, dtype=torch.float16)}, {"v": torch.zeros(4, dtype=torch.float16)}]
    assert len({fingerprint(SimpleNamespace(state_dict=lambda x=x: x)) for x in zeros}) == 4


def test_ranks_share_the_work(items, tmp_path):
    """Two ranks encode disjoint halves, though one begins before the other has listed what is missing; both then see
    the whole cache."""
    logs, barrier, errors, told = [[], []], threading.Barrier(2, timeout=60), [], []

    def run(rank):
        def agree(function):
            if rank == 0:
                told.append(function())
            barrier.wait()
            return told[0]

        try:
            data = make_dataset(items, tmp_path, logs[rank], rank=rank, world=2, barrier=barrier.wait, agree=agree)
            assert all(data.sample(i, 0)["latents"].shape == data.shape(i, 0) for i in range(4))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert sorted(logs[0] + logs[1]) == ["", "a bird", "a cat", "a dog", *["clip"] * 7]
    assert abs(len(logs[0]) - len(logs[1])) <= 1


def test_cache_failures(items, tmp_path, monkeypatch):
    """A failure names the file it struck, leaves no half-written entry that a later run would read, and entries that
    another rank did not write are missed at once and not at step 1000."""

    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("cache.save_file", fail)
        with pytest.raises(RuntimeError, match="encoding .* into .* failed: .*No space left"):
            make_dataset(items, tmp_path / "full", [])
    assert not [path for path in (tmp_path / "full").rglob("*") if path.is_file()]
    broken = make_dataset(items, tmp_path / "full", [])
    broken.sample_files[0][0].write_bytes(b"half")
    with pytest.raises(RuntimeError, match="cannot be read .*; the next start makes it anew"):
        broken.sample(0, 0)
    with pytest.raises(RuntimeError, match="cache files were not written.*one folder that all ranks share"):
        make_dataset(items, tmp_path / "alone", [], rank=0, world=2)


def test_write_tensor_is_whole_or_absent(tmp_path, monkeypatch):
    """Until the file is complete nothing stands under its name, so a killed run leaves no half entry."""
    seen = []

    def watch(source, target):
        seen.append((target.exists(), source.name != target.name, source.stat().st_size > 0))

    monkeypatch.setattr("cache.os.replace", watch)
    write_tensors(tmp_path / "x.safetensors", {"x": torch.ones(3)})
    assert seen == [(False, True, True)]

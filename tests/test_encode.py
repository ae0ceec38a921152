"""The cache filled ahead, and training without one."""

import dataclasses
import io
import os
from contextlib import redirect_stdout
from unittest.mock import patch

import pytest
import runs
import torch
from spawn import spawn

import data
import encode
import parallel
import sample
from memory import WHOLE

FAST = dict(steps=2, caption_dropout=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files and weights, and no cache yet."""
    folder = tmp_path_factory.mktemp("encode")
    runs.prepare(folder, fill=False)
    return folder


def words_of(folder, **changes) -> list[str]:
    """The command line of `data.py cache` for the run that runs.config describes."""
    config = runs.config(folder, **changes)
    words = [str(entry) for entry in config.data]
    for field in dataclasses.fields(encode.EncodeOptions):
        value = getattr(config, field.name)
        if field.name != "data" and value != field.default:
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    return words


def fill(folder, words: list[str]) -> tuple[int, str]:
    """Exit code and output."""
    os.chdir(folder)
    with patch.object(parallel, "stop"), redirect_stdout(io.StringIO()) as said:  # the group is spawn's
        return data.main(["cache", *words]), said.getvalue()


def entries(folder) -> dict:
    return {path.name: path.stat().st_mtime_ns for path in (folder / "cache").glob("*/*.safetensors")}


def test_cache_filled_ahead(folder, capsys):
    """If this goes, what was encoded ahead is encoded again by training, or by every rank, or `data.py cache` wants a
    model's checkpoint, which machines that only encode do not have."""
    words = words_of(folder)
    assert "--checkpoint" not in words and not (folder / "cache").exists()
    codes, said = zip(*spawn(fill, 2, folder, words), strict=True)
    assert codes == (0, 0)
    # Four captions and the empty one; windows of 9 and 5 frames, and two images.
    assert "".join(said).count("cache: 0 of 9 found, 9 encoded") == 1
    before = entries(folder)
    assert len(before) == 9
    runs.run(folder, **FAST)
    assert "cache: 9 of 9 found, 0 encoded" in capsys.readouterr().out and entries(folder) == before


def test_nothing_is_kept(folder):
    """If this goes, --cache off writes files, or a run with it trains on other numbers than one from the cache."""
    cached = runs.run(folder, **FAST)
    there = sorted(path.name for path in folder.iterdir())
    off = runs.run(folder, **FAST, cache="off")
    assert off["loss"] == cached["loss"] and off["digests"] == cached["digests"]
    assert sorted(path.name for path in folder.iterdir()) == there and "off" not in there


def test_text_precision(folder, capsys):
    """If this goes, the text encoder takes twice the memory it was released with, or states of one precision are taken
    from the cache for those of the other."""
    wide = runs.run(folder, **FAST)
    capsys.readouterr()
    with patch.object(sample, "encode_prompts", wraps=sample.encode_prompts) as encode_prompts:
        narrow = runs.run(folder, **FAST, text_precision="bf16")
    assert "cache: 4 of 9 found, 5 encoded" in capsys.readouterr().out
    assert {p.dtype for p in encode_prompts.call_args.args[0].parameters()} == {torch.bfloat16}
    for a, b in zip(narrow["loss"], wide["loss"], strict=True):
        assert 0 < abs(a - b) < 1e-2 * b
    config = runs.config(folder, checkpoint="scratch", model="wan2.1-t2v-1.3b")
    layout = parallel.Layout()
    with patch.object(sample, "load_weights", lambda module, **_: module.to_empty(device="cpu")):
        paths = dict.fromkeys(("vae", "text_encoder"), "released") | {"tokenizer": config.tokenizer}
        assert sample.load_components(config, paths, layout, WHOLE).text_dtype == torch.bfloat16


def test_bad_command_lines(folder):
    """If this goes, `data.py cache` finds a mistake late, or tells it in a traceback."""
    for words, line in (
        (["--cache", "off"], "--cache off keeps nothing: name the folder to fill"),
        (["nowhere/"], "--data nowhere/: no such file or folder"),
        (["--model", "wan2.1-t2v-14b"], "--model wan2.1-t2v-14b needs --vae PATH"),
        (["--model", "wan3"], "--model wan3 is none of demo"),
        (["--checkpoint", "x"], "unknown option --checkpoint"),
    ):
        with pytest.raises(ValueError) as error:
            fill(folder, words)
        assert line in str(error.value)

"""Command lines: what they set, and that what cannot work ends in one line, on every rank, before anything is done."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from string import Template

import pytest

import options
import sample
import train
from presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("program", [train, sample])
def test_every_option_has_a_default_and_a_line_of_help(program):
    """If this goes, --help no longer tells what an option does, or a run needs options that a newcomer cannot know."""
    options.parse(program.Config, [])
    assert all(options.comments(program.Config).values())


def test_values():
    """If this goes, an option is read as something else than what was typed."""
    words = (
        "--name x --steps 7 --betas 0.8 0.95 --compile --noise-range 0.875 1 --shard full --no-sample --lr=3e-5".split()
    )
    config = options.parse(train.Config, words)
    assert (config.steps, config.betas, config.compile, config.noise_range) == (7, (0.8, 0.95), True, (0.875, 1.0))
    assert (config.shard, config.sample, config.lr, config.run) == ("full", False, 3e-5, "x")
    assert options.parse(sample.Config, ["--prompt", "one", "and two"]).prompt == ("one", "and two")


BAD = {  # command line: words of the one line
    "--stpes 4": "unknown option --stpes; did you mean --steps?",
    "--steps 4 --steps 5": "--steps is given 2 times",
    "--steps many": "invalid int value: 'many'",
    "--shard zero3": "invalid choice: 'zero3'",
    "--model wan3": "--model wan3 is none of demo, demo-i2v",
    "--model wan2.1-t2v-14b": "--model wan2.1-t2v-14b needs --vae PATH",
    "--data /nowhere/at/all": "--data /nowhere/at/all: no such file or folder",
    "--vae /nowhere.pth": "--vae /nowhere.pth: no such file",
    "--frames 16": "--frames 16 is not 4n + 1; use 13",
    "--height 60 --width 64": "--height 60 is not a multiple of 16; use 48",
    "--height 64": "give either --height and --width or --max-area",
    "--sp 2": "--sp 2 does not divide the 1 processes",
    "--noise-range 0.9 0.1": "low 0.9 and high 0.1",
    "--batch-size 0": "--batch-size must be at least 1",
    "--resume latest --run never-was": "--resume latest: runs/never-was holds no checkpoint",
    "--prompts /nowhere.txt": "--prompts /nowhere.txt: no such file",
    "--ema 1": "--ema 1.0 must be in",
    "--expert high": "--expert high: --model demo is one model",
    "--image-condition 0.5": "--image-condition 0.5: --model demo takes no image",
    "--model demo-t2v-experts --checkpoint scratch --expert low --noise-range 0.9 1": "low 0.9 and high 0.875",
    "--trainable nothing": "--trainable nothing finds no parameter",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_command_lines(line, tmp_path, monkeypatch):
    """If this goes, a mistake on the command line is found late, or told in a traceback, or not at all."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        train.main(options.parse(train.Config, line.split()))
    assert BAD[line] in str(error.value)
    assert not list(tmp_path.iterdir())  # nothing was written, no data set, no run


def torchrun(tmp_path, *words) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    return subprocess.run(
        [*command, str(ROOT / "train.py"), *words], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )


def test_every_rank_stops(tmp_path):
    """If this goes, one rank of a job goes on, or hangs, where the others found a mistake; or all of them say so."""
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "broken.mp4").write_bytes(b"not a video at all")
    (tmp_path / "clips" / "broken.txt").write_text("a broken file")
    for words, line in (
        (["--ulysses", "2", "--ring", "2"], "train.py: --sp 4 does not divide the 2 processes"),
        (["--sp", "2", "--data", "clips"], "broken.mp4"),
    ):
        result = torchrun(tmp_path, *words)
        assert result.returncode != 0
        ours = [text for text in result.stderr.splitlines() if text.startswith("train.py: ")]
        assert len(ours) == 1 and line in ours[0], result.stderr


def documented() -> list[list[str]]:
    """The command lines of docs/models.md, with the variables that it sets filled in, from the program on."""
    found, values = [], {}
    for line in re.findall(r"^    (\S.*)$", (ROOT / "docs" / "models.md").read_text(encoding="utf-8"), re.M):
        line = Template(line).safe_substitute(values)
        if match := re.match(r'(\w+)=("?)(.*)\2$', line):
            values[match[1]] = match[3]
        words = shlex.split(line) if re.match("python|torchrun", line) else []
        found += [words[words.index(name) :] for name in ("train.py", "sample.py") if name in words]
    return found


def test_documented_commands_are_understood():
    """If this goes, docs/models.md tells people to type what is refused."""
    commands = documented()
    for program, *words in commands:
        if program == "train.py":
            train.settle(options.parse(train.Config, words))
        else:
            sample.sampling_for(options.parse(sample.Config, words))
    models = {words[words.index("--model") + 1] for _, *words in commands}
    assert {name for name in PRESETS if name.startswith("wan")} <= models

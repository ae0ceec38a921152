"""What all tests share: the golden reference data, and modules imported from the project's root."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden():
    """golden("dit_t2v") is that case's tensors, golden("text_cleaning") its parsed JSON, golden.keys("wan2.1-vae") the
    unfolded official key list; skips where PICOWAN_GOLDEN is unset."""
    folder = os.environ.get("PICOWAN_GOLDEN")
    if not folder:
        pytest.skip("PICOWAN_GOLDEN is not set")
    return Golden(Path(folder))


class Golden:
    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, name: str) -> dict:
        tensors = self.folder / "cases" / f"{name}.safetensors"
        if tensors.exists():
            return load_file(tensors)
        return json.loads((self.folder / "cases" / f"{name}.json").read_text())

    def config(self, name: str) -> dict:
        """The configuration that a case's weights were made with."""
        return self.metadata(name, "config")

    def metadata(self, name: str, field: str):
        with safe_open(self.folder / "cases" / f"{name}.safetensors", "pt") as file:
            return json.loads(file.metadata()[field])

    def keys(self, name: str) -> dict[str, list[int]]:
        """Official checkpoint NAME as {parameter name: shape}, with its per-block entries unfolded."""
        return self.unfold(f"official.{name}")

    def map(self, name: str) -> dict[str, str]:
        """Name map NAME, such as "wan2.1-t2v-14B.official-to-diffusers", unfolded."""
        return self.unfold(f"map.{name}")

    def unfold(self, file: str) -> dict:
        record = json.loads((self.folder / "keys" / f"{file}.json").read_text())
        pairs = dict(record["keys"])
        for repeat in record["repeat"]:
            for i in map(str, range(repeat["n"])):
                for key, value in repeat["keys"].items():
                    value = value.replace("{i}", i) if isinstance(value, str) else value
                    pairs[repeat["prefix"].replace("{i}", i) + key] = value
        assert len(pairs) == record["total"]
        return pairs

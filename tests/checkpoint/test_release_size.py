"""A checkpoint with as many tensors as the release, made of sparse files: checked in seconds and in little memory."""

from __future__ import annotations

import json
import math
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openk3.checkpoint.inventory import K3_VISION_CONFIG, StoredTensor, tensor_inventory, vision_inventory
from openk3.config import ModelConfig

SHARDS = 96
WIDTH = {"U8": 1, "BF16": 2, "F32": 4}


def write_sparse(directory: Path) -> int:
    """Headers as the release would have them, over holes. Returns the number of tensors."""
    config = ModelConfig.named("k3")
    tensors: list[StoredTensor] = [*tensor_inventory(config, experts="mxfp4"), *vision_inventory(K3_VISION_CONFIG)]
    weight_map = {}
    for shard in range(SHARDS):
        file = directory / f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        header, offset = {}, 0
        for tensor in tensors[shard::SHARDS]:
            size = math.prod(tensor.shape) * WIDTH[tensor.dtype]
            header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
            offset += size
            weight_map[tensor.name] = file.name
        text = json.dumps(header).encode()
        with file.open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + offset)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(config.to_json(dtype="bfloat16")))
    return len(tensors)


@pytest.mark.slow
def test_the_release_s_headers_are_checked_in_20_seconds_and_a_gigabyte(tmp_path: Path) -> None:
    count = write_sparse(tmp_path)
    assert count == 497220
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "openk3", "inspect", str(tmp_path), "--json"], capture_output=True, text=True, check=False)
    seconds = time.monotonic() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    facts = json.loads(done.stdout)
    assert done.returncode == 0 and facts["sound"] and facts["tensors"] == count
    assert facts["stored_parameters"] == 2779931837184
    print(f"{seconds:.1f} s, {peak / 1e6:.0f} MB")
    assert peak < 10**9
    assert seconds < 20

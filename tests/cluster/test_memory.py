import math

import pytest
import tensorflow as tf

from tfdist.cluster import memory

GB = 1 << 30


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, math.inf),
        ({"meminfo": "MemTotal: 9 kB\nMemAvailable:    8388608 kB\n"}, 8 * GB),
        (
            {
                "meminfo": "MemAvailable:    8388608 kB\n",
                "memory.max": f"{4 * GB}\n",
                "memory.current": f"{3 * GB}\n",
                "memory.stat": f"anon 5\ninactive_file {GB}\n",
            },
            2 * GB,
        ),
        (
            {
                "meminfo": "MemAvailable:    8388608 kB\n",
                "memory.max": "max\n",
                "memory.current": f"{3 * GB}\n",
            },
            8 * GB,
        ),
        (
            {
                "memory/memory.limit_in_bytes": f"{4 * GB}\n",
                "memory/memory.usage_in_bytes": f"{3 * GB}\n",
                "memory/memory.stat": f"inactive_file {GB // 2}\n",
            },
            1.5 * GB,
        ),
    ],
)
def test_free_bytes(tmp_path, files, free):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory.free_bytes(str(tmp_path), str(tmp_path)) == free


def test_a_server_tells_what_is_free(monkeypatch):
    host, free = memory.free_bytes_on(tf.constant(0).device)
    assert 0 < free < math.inf
    monkeypatch.setattr(memory, "_FILE", "ram://tfdist/another")
    memory.publish_free_bytes()
    told_host, told = memory.free_bytes_on("/CPU:0")
    assert told_host == host
    assert 0 < told < math.inf


def test_a_server_that_tells_nothing_has_none(monkeypatch):
    monkeypatch.setattr(memory, "_FILE", "ram://tfdist/nothing")
    assert memory.free_bytes_on("/CPU:0") == ("/CPU:0", 0)

"""Importing akvcache starts nothing, opens nothing and sets nothing up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROBE = """
import json, os, socket, sys, threading

def targets():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    return sorted(target for target in found if not target.startswith(("/proc", "pipe:", "/dev/null")))

import torch, numpy, anyio, aiofiles, xxhash
from opentelemetry import metrics, trace
before = {thread.name for thread in threading.enumerate()}, targets(), sorted(os.listdir(".")), dict(os.environ)
heavy = set(sys.modules)
import akvcache, akvcache.facade, akvcache.registry
after = {thread.name for thread in threading.enumerate()}, targets(), sorted(os.listdir(".")), dict(os.environ)
print(json.dumps({
    "threads": sorted(after[0] - before[0]),
    "files": [target for target in after[1] if target not in before[1]],
    "here": after[2] != before[2],
    "environment": after[3] != before[3],
    "providers": [type(trace.get_tracer_provider()).__name__, type(metrics.get_meter_provider()).__name__],
    "plug-ins": sorted(name for name in sys.modules if name.startswith("akvcache_")),
    "optional": [
        name for name in ("pytest", "hypothesis", "transformers", "opentelemetry.sdk")
        if name in sys.modules and name not in heavy
    ],
    "root handlers": len(__import__("logging").getLogger().handlers),
}))
"""


def test_importing_has_no_side_effects(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "threads": [],
        "files": [],
        "here": False,
        "environment": False,
        "providers": ["ProxyTracerProvider", "_ProxyMeterProvider"],
        "plug-ins": [],
        "optional": [],
        "root handlers": 0,
    }
    assert done.stderr == ""

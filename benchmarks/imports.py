"""What importing kvpact costs an engine's processes beyond vLLM's own imports, in CPU time; the goal is 100 ms.

Each round is a fresh process for each half of the connector, which first imports what vLLM's scheduler or worker does,
whatever the connector. Then in turn: `kvpact.vllm`; the connector that --kv-transfer-config names, which vLLM's front
end imports too; the half that the engine makes of it, with the worker class of `--worker-cls`. Times are those of the
row and all before it. With `--no-bytecode` kvpact is compiled each time, as where PYTHONDONTWRITEBYTECODE is set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.needs import require_vllm
from benchmarks.table import spread

STEPS = {
    "scheduler": ("kvpact.vllm", "kvpact.vllm.connector", "kvpact.vllm.scheduler_side"),
    "worker": ("kvpact.vllm", "kvpact.vllm.connector", "kvpact.vllm.worker_side, kvpact.vllm.worker"),
}
"""What each half's process imports, in order."""
ENGINE = {"scheduler": "vllm.v1.engine.core", "worker": "vllm.v1.worker.cpu_worker"}
CHILD = """
import json, sys
from time import process_time
import vllm.distributed.kv_transfer.kv_connector.v1.base, vllm.distributed.kv_transfer.kv_connector.v1.metrics, {engine}
engine, known = process_time(), set(sys.modules)
sys.dont_write_bytecode, sys.pycache_prefix = {settings}
found = []
for step in {steps}:
    exec(f"import {{step}}")
    found.append((process_time() - engine, len(set(sys.modules) - known)))
print(json.dumps([engine, found]))
"""


def measured(half: str, cache: str | None) -> tuple[float, list[tuple[float, int]]]:
    """CPU seconds of vLLM's imports, and after each of our steps the seconds and modules of all so far.

    `cache` is the folder for kvpact's bytecode; None: none is written or found.
    """
    settings = f"{cache is None}, {cache or os.devnull!r}"
    program = CHILD.format(engine=ENGINE[half], steps=STEPS[half], settings=settings)
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"the imports of the {half} failed:\n{ran.stderr[-2000:]}")
    seconds, found = json.loads(ran.stdout.splitlines()[-1])
    return seconds, found


def rows(rounds: int = 5, bytecode: bool = True) -> list[dict[str, Any]]:
    """One row for each half's process and each step of its imports."""
    require_vllm()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvpact-imports-") as folder:
        for half, steps in STEPS.items():
            ran = [measured(half, folder if bytecode else None) for _ in range(rounds + 1)][1:]
            for step, imported in enumerate(steps):
                found.append(
                    {
                        "process": half,
                        "imported": imported,
                        "bytecode": "kept" if bytecode else "none",
                        **spread("cpu_ms", [1e3 * ours[step][0] for _, ours in ran]),
                        "modules": ran[0][1][step][1],
                        **spread("vllm_cpu_ms", [1e3 * engine for engine, _ in ran]),
                    }
                )
    return found

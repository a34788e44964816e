"""A process that stores and reads through a slab until it is killed; run by test_slab_kill.py.

Arguments: directory, slots, seed. Says "ready" when the tier is open. Exits 3 if it was served anything wrong.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

from kvpact.tiers import record
from kvpact.tiers.disk import tier as disk
from slab_scenes import SLOT, bare_tier, chain, served, store

NAMES = [f"document {number}" for number in range(6)]


def churn(directory: Path, slots: int, seed: int) -> None:
    vars(disk).update(TEND_SECONDS=0.02, TEND_SHARE=1.0)  # other processes come and go
    vars(record).update(GROUP_BYTES=4 * SLOT)  # several groups a batch, so that both lanes of a batch die
    tier = bare_tier(directory, slots, timeout=2.0)
    print("ready", flush=True)

    def work(seed: int) -> None:
        choose = random.Random(seed)
        try:
            while True:
                keys = chain(choose.choice(NAMES), choose.randrange(1, 24))
                if choose.random() < 0.5:
                    store(tier, keys)
                elif choose.random() < 0.9:
                    served(tier, keys)
                else:
                    tier.delete(keys[-2:])
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(3)

    threading.Thread(target=work, args=(seed * 10,), daemon=True).start()
    work(seed * 10 + 1)


if __name__ == "__main__":
    churn(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

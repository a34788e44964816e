"""One engine of a fleet: `python fleet_child.py URL SEED`. Reads orders, a line each, and answers each with a line.

Between orders it serves prompts of its own traffic. Orders: `update WEIGHTS CLEAR`, `reset CLEAR`, `word VERSION`,
`phase NAME`, `end`. Each is answered with "done", or with the word's refusal; `phase` and `end` with what was counted
since the last phase: prompt tokens, those from the external cache, and wrong reads.
"""

from __future__ import annotations

import json
import select
import sys

from epoch_engine import EpochEngine, Traffic, store
from kvpact.errors import WeightsVersionRefused

MAX_ALIVE = 3


class Child:
    """The engine, its traffic, and what was counted."""

    def __init__(self, url: str, seed: int) -> None:
        # Memory is small, so that much of what is used comes from the store.
        self.served = EpochEngine(store(url), num_slots=48, sync_load_budget=0)
        self.engine = self.served.engine
        self.traffic = Traffic(seed)
        self.asked = 0
        self.before = (0, 0, 0)

    def serve(self) -> None:
        """One step of traffic; the engine's own prefix cache is emptied now and then, so that the store is asked."""
        if len(self.engine.scheduler.requests) < MAX_ALIVE:
            tokens = self.traffic.prompt()
            self.asked += len(tokens)
            self.served.add(tokens, 8)
            if self.served.names % 3 == 0:
                self.served.forget_local()
        self.served.step()

    def counted(self) -> str:
        """Since this was asked last."""
        now = self.asked, self.engine.counts.external_hits, len(self.served.wrong)
        asked, hits, wrong = (new - old for new, old in zip(now, self.before, strict=True))
        self.before = now
        return json.dumps({"asked": asked, "hits": hits, "wrong": wrong, "what": self.served.wrong[-wrong:][:1]})

    def obey(self, order: str, *arguments: str) -> str:
        """Carry out one order; what is to be answered."""
        if order == "update":
            self.engine.update_weights(int(arguments[0]), clear_cache=arguments[1] == "1")
        elif order == "reset" and arguments[0] == "1":
            self.engine.reset()
        elif order == "reset":
            self.engine.reset_connector()
        elif order == "word":
            try:
                self.served.cache.set_weights_version(arguments[0])
            except WeightsVersionRefused as refused:
                return f"refused: {refused}"
        elif order == "phase":
            return self.counted()
        return "done"

    def loading(self) -> bool:
        """Whether the engine would refuse to clear its caches now."""
        return any(load.asynchronous for load in self.engine.scheduler.loads.values())


def main() -> None:
    """Until it is told to end, or killed."""
    child = Child(sys.argv[1], int(sys.argv[2]))
    print("ready", flush=True)
    while True:
        while not select.select([sys.stdin], [], [], 0)[0]:
            child.serve()
        order = sys.stdin.readline().split()
        if not order or order[0] == "end":
            break
        while order[0] in ("update", "reset") and order[-1] == "1" and child.loading():
            child.served.step()  # this release refuses a reset while it loads
        print(child.obey(*order), flush=True)
    child.served.settle()
    child.served.close()
    print(child.counted(), flush=True)


if __name__ == "__main__":
    main()

"""Random walks through everything an engine can meet, shrunk to a short script where one finds something."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvpact.testkit.vllm.engine import VllmEngine
from kvpact.testkit.vllm.factory import BLOCK, BrokenError, Lab, prompt
from kvpact.testkit.vllm.registry import Scenarios

scenario = WALKS = Scenarios()

ACTIONS = 120
"""Actions of one walk."""
SHRINK_SECONDS = 15.0
"""Time spent on making a script that broke something shorter."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that happens; each makes sense without those before it."""

    kind: str
    request_id: str = ""
    tokens: tuple[int, ...] = ()
    max_tokens: int = 1
    salt: str | None = None
    prompt_logprobs: bool = False
    during_step: bool = False
    everything: bool = False
    """Reset running requests and the connector too."""
    paused: bool = False
    delays: tuple[int, ...] = ()

    def perform(self, engine: VllmEngine) -> None:
        """Do it; cancelling a request that is not there does nothing."""
        if self.kind == "add":
            special = {"salt": self.salt, "prompt_logprobs": self.prompt_logprobs}
            wanted = {name: value for name, value in special.items() if value}
            engine.add(self.request_id, self.tokens, max_tokens=self.max_tokens, **wanted)
        elif self.kind == "abort":
            if self.request_id in engine.requests and not engine.ended(self.request_id):
                engine.abort(self.request_id, during_step=self.during_step)
        elif self.kind == "reset":
            engine.reset(running=self.everything, connector=self.everything)
        elif self.kind == "pause":
            engine.pause(self.paused)
        elif self.kind == "delay":
            engine.journal(f"workers' reports come {list(self.delays)} steps late")
            engine.report_delay = list(self.delays)
        else:
            engine.journal("step")
            engine.step()


def random_actions(dice: random.Random, ranks: int) -> list[Action]:
    """A walk: requests that share prefixes, cancellations, resets, pauses, late reports, steps."""
    stems = [prompt(seed, 9, tail=0) for seed in range(1, 5)]
    actions: list[Action] = []
    for number in range(ACTIONS):
        choice = dice.random()
        if choice < 0.4:
            stem = dice.choice(stems)[: dice.randrange(1, 10) * BLOCK]
            tokens = (*stem, *prompt(number + 40, 0, dice.randrange(1, 40)))
            salt = "tenant" if dice.random() < 0.2 else None
            logprobs = dice.random() < 0.05
            length = dice.randrange(1, 25)
            actions.append(Action("add", f"r{number}", tokens, length, salt=salt, prompt_logprobs=logprobs))
        elif choice < 0.47:
            target = f"r{dice.randrange(number + 1)}"
            actions.append(Action("abort", target, during_step=dice.random() < 0.5))
        elif choice < 0.5:
            actions.append(Action("reset", everything=dice.random() < 0.3))
        elif choice < 0.52:
            actions.append(Action("pause", paused=dice.random() < 0.5))
        elif choice < 0.54:
            actions.append(Action("delay", delays=tuple(dice.randrange(4) for _ in range(ranks))))
        else:
            actions.append(Action("step"))
    return actions


def shrunk(actions: Sequence[Action], breaks: Callable[[Sequence[Action]], bool], seconds: float) -> list[Action]:
    """Leave out actions, many at once, then fewer, as long as what remains still breaks something."""
    end = time.monotonic() + seconds
    kept, size = list(actions), len(actions) // 2
    while size:
        start = 0
        while start < len(kept) and time.monotonic() < end:
            candidate = kept[:start] + kept[start + size :]
            if breaks(candidate):
                kept = candidate
            else:
                start += size
        size //= 2
    return kept


@scenario("P1", "P2", "P8", "P9", "P11")
def everything_at_once(lab: Lab) -> None:
    """Arrivals, cancellations, resets, pauses, delays at random, on one and two ranks, with and without overlap."""
    for seed in range(4):
        ranks, overlap = 1 + seed % 2, seed >= 2
        actions = random_actions(random.Random(seed), ranks)

        walk = partial(_walk, lab, ranks, overlap)
        if walk(actions).violations:
            found = walk(shrunk(actions, partial(_breaks, walk), SHRINK_SECONDS))
            lab.journal[:] = found.journal
            lab.violations += found.violations
            raise BrokenError


def _breaks(walk: Callable[[Sequence[Action]], Lab], actions: Sequence[Action]) -> bool:
    return bool(walk(actions).violations)


def _walk(lab: Lab, ranks: int, overlap: bool, actions: Sequence[Action]) -> Lab:
    def situation(lab: Lab) -> None:
        with lab.engine(ranks=ranks, overlap=overlap, num_blocks=41, chunk=5 * BLOCK, max_num_seqs=4) as engine:
            for action in actions:
                action.perform(engine)
            engine.pause(False)
            lab.finish(engine)

    return lab.attempt(situation)

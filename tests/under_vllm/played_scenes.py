"""A real engine over a played device, through all that happens to one; the tests judge what is returned.

Run in forks of `scene_host`. A life on the slab of another is a restart from disk.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from company_answers import Said, Thrice
from company_engine import CompanyEngine, prompt_of, said
from vllm.lora.request import LoRARequest

from engines import BLOCK, kvpact_transfer_config, prompt

FEW, MANY = 2, 5
"""Blocks of a prompt that a step waits for, and of one that waits itself for its load."""

CROWD, ANSWERED = 8, 24
"""Prompts at once, which do not fit into the engine's blocks when they grow; tokens of an answer to each."""


@dataclass
class Life:
    """What was seen."""

    asked: list[Said] = field(default_factory=list)
    """First answers, each to another prompt of `FEW` blocks."""
    differing: list[int] = field(default_factory=list)
    """Prompts to which an answer with all of it from kvpact was not that of the engine's own hit, or had less."""
    styles: list[Thrice] = field(default_factory=list)
    """One prompt with each adapter."""
    held_by_the_cancelled: int = 0
    """Blocks of a request, cancelled in its load, until the load ended."""
    free_again: int = 0
    """Of these, afterwards."""
    alone: list[Said] = field(default_factory=list)
    """Without any cache, of a crowd one after the other."""
    together: list[Said] = field(default_factory=list)
    """And at once."""
    crowds: list[list[Said]] = field(default_factory=list)
    """With kvpact, again and again."""
    preemptions: list[int] = field(default_factory=list)
    after_reset: list[Said] = field(default_factory=list)
    """A prompt before it, and whose load was under way; another one that had been stored, twice."""
    after_sleep: list[Said] = field(default_factory=list)
    """A prompt computed right before it, from the engine's own cache, and loaded after it."""
    standings: list[str] = field(default_factory=list)
    """When the engine had proven its copies, right after the sleep."""
    slot_sizes: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)


class Living(CompanyEngine):
    """The engine."""

    def __init__(self, model: Path, folder: Path, first: int, budget: str, **arguments: Any) -> None:
        log = folder / "log"
        log.mkdir(exist_ok=True)
        os.environ |= {"PLAYED_LOG": str(log), "PLAYED_FIRST": str(first)}
        transfer = kvpact_transfer_config(
            memory="96MiB", tiers=[f"disk://{folder / 'slabs'}?capacity=512MiB"], sync_load_budget=budget
        )
        super().__init__(
            model,
            transfer=transfer | {"kv_connector": "PlayedConnector", "kv_connector_module_path": "played"},
            max_model_len=8 * BLOCK,
            dtype="float32",
            **arguments,
        )
        import played

        (self.device,) = played.DEVICES
        self.life = Life()
        self.seeds = count(7000)
        self.local: dict[int, Said] = {}
        """Seed of a prompt of `FEW` blocks -> the answer with all of it from the engine's own cache."""

    def standing(self) -> str:
        """What is known of the device's copies."""
        return self.device.segment.standing.name

    def load(self, seed: int) -> None:
        """Ask such a prompt again, which kvpact has."""
        self.forget()
        answer = self.ask(prompt(seed, FEW))
        if answer != self.local[seed]:
            self.life.differing.append(seed)

    def prove(self, first: int) -> None:
        """Until steps wait for loads, and these are no longer all checked."""
        for seed in [next(self.seeds) for _ in range(first // FEW + 1)]:
            self.life.asked.append(self.ask(prompt(seed, FEW)))
            self.local[seed] = self.ask(prompt(seed, FEW))
            self.forget()
        seeds = list(self.local)
        for number in range(2 * first + 6):
            self.load(seeds[number % len(seeds)])
        self.life.standings.append(self.standing())

    def cancel(self) -> None:
        """A user leaves while the device stands still in his load; another one is answered meanwhile."""
        front, tokens, other = self.llm.llm_engine, prompt(next(self.seeds), MANY), next(self.seeds)
        self.ask(tokens)
        self.forget()
        free = self.free_blocks
        self.device.driver.stopped = True
        front.add_request("leaves", prompt_of(tokens), self.sampling())
        for _ in range(3):
            front.step()
        front.abort_request(["leaves"])
        self.ask(prompt(other, FEW))
        self.life.held_by_the_cancelled = free - self.free_blocks
        self.device.driver.stopped = False
        self.local[other] = self.ask(prompt(other, FEW))
        self.load(other)
        self.forget()
        self.life.free_again = self.free_blocks - free + self.life.held_by_the_cancelled

    def crowd(self, asked: list[list[int]], **options: Any) -> list[Said]:
        """All at once."""
        front, outputs = self.llm.llm_engine, dict[int, Any]()
        for number, tokens in enumerate(asked):
            front.add_request(str(number), prompt_of(tokens), self.sampling(max_tokens=ANSWERED, **options))
        while front.has_unfinished_requests():
            outputs.update({int(output.request_id): output for output in front.step() if output.finished})
        return [said(outputs[number]) for number in range(len(asked))]

    def press(self) -> None:
        """Crowds that do not fit: whoever runs is preempted, and loads again."""
        asked = [prompt(next(self.seeds), FEW + number % (MANY - FEW), tail=BLOCK - 12) for number in range(CROWD)]
        computed: dict[str, Any] = {"max_tokens": ANSWERED, "skip_reading_prefix_cache": True}
        self.life.alone = [self.ask(tokens, **computed) for tokens in asked]
        self.life.together = self.crowd(asked, skip_reading_prefix_cache=True)
        for _ in range(2):
            self.forget()
            before = self.metric("vllm:num_preemptions")
            self.life.crowds.append(self.crowd(asked))
            self.life.preemptions.append(int(self.metric("vllm:num_preemptions") - before))

    def reset(self) -> None:
        """kvpact forgets all, one load of which is under way."""
        front, tokens, seen = self.llm.llm_engine, prompt(next(self.seeds), MANY), self.life.after_reset
        self.ask(tokens)
        seen.append(self.ask(tokens))
        self.forget()
        self.device.driver.stopped = True
        front.add_request("loads", prompt_of(tokens), self.sampling())
        for _ in range(3):
            front.step()
        self.llm.reset_prefix_cache(reset_connector=True)
        self.device.driver.stopped = False
        under_way = []
        while front.has_unfinished_requests():
            under_way += [said(output) for output in front.step() if output.finished]
        seen += under_way
        for _ in range(2):
            self.forget()
            seen.append(self.ask(prompt(min(self.local), FEW)))

    def sleep(self) -> None:
        """When it is over, the KV memory is elsewhere."""
        tokens, seen = prompt(next(self.seeds), FEW), self.life.after_sleep
        seen += [self.ask(tokens), self.ask(tokens)]
        self.held()  # vLLM cannot sleep while a save protects blocks
        self.llm.sleep(1)
        self.llm.wake_up()
        self.life.standings.append(self.standing())
        seen.append(self.ask(tokens))

    def ended(self) -> Life:
        """What was seen, when nothing is left."""
        self.life.slot_sizes = len(self.device.segment.classes)
        self.life.counts = self.counts
        self.life.held = self.close()
        return self.life


def life(model: Path, folder: Path, first: int, budget: str, adapters: list[Path], arguments: dict[str, Any]) -> Life:
    """An engine of which the `first` jobs of each kind are checked, and that lets no step wait for a larger load."""
    engine = Living(model, folder, first, budget, **arguments)
    engine.prove(first)
    styles = [None, *(LoRARequest("style", number, str(path)) for number, path in enumerate(adapters, 1))]
    for style in styles if adapters else ():
        engine.life.styles.append(engine.ask_thrice(prompt(6999, MANY), lora=style))
    engine.cancel()
    engine.press()
    engine.reset()
    engine.sleep()
    return engine.ended()


def next_life(model: Path, folder: Path, first: int, budget: str, arguments: dict[str, Any]) -> Life:
    """The next one on its slab, until its copies are proven."""
    engine = Living(model, folder, first, budget, **arguments)
    engine.prove(first)
    return engine.ended()

"""KV events of a connector, beside those of vLLM's own pool: a router hears both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpact_testkit.results import observable_if, require
from kvpact_testkit.router import ENGINE, Hash, RouterModel, blocks_of
from kvpact_testkit.vllm import compat
from kvpact_testkit.vllm.compat import RequestSettings
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, Harness, prompt
from kvpact_testkit.vllm.scenarios import Scenarios
from kvpact_testkit.vllm.scenarios_promises import adapter_in

scenario = EVENTS = Scenarios()


def hashes_of(prompt: Sequence[int], **settings: Any) -> list[Hash]:
    """The names in events of a prompt's blocks."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    request = compat.make_request("named", RequestSettings(prompt=prompt, **settings), BLOCK)
    return [maybe_convert_block_hash(name) for name in request.block_hashes]


def _heard(engine: VllmEngine) -> RouterModel:
    router = RouterModel()
    router.apply(engine.observed.events)
    observable_if(router.stored, "the connector sends no KV events")
    return router


@scenario("H133")
def events_say_what_vllm_says(harness: Harness) -> None:
    """Events of a connector say of each block what those of vLLM's pool say, but for its place and session."""
    adapter = adapter_in(harness, "calm", b"a")
    ways: list[dict[str, Any]] = [{}, {"salt": "tenant"}, {"adapter": adapter}]
    with harness.engine(kv_events=True, adapters=1) as engine:
        harness.serve(engine, "warm", prompt(9, 1), adapter=adapter)
        engine.run(lambda: False, steps=300, seconds=0.2)  # a thread of the connector may read its files
        for number, way in enumerate(ways):
            harness.store(engine, prompt(1, 6), **way)
            harness.serve(engine, f"again{number}-", prompt(1, 6), [*prompt(1, 4, 0), *prompt(2, 3)], **way)
        router = _heard(engine)
        stored = [event for event in engine.observed.events if type(event).__name__ == "BlockStored"]
        own = {name for event in stored if event.medium == ENGINE for name, _ in blocks_of(event)}
        others = {name for event in stored if event.medium != ENGINE for name in event.block_hashes}
        require(others <= own, f"{len(others - own)} of {len(others)} blocks are none of vLLM's", "H133")
        for way in ways:
            require(
                others & {*hashes_of(prompt(1, 6), **way)}, f"no block is announced of a request with {way}", "H133"
            )
        harness.notes.append(f"{router.stored} blocks: {', '.join(type(stored[0]).__struct_fields__)}")


@scenario("H133")
def routers_believe_what_is_promised(harness: Harness) -> None:
    """Prompts, evictions and a reset of vLLM's own cache; then all are asked for, and what the router was told since
    is what the connector promises."""
    with harness.engine(kv_events=True) as engine:
        prompts = [[*prompt(seed, 4, 0), *prompt(10 * seed + part, 5)] for seed in (1, 2, 3) for part in (1, 2)]
        harness.store(engine, *prompts)  # and routers forget everything
        harness.serve(engine, "again", *prompts)
        harness.rest(engine)
        promised = 0
        for number, tokens in enumerate(prompts):
            engine.evict_computed()
            engine.step()
            believed = _heard(engine).prefix(hashes_of(tokens))
            harness.serve(engine, f"asked{number}", tokens, max_tokens=1)
            (*_, last) = engine.observed.probes_of(f"asked{number}")
            promised += last.answer or 0
            require(
                last.answer == believed * BLOCK,
                f"{believed} blocks are believed, {last.answer} tokens promised",
                "H133",
            )
        observable_if(promised, "the connector promised no token for a prompt that was computed before")
        harness.notes.append(f"{promised} tokens promised of {sum(map(len, prompts))}")

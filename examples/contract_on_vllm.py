"""The life of a match on stock vLLM: what its scheduler does to five promises, and what kvpact makes of it.

Needs vLLM, and neither a model nor a GPU: the scheduler, the block pool and both halves of the connector are real, the
model is the test kit's. Usage: python examples/contract_on_vllm.py
"""

from kvpact_testkit.vllm.adapters import PactAdapter
from kvpact_testkit.vllm.compat import EngineSettings
from kvpact_testkit.vllm.engine import VllmEngine
from kvpact_testkit.vllm.harness import BLOCK, prompt

TRANSFER = {
    "kv_connector": "PactConnector",
    "kv_connector_module_path": "kvpact.vllm",
    "kv_connector_extra_config": {"memory": "1MiB", "model_id": "example", "sync_load_budget": 0},
}
PROMPTS = {name: prompt(seed, 10) for seed, name in enumerate(["taken", "cut", "dropped", "cancelled", "failed"], 1)}


def main() -> None:
    engine = VllmEngine(EngineSettings(num_blocks=21, ranks=2), TRANSFER, lambda line: None)
    cache = engine.connector.scheduler_side.cache
    for name, tokens in PROMPTS.items():
        engine.add(f"first {name}", tokens)
        engine.finish()
    engine.drain()
    engine.forget_computed()

    def live(name: str, why: str) -> None:
        """Run until the request has ended and the ranks have said what became of its load."""
        engine.finish()
        engine.drain()
        print(f"\n{name}: {why}")
        for plan in cache.ledger.explain(name):
            counts = f"promised {plan.promised_tokens}, committed {plan.committed_tokens}"
            counts += f", loaded {plan.loaded_tokens}, used {plan.used_tokens}"
            print(f"  {plan.state}, because {plan.reason}: {counts}")
        right = engine.observed.outputs[name] == engine.expected(name)
        print(f"  answer: {'as without a cache' if right else 'none, its user has left'}")

    engine.add("taken", PROMPTS["taken"])
    live("taken", "prepare, commit, load, use")

    engine.rewrite = lambda name, tokens: tokens - 4 * BLOCK
    engine.add("cut", PROMPTS["cut"])
    live("cut", "vLLM takes four blocks less than it was promised, and says nothing")

    engine.rewrite = lambda name, tokens: 0
    engine.add("dropped", PROMPTS["dropped"])
    live("dropped", "vLLM takes nothing of it")

    engine.rewrite = None
    engine.add("wall", prompt(9, 15), max_tokens=20)
    engine.step()
    engine.add("cancelled", PROMPTS["cancelled"])
    for _ in range(5):
        engine.step()
    asked = len(engine.observed.probes_of("cancelled"))
    engine.abort("cancelled")
    live("cancelled", f"no room; asked {asked} times, one plan; then its user leaves")

    PactAdapter().fail_blocks(engine, 0, loads=[6], saves=[])
    PactAdapter().fail_blocks(engine, 1, loads=[4], saves=[])
    engine.add("failed", PROMPTS["failed"])
    live(
        "failed",
        "rank 0 cannot load block 6, rank 1 not block 4: blocks 4 to 6 are failed, from block 4 on is computed",
    )

    print(f"\nheld in the end: {cache.ledger.totals.leases_held} leases, {engine.held_blocks} of the engine's blocks")
    engine.close()


if __name__ == "__main__":
    main()

"""Models whose KV cache groups need, or find in the engine's own prefix cache, different lengths of a prompt."""

from __future__ import annotations

from kvpact.identity.groups import GroupKind
from kvpact_testkit.results import require
from kvpact_testkit.vllm.harness import BLOCK, Harness, prompt
from kvpact_testkit.vllm.model_groups import CHUNKED, GEMMA, STATES, LayerGroup
from kvpact_testkit.vllm.scenarios import Scenarios

scenario = DIVERGENT = Scenarios()

THREE_KINDS = (LayerGroup(), LayerGroup(GroupKind.WINDOW, 1, 40), LayerGroup(GroupKind.STATE))
CHUNKS_ALONE = (
    (LayerGroup(GroupKind.CHUNK, 1, 64),),
    (LayerGroup(GroupKind.CHUNK, 1, 64), LayerGroup(GroupKind.CHUNK, 1, 128)),
)
"""Models without any full attention."""
MODELS = (GEMMA, CHUNKED, STATES, THREE_KINDS)


@scenario("P2", "P8", "P9")
def one_group_alone_is_evicted(harness: Harness) -> None:
    """The engine has five of a prompt's blocks, except those of one group: what all groups need is loaded."""
    for groups in MODELS:
        for number in range(len(groups)):
            harness.journal.clear()
            with harness.engine(groups=groups, token_budget=BLOCK, max_num_seqs=4) as engine:
                (stored,) = harness.store(engine, prompt(1, 6))
                harness.load(engine, "head", stored[: 5 * BLOCK + 1])
                harness.rest(engine)
                engine.evict_computed(number)
                harness.load(engine, "all", stored, max_tokens=2 * BLOCK)
                (asked, *_) = engine.observed.probes_of("all")
                require(asked.computed < 5 * BLOCK, "the engine asks behind blocks that not all groups have", "P2")
                harness.require_sound(engine)


@scenario("P2", "P9")
def states_lag_behind_the_attention(harness: Harness) -> None:
    """A prompt parts from another where the engine has its blocks and no state: what follows the state is computed."""
    for shared in (6, 3):
        harness.journal.clear()
        with harness.engine(groups=STATES, token_budget=4 * BLOCK, max_num_seqs=4) as engine:
            first = prompt(1, 8)
            harness.serve(engine, "first", first)
            harness.serve(engine, "parts", [*first[: shared * BLOCK], *prompt(2, 3)], max_tokens=2 * BLOCK)
            harness.require_sound(engine)


@scenario("P2", "P9", "P11")
def chunks_are_all_that_there_is(harness: Harness) -> None:
    """Between two chunks of all layers no block is needed and nothing is promised; inside one its blocks are."""
    for groups in CHUNKS_ALONE:
        for tokens in (8 * BLOCK + 1, 8 * BLOCK, 9 * BLOCK + 3):
            harness.journal.clear()
            with harness.engine(groups=groups, token_budget=2 * BLOCK, max_num_seqs=4) as engine:
                (stored,) = harness.store(engine, prompt(1, 0, tokens))
                harness.serve(engine, "again", stored, max_tokens=2 * BLOCK)
                (asked,) = engine.observed.probes_of("again")
                wanted = (tokens - 1) // BLOCK * BLOCK - asked.computed
                require(asked.answer == wanted, f"{asked.answer} tokens are promised in place of {wanted}", "P9")

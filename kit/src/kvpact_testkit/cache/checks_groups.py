"""Checks of a cache on models with KV cache groups: windows, states, draft layers, blocks of several sizes.

Part of `CacheConformance`. A cache that knows one group is not observable here.
"""

from __future__ import annotations

from kvpact.contract import SaveJob
from kvpact.ranges import RangeSet
from kvpact_testkit.cache.engine_harness import prompt
from kvpact_testkit.cache.factory import CacheSuite, kept_in_every_mode, promised, require_used
from kvpact_testkit.cache.harness import CacheHarness
from kvpact_testkit.engine import GroupKind, JobBehavior, KVCacheGroup
from kvpact_testkit.engine.simulated_worker import Job
from kvpact_testkit.results import observable_if, require

DOCUMENT = prompt(6)
LONGER = prompt(9)

FULL, WINDOW = KVCacheGroup(GroupKind.FULL, 4), KVCacheGroup(GroupKind.WINDOW, 4, 10)
STATE = KVCacheGroup(GroupKind.STATE, 8)
DRAFT = KVCacheGroup(GroupKind.FULL, 4, drops_last=True)
OF_ALL_SIZES = (FULL, KVCacheGroup(GroupKind.WINDOW, 8, 10), KVCacheGroup(GroupKind.CHUNK, 2, 16), STATE)


class GroupChecks(CacheSuite):
    """Properties of matches that several KV cache groups must have, each in its way."""

    @kept_in_every_mode("P2", "P4", "P5", stored=DOCUMENT, groups=(FULL, WINDOW), num_slots=32, prefix_caching=False)
    def test_several_kv_cache_groups_are_loaded_together(self, scene: CacheHarness) -> None:
        """Full attention and a sliding window: the blocks of both are saved, promised and loaded, each in its own."""
        self._reuse(scene)

    @kept_in_every_mode("P2", "P4", "P8", stored=DOCUMENT, groups=(FULL, WINDOW, WINDOW), num_slots=48,
                        prefix_caching=False)  # fmt: skip
    def test_groups_of_one_shape_keep_their_own_blocks(self, scene: CacheHarness) -> None:
        """Two windows of the same size: each group's blocks come back into that group."""
        self._reuse(scene)

    @kept_in_every_mode("P2", "P4", stored=DOCUMENT, groups=OF_ALL_SIZES, num_slots=64, prefix_caching=False)
    def test_groups_have_blocks_of_their_own_sizes(self, scene: CacheHarness) -> None:
        """Blocks of 2, 4 and 8 tokens: a match ends where whole blocks of each do."""
        self._reuse(scene)

    @kept_in_every_mode("P2", "P4", stored=DOCUMENT, groups=(WINDOW,), num_slots=32, prefix_caching=False)
    def test_a_model_of_windows_only_is_served(self, scene: CacheHarness) -> None:
        """No group keeps all tokens: the last window is enough."""
        self._reuse(scene)

    @kept_in_every_mode("P2", "P4", stored=DOCUMENT, groups=(STATE,), block_size=8, num_slots=32, prefix_caching=False)
    def test_a_model_of_states_only_is_served(self, scene: CacheHarness) -> None:
        """No group keeps all tokens: one state is enough."""
        self._reuse(scene)

    def _reuse(self, scene: CacheHarness) -> None:
        request, match = promised(scene, "again", DOCUMENT)
        require(
            match.num_tokens == 24, f"of 24 tokens that were stored for every group {match.num_tokens} are promised"
        )
        require_used(scene, request, match.num_tokens)

    @kept_in_every_mode("P2", "P8", groups=(FULL, STATE), num_slots=48, prefix_caching=False)
    def test_a_state_is_served_at_its_own_boundary_only(self, scene: CacheHarness) -> None:
        """All blocks of full attention are there, and states at 8 and 32 tokens: 28 common tokens are a match of 8."""
        scene.serve("first", prompt(2), LONGER)
        request, match = promised(scene, "fork", [*LONGER[:28], *prompt(3, seed=7)])
        require(match.num_tokens <= 8, f"{match.num_tokens} tokens are promised; the last state before them is at 8")
        require_used(scene, request, match.num_tokens)

    @kept_in_every_mode("P2", "P8", faulty="ranks", groups=(WINDOW, STATE), num_slots=48, prefix_caching=False)
    def test_every_group_is_asked_again_about_a_shorter_match(self, scene: CacheHarness) -> None:
        """The window is there at 24 tokens and not at 8, the state at 8 and not at 24: there is no match."""

        def conduct(rank: int, job: Job) -> JobBehavior:
            lost = isinstance(job, SaveJob) and job.group_id == 0
            return JobBehavior(failed_blocks=RangeSet.span(1, 2) if lost else RangeSet())

        scene.conduct = conduct
        scene.serve("first", prompt(2), LONGER)
        scene.conduct = None
        observable_if(scene.promised_tokens("whole", LONGER), "the cache promises nothing of what was stored")
        scene.run(scene.request("fork", [*LONGER[:28], *prompt(3, seed=7)]))

    @kept_in_every_mode("P2", "P8", "H112", faulty="ranks", groups=(FULL, WINDOW), num_slots=48, prefix_caching=False)
    def test_h112_what_is_saved_of_one_group_is_no_match_before_the_chain_is(self, scene: CacheHarness) -> None:
        """The window is saved and the copy of full attention's blocks hangs: nothing is promised. Then all of it is."""

        def conduct(rank: int, job: Job) -> JobBehavior:
            return JobBehavior(copy_after_steps=12 if isinstance(job, SaveJob) and job.group_id == 0 else 0)

        scene.conduct = conduct
        scene.run(scene.request("first", DOCUMENT))
        scene.step(3)
        early = scene.promised_tokens("early", DOCUMENT)
        require(not early, f"{early} tokens are promised while full attention's blocks are being copied")
        scene.settle()
        observable_if(scene.promised_tokens("late", DOCUMENT), "the cache promises nothing of what was stored")

    @kept_in_every_mode("P2", "P8", stored=LONGER, groups=(FULL, DRAFT), num_slots=48, prefix_caching=False)
    def test_a_block_that_depends_on_the_next_token_is_not_the_last_of_a_match(self, scene: CacheHarness) -> None:
        """A draft model's layers: another prompt of the same 24 tokens goes on with another token."""
        request, match = promised(scene, "fork", [*LONGER[:24], *prompt(3, seed=7)])
        require(match.num_tokens < 24, f"{match.num_tokens} tokens are promised, of which the last depends on the next")
        require_used(scene, request, match.num_tokens)

"""Connectors that are broken on purpose, one mistake each, so that the driver has something to find.

All but the naive one are `SimpleConnector` with one method changed; the class says which promise it breaks.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from kvpact_testkit.vllm.simple_connector import Copy, NaiveConnector, Orders, Saved, SimpleConnector

__all__ = ["NaiveConnector"]


class MatchesTheWholePrompt(SimpleConnector):
    """H06: promises the prompt's last token too."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        left = request.num_tokens - num_computed_tokens
        return (left if tokens and left - tokens <= self.block_size else tokens), asynchronous


class DecidesAfterThePromise(SimpleConnector):
    """H05: finds matches of less than three blocks not worth it, once they are committed."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens >= 3 * self.block_size:
            super().update_state_after_alloc(request, blocks, num_external_tokens)


class KeepsItsFirstPlan(SimpleConnector):
    """H03: loads from where the engine was when it asked first."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        first = self.asked.get(request.request_id, num_computed_tokens)
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.asked[request.request_id] = first
        return answer


class IgnoresSmallerCommits(SimpleConnector):
    """H04: loads all that it promised, whatever the engine takes."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, asynchronous = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self.promised = {request.request_id: tokens or 0}
        return tokens, asynchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, self.promised.pop(request.request_id, 0))


class IgnoresSkipReading(SimpleConnector):
    """H04: offers a match to requests that must compute their prompt, and loads it although nothing is taken."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        request.skip_reading_prefix_cache = False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class IgnoresTenants(SimpleConnector):
    """H24: leaves the salt out of the key."""

    def keys(self, request: Any) -> Iterator[bytes]:
        chain = str(self.generation).encode()
        for start in range(0, len(request.all_token_ids) - self.block_size + 1, self.block_size):
            tokens = list(request.all_token_ids[start : start + self.block_size])
            chain = blake2b(chain + repr(tokens).encode(), digest_size=16).digest()
            yield chain


class IgnoresThePrefix(SimpleConnector):
    """H20: a key stands for the block's own tokens only."""

    def keys(self, request: Any) -> Iterator[bytes]:
        for start in range(0, len(request.all_token_ids) - self.block_size + 1, self.block_size):
            tokens = list(request.all_token_ids[start : start + self.block_size])
            yield blake2b(repr((self.generation, request.cache_salt, tokens)).encode(), digest_size=16).digest()


class TrustsTheFirstRank(SimpleConnector):
    """H40: takes a block for saved when one rank has it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.ranks = 1

    def start_load_kv(self, /, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        orders.loads = [load for load in orders.loads if load.key in self.blocks]
        super().start_load_kv(forward_context)


class SavesWhatIsNotComputed(SimpleConnector):
    """H29: saves the whole prompt with its first chunk."""

    def completed(self, request: Any, computed: int) -> list[Copy]:
        (block_ids,) = self.tables.get_block_ids(request.request_id)
        return super().completed(request, min(request.num_tokens, len(block_ids) * self.block_size))


class ServesOldWeights(SimpleConnector):
    """H32: does not care for a reset."""

    def reset_cache(self) -> bool | None:
        return True


class ForgetsRequestsThatEnd(SimpleConnector):
    """H44: drops what a request saved in the step in which it ended."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.mine: set[bytes] = set()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.mine |= set(self.keys(request))
        return super().request_finished(request, block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        assert isinstance(meta, Saved)
        meta.ranks = {key: ranks for key, ranks in meta.ranks.items() if key not in self.mine}
        super().update_connector_output(connector_output)


class ReportsTwice(SimpleConnector):
    """H08: reports each receive in two steps."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        _, loaded = super().get_finished(finished_req_ids)
        again: set[str] = getattr(self, "again", set())
        self.again = loaded or set()
        return None, ((loaded or set()) | again) or None


class NeverReports(SimpleConnector):
    """H10: says nothing when a load ends."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None


class AsksForMoreTime(SimpleConnector):
    """H10: answers "ask again later" for ever, once there is a match."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (None if tokens else 0), False


class ReportsEarly(SimpleConnector):
    """H29: reports a load when it is ordered, and copies in the next step."""

    def start_load_kv(self, /, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        late, self.late = getattr(self, "late", []), orders.loads
        self.just_loaded |= {load.request_id for load in orders.loads}
        for load in late:
            for tensor, content in zip(self.layers.values(), self.blocks[load.key], strict=True):
                tensor[load.block_id] = content


class FailsForEver(SimpleConnector):
    """H09: every load fails, and is promised again."""

    def start_load_kv(self, /, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        self.failed = {load.block_id for load in orders.loads}
        self.just_loaded |= {load.request_id for load in orders.loads}

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed: set[int] = getattr(self, "failed", set())
        self.failed = set()
        return failed


class LosesOnce(SimpleConnector):
    """Right, but of its first load one block does not arrive, which it says; from then on it has nothing (H48)."""

    lost: set[int] | None = None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (0, False) if request.request_id.startswith("after") else (tokens, later)

    def start_load_kv(self, /, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        if orders.loads and self.lost is None:
            self.lost = {orders.loads[2].block_id}
            for tensor in self.layers.values():
                tensor[orders.loads[2].block_id] = 77

    def get_block_ids_with_load_errors(self) -> set[int]:
        said, self.lost = self.lost or set(), set() if self.lost is not None else None
        return said


class Raises(SimpleConnector):
    """H13: does not expect a request to end before it was looked up."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        del self.asked[request.request_id]
        return super().request_finished(request, block_ids)


class HoldsBlocks(SimpleConnector):
    """H07: protects the blocks of each request and forgets to let go of them."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            (block_ids,) = blocks.get_block_ids()
            pool = self.tables.block_pool
            pool.touch([pool.blocks[block_id] for block_id in block_ids])


class NeverRests(SimpleConnector):
    """P11: always has work, so that an idle engine never sleeps."""

    def has_pending_push_work(self) -> bool:
        return True


class DamagesBlocks(SimpleConnector):
    """H22: serves a block whose last byte was flipped."""

    def wait_for_save(self) -> None:
        known = set(self.blocks)
        super().wait_for_save()
        for key in self.blocks.keys() - known:
            self.blocks[key][-1].view(-1)[-1] += 1

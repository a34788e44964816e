"""Checks of a queue in which many requests wait for what the cache holds: nobody is passed over for the others.

Part of `CacheConformance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpact.identity.keys import RequestIdentity
from kvpact_testkit.cache.engine_harness import prompt
from kvpact_testkit.cache.factory import CacheSuite, kept_in_every_mode
from kvpact_testkit.cache.harness import CacheHarness
from kvpact_testkit.engine import Request
from kvpact_testkit.results import observable_if, require

STORED = [prompt(3, seed=seed) for seed in range(3)]
"""Prompts that fit into the cache's memory together."""

CROWD = 24
"""Requests that wait at once."""

FEW = 4
"""Requests that the engine runs at once."""


class QueueChecks(CacheSuite):
    """The engine asks about the head of its queue first, about all that wait in each step, and runs a few."""

    @kept_in_every_mode("P11", prefix_caching=False, max_running=FEW)
    def test_p11_the_head_of_the_queue_is_not_passed_over_for_those_behind_it(self, scene: CacheHarness) -> None:
        """All requests come at once and all have a match: the first of them ends among the first half."""
        scene.serve("first", *STORED)
        observable_if(scene.promised_tokens("seen", STORED[0]), "the cache promises nothing of a stored prompt")
        crowd = [scene.request(f"r-{number}", STORED[number % len(STORED)]) for number in range(CROWD)]
        place = ended(scene, crowd).index(crowd[0])
        require(place < CROWD // 2, f"the request that came first was number {place + 1} of {CROWD} to end")

    @kept_in_every_mode("P12", prefix_caching=False, max_running=FEW)
    def test_p12_requests_that_load_or_wait_do_not_keep_out_what_others_save(self, scene: CacheHarness) -> None:
        """A prompt that is new is computed amid a crowd that loads: it is stored like one that is computed alone."""
        alone, amid = prompt(2, seed=50), prompt(2, seed=51)
        scene.serve("first", *STORED)
        scene.serve("alone", alone)
        observable_if(scene.promised_tokens("seen", alone), "the cache promises nothing of a prompt that was computed")
        crowd = [scene.request(f"r-{number}", STORED[number % len(STORED)]) for number in range(CROWD)]
        crowd[2:2] = [scene.request("new", amid)]
        scene.run(*crowd)
        scene.settle()
        require(scene.promised_tokens("again", amid), "what was computed while others loaded or waited is not stored")

    @kept_in_every_mode("P14", prefix_caching=False, max_running=FEW)
    def test_p14_one_tenants_request_is_not_passed_over_for_anothers(self, scene: CacheHarness) -> None:
        """A request of one tenant comes third, all others are another's: it ends among the first half."""
        own: dict[str, Any] = {"identity": RequestIdentity(salt="one tenant")}
        scene.serve("first", *STORED[:2])
        scene.serve("own", STORED[2], **own)
        crowd = [scene.request(f"r-{number}", STORED[number % 2]) for number in range(2)]
        crowd.append(scene.request("own", STORED[2], **own))
        crowd += [scene.request(f"r-{number}", STORED[number % 2]) for number in range(2, CROWD)]
        place = ended(scene, crowd).index(crowd[2])
        require(place < CROWD // 2, f"a tenant's only request, which came third, was number {place + 1} to end")


def ended(scene: CacheHarness, requests: Sequence[Request]) -> list[Request]:
    """Step until all have ended; returns them in the order in which they did."""
    order: list[Request] = []
    for _ in range(scene.max_steps):
        order += [request for request in requests if request.has_ended and request not in order]
        if len(order) == len(requests):
            break
        scene.step()
    scene.run(*requests)
    return order + [request for request in requests if request not in order]

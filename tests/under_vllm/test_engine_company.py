"""kvpact in company: what it stores and serves again on real engines that do everything else that vLLM can do.

docs/compatibility.md has a row for each. What an engine does and sees stands in `company_scenes`, what it must be here.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from company_answers import Thrice

from scene_host import SceneHost

pytestmark = [pytest.mark.engine, pytest.mark.proof, pytest.mark.timeout(600)]

BLOCKS = 5
"""Of every prompt."""

BEFORE = 2
"""Blocks before an image or a row that differs."""

NOTHING = dict.fromkeys(("leases", "loads", "saves", "protected blocks", "blocks", "errors"), 0)
"""What an engine holds when its last request has ended."""


@dataclass
class Company:
    """The process that runs the scenes, and what they need."""

    host: SceneHost
    model: Path
    folder: Path

    def play(self, scene: str, *arguments: Any) -> Any:
        """What the scene saw."""
        return self.host.run(f"company_scenes:{scene}", *arguments)

    def make(self, what: str, *arguments: Any) -> Path:
        """A model or an adapter."""
        made: Path = self.host.run(f"company_models:make_{what}", *arguments)
        return made


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SceneHost]:
    with SceneHost(tmp_path_factory.mktemp("company") / "log", ("company_models", "company_scenes")) as host:
        yield host


@pytest.fixture
def company(host: SceneHost, tiny_model: Path, tmp_path: Path) -> Company:
    return Company(host, tiny_model, tmp_path)


def assert_served(seen: Thrice, found: int = 0) -> None:
    """`found` blocks at first, then all, which kvpact counts; every answer is right."""
    assert seen.blocks == (found, BLOCKS, BLOCKS)
    assert seen.loaded_blocks == BLOCKS
    assert seen.is_right
    assert seen.is_as_computed


def assert_apart(*seen: Thrice) -> None:
    """No two have one answer: else it would tell nothing that nothing was mixed up."""
    answers = [one.loaded.parts for one in seen]
    assert all(answers.count(answer) == 1 for answer in answers)


# What a request brings


def test_h24_adapters_of_one_name_are_their_content_also_after_a_restart(company: Company) -> None:
    """Then they come from other paths under other numbers, and at one of the old paths lie other weights."""
    one, two, three = (company.make("adapter", company.folder / f"{seed}" / "style", seed) for seed in (1, 2, 3))
    first, held = company.play("adapters", company.model, company.folder, [one, two])
    assert held == NOTHING
    for seen in first:
        assert_served(seen)
    elsewhere = [Path(shutil.copytree(path, company.folder / f"other {path.parent.name}")) for path in (two, one)]
    shutil.copytree(three, one, dirs_exist_ok=True)
    again, held = company.play("adapters", company.model, company.folder, [*elsewhere, one])
    assert held == NOTHING
    for seen, found in zip(again, [BLOCKS, BLOCKS, BLOCKS, 0], strict=True):
        assert_served(seen, found)
    assert_apart(*again)
    assert [seen.loaded.tokens for seen in again[:3]] == [first[index].loaded.tokens for index in (0, 2, 1)]


def test_h24_images_are_their_content_also_after_a_restart(company: Company) -> None:
    """A model that sees: the blocks before an image are everybody's, those with it and behind it are its own."""
    model = company.make("seeing_model", company.folder / "model", company.model)
    first, held = company.play("images", model, company.folder, [1, 2])
    assert held == NOTHING
    for seen, found in zip(first, [0, BEFORE], strict=True):
        assert_served(seen, found)
    again, held = company.play("images", model, company.folder, [3, 2])
    assert held == NOTHING
    for seen, found in zip(again, [BEFORE, BLOCKS], strict=True):
        assert_served(seen, found)
    assert_apart(*first, again[0])
    assert again[1].loaded.tokens == first[1].loaded.tokens


def test_h24_prompt_embeddings_are_their_content_also_after_a_restart(company: Company) -> None:
    """One row of 657 differs."""
    first, held = company.play("embeddings", company.model, company.folder, [0.0, 8.0])
    assert held == NOTHING
    for seen, found in zip(first, [0, BEFORE], strict=True):
        assert_served(seen, found)
    again, held = company.play("embeddings", company.model, company.folder, [-8.0, 8.0])
    assert held == NOTHING
    for seen, found in zip(again, [BEFORE, BLOCKS], strict=True):
        assert_served(seen, found)
    assert_apart(*first, again[0])


# How it is answered


def test_ngram_speculation_over_loaded_blocks(company: Company) -> None:
    seen, accepted, held = company.play("ngram_speculation", company.model)
    assert_served(seen)
    assert accepted > 0
    assert held == NOTHING


def test_eagle_speculation_loads_the_draft_models_layer_as_well(company: Company) -> None:
    """It is computed after the forward pass. After a restart with another draft model nothing is found.

    The last prompt parts from the first one behind the last block: that block is its own, and found once it was stored.
    """
    drafts = [company.make("draft", company.folder / f"draft {seed}", company.model, seed) for seed in (1, 2)]
    for draft, found in ((drafts[0], 0), (drafts[0], BLOCKS), (drafts[1], 0)):
        seen, answers, (before, after), (loaded, computed), held = company.play(
            "eagle_speculation", company.model, draft, company.folder
        )
        assert_served(seen, found)
        assert [answer.cached_blocks for answer in answers] == [found, BLOCKS]
        assert answers[0].tokens == answers[1].tokens
        assert len(before) == 5, "four layers and the draft model's"
        assert before == after
        assert [loaded.cached_blocks, computed.cached_blocks] == [BLOCKS if found else BLOCKS - 1, 0]
        assert loaded.tokens == computed.tokens
        assert held == NOTHING


def test_structured_outputs_over_loaded_blocks(company: Company) -> None:
    seen, (by_rule, by_choice), held = company.play("structured_outputs", company.model)
    for one in seen:
        assert_served(one)
    assert set(by_rule) <= {"a", "b"}
    assert len(by_rule) == 12
    assert by_choice in ("first", "second")
    assert held == NOTHING


def test_several_answers_to_one_prompt_over_loaded_blocks(company: Company) -> None:
    seen, held = company.play("several_answers", company.model)
    assert seen.blocks[1:] == (BLOCKS, BLOCKS)
    assert seen.loaded_blocks >= BLOCKS
    assert seen.is_right
    assert len({tokens for tokens, _ in seen.loaded.parts}) == 3
    assert held == NOTHING


# How it is scheduled


def test_a_loaded_request_is_preempted_by_an_urgent_one_and_loads_again(company: Company) -> None:
    alone, together, order, preemptions, held = company.play("priorities", company.model)
    assert order == [1, 0]
    assert preemptions > 0
    assert [one.cached_blocks for one in together] == [BLOCKS, BLOCKS]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert held == NOTHING


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        pytest.param({"async_scheduling": True}, {"scheduler": "AsyncScheduler"}, id="async scheduling"),
        pytest.param(
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048, "max_model_len": 2048},
            {"chunked prefill": False},
            id="chunked prefill off",
        ),
        pytest.param({"enable_prefix_caching": False}, {"prefix caching": False}, id="prefix caching off"),
    ],
)
def test_what_is_loaded_is_right_with(arguments: dict[str, Any], made: dict[str, Any], company: Company) -> None:
    seen, settings, held = company.play("scheduled", company.model, arguments)
    assert settings.items() >= made.items()
    assert_served(seen)
    assert held == NOTHING


def test_another_connector_stores_and_loads_beside_it(company: Company) -> None:
    """After a restart kvpact, in memory only, has nothing: the other one loads, and what it loaded is stored."""
    for found in (0, BLOCKS):
        seen, held = company.play("beside_another_connector", company.model, company.folder)
        assert_served(seen, found)
        assert held == NOTHING


def test_a_session_is_loaded_and_its_text_is_found_by_others(company: Company) -> None:
    """A session looks for what is stored when it begins; its later parts are computed, and stored."""
    (computed, local, loaded), at_once, counts = company.play("streaming", company.model, company.folder)
    assert [part.cached_blocks for part in computed] == [0, 0, 0]
    for again in (local, loaded):
        assert [part.cached_blocks for part in again] == [3, 3, 3]
    assert [part.parts for part in loaded] == [part.parts for part in local]
    assert [part.tokens for part in loaded] == [part.tokens for part in computed]
    assert at_once.cached_blocks == 9
    assert at_once.tokens == computed[2].tokens
    assert counts["loaded_tokens"] == (3 + 9) * 128
    assert counts["leases_held"] == counts["hook_errors"] == 0

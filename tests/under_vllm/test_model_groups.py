"""The frozen KV cache groups of real models are those that the installed vLLM and transformers make."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

from hybrid_models import FOLDER, model_names
from vllm_groups import MODELS, frozen


def test_every_model_is_frozen_and_no_other() -> None:
    """A model that was left out of either would be one that nothing checks."""
    assert set(MODELS) == set(model_names())


@pytest.mark.parametrize("name", MODELS)
def test_frozen_groups_are_those_of_the_installed_releases(name: str) -> None:
    """Frozen with one release of both; with another one there is nothing to compare."""
    kept = json.loads((FOLDER / f"{name}.json").read_text())
    if kept["transformers"] != version("transformers"):
        pytest.skip(f"frozen with transformers {kept['transformers']}")
    made = json.loads(json.dumps(frozen(name)))
    if kept["vllm"] != made["vllm"]:
        pytest.skip(f"frozen with vLLM {kept['vllm']}")
    assert made == kept

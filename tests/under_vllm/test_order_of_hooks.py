"""In which order each release calls a worker's hooks around a forward pass, as its source says: what copies rely on."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no engine is installed; `make setup` installs one")

import vllm

from kvpact_testkit.vllm.releases import RELEASES, fetch_release, installed_release

HERE = Path(vllm.__file__).parent


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def part(release: str, path: str, name: str) -> ast.AST:
    """The first function or class of this name; the rest of a large file is not parsed."""
    folder = HERE if release == installed_release() else fetch_release(release) / "vllm"
    text = (folder / path).read_text()
    found = re.search(rf"^( *)(?:def|class) {name}\b.*?(?=^\1(?:def|class|@)|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"vLLM {release} has no {name} in {path}"
    return ast.parse(textwrap.dedent(found.group()))


def function(tree: ast.AST, name: str) -> ast.FunctionDef:
    return next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)


def in_order(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes, as they stand in the text."""
    for child in ast.iter_child_nodes(node):
        yield child
        yield from in_order(child)


def calls(node: ast.AST) -> list[str]:
    """The methods and functions that are called, and "yield", as they stand in the text."""
    found = []
    for one in in_order(node):
        if isinstance(one, ast.Call):
            found.append(one.func.attr if isinstance(one.func, ast.Attribute) else ast.unparse(one.func))
        elif isinstance(one, ast.Yield):
            found.append("yield")
    return found


def those(names: list[str], *wanted: str) -> list[str]:
    return [name for name in names if name in wanted]


def test_the_first_runner_starts_loads_after_the_forward_pass_unless_the_step_waits_for_one(release: str) -> None:
    step = part(release, "v1/worker/kv_connector_model_runner_mixin.py", "_get_kv_connector_output")
    order = those(calls(step), "bind_connector_metadata", "start_load_kv", "yield", "wait_for_save")
    assert order == ["bind_connector_metadata", "start_load_kv", "yield", "start_load_kv", "wait_for_save"]
    assert "start_after_forward = not scheduler_output.has_sync_kv_loads" in ast.unparse(step)


def test_with_speculation_the_first_runner_asks_for_results_before_the_step_is_saved(release: str) -> None:
    """The draft model runs in between: `CacheWorker.poll` waits for its layer's loads."""
    step = part(release, "v1/worker/kv_connector_model_runner_mixin.py", "_get_kv_connector_output")
    assert re.search(r"not defer_finalize\)?:\s+kv_connector.wait_for_save\(\)", ast.unparse(step))
    later = part(release, "v1/worker/kv_connector_model_runner_mixin.py", "finalize_kv_connector")
    assert those(calls(later), "wait_for_save", "get_transfer_results", "get_finished") == ["wait_for_save"]


def test_the_second_runner_starts_loads_after_the_forward_pass_unless_the_step_waits_for_one(release: str) -> None:
    active = part(release, "v1/worker/gpu/kv_connector.py", "ActiveKVConnector")
    before, after = function(active, "pre_forward"), function(active, "post_forward")
    assert "if scheduler_output.has_sync_kv_loads:\n        self._start_load_kv()" in ast.unparse(before)
    assert those(calls(after), "_start_load_kv", "wait_for_save") == ["_start_load_kv", "wait_for_save"]


def test_the_first_runner_shows_before_the_forward_pass_that_it_replays_a_full_graph(release: str) -> None:
    execute = part(release, "v1/worker/gpu_model_runner.py", "execute_model")
    (forward,) = [
        node
        for node in ast.walk(execute)
        if isinstance(node, ast.With) and "maybe_get_kv_connector_output" in calls(node.items[-1])
    ]
    contexts = [item.context_expr for item in forward.items]
    where = [number for number, one in enumerate(contexts) if ast.unparse(one).startswith("set_forward_context(")]
    assert where
    assert where[0] < len(contexts) - 1, "the context is there when the connector's hooks are called"
    context = contexts[where[0]]
    assert isinstance(context, ast.Call)
    assert "cudagraph_runtime_mode" in [keyword.arg for keyword in context.keywords]


def test_the_second_runner_has_no_context_when_it_replays_a_full_graph(release: str) -> None:
    """So that `replays_full_graph` sees no metadata of the layers, and all loads are ordered before the replay."""
    execute = part(release, "v1/worker/gpu/model_runner.py", "execute_model")
    (choice,) = [
        node
        for node in ast.walk(execute)
        if isinstance(node, ast.If) and "run_fullgraph" in [name for one in node.body for name in calls(one)]
    ]
    assert ast.unparse(choice.test) == "batch_desc.cg_mode == CUDAGraphMode.FULL"
    full = [name for one in choice.body for name in calls(one)]
    assert those(full, "set_forward_context", "pre_forward", "run_fullgraph") == ["pre_forward", "run_fullgraph"]
    (context,) = [node for one in choice.orelse for node in ast.walk(one) if isinstance(node, ast.With)][:1]
    assert "set_forward_context" in calls(context.items[0])
    assert those([name for one in context.body for name in calls(one)], "pre_forward") == ["pre_forward"]
    hooks = part(release, "v1/worker/gpu/kv_connector.py", "ActiveKVConnector")
    assert "with set_forward_context(None, self.vllm_config):" in ast.unparse(hooks)


def test_a_layer_waits_for_its_load_unless_a_graph_is_captured(release: str) -> None:
    """While a graph is captured no step's metadata is bound."""
    text = ast.unparse(part(release, "model_executor/layers/attention/kv_transfer_utils.py", "maybe_transfer_kv_layer"))
    skipped = text.index("if attn_metadata is None or not connector.has_connector_metadata():")
    assert skipped < text.index("connector.wait_for_layer_load(layer_name)") < text.index("connector.save_kv_layer(")


def test_kv_memory_goes_after_the_connector_was_told_if_it_is_told_at_all(release: str) -> None:
    path = "v1/worker/gpu_worker.py"
    told = RELEASES[release].tells_of_sleep
    sleep, wake = calls(part(release, path, "sleep")), calls(part(release, path, "wake_up"))
    assert those(sleep, "unregister_kv_caches", "suspend") == ["unregister_kv_caches", "suspend"][not told :]
    assert those(wake, "resume", "restore_kv_caches") == ["resume", "restore_kv_caches"][: 1 + told]

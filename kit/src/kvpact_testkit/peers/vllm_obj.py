"""vLLM's secondary tier `obj` behind `Tier`, over an S3 server of moto's in this process. For vLLM 0.32 and nixl 1.5.

Owns the server, and the damage to its objects. NIXL's telemetry is switched on: without it the tier's
`get_finished_jobs` raises when a transfer ends.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

os.environ.setdefault("NIXL_TELEMETRY_ENABLE", "y")  # read when NIXL's agents are made
os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")

import boto3
from moto.server import ThreadedMotoServer

from kvpact.identity.keys import BlockKey
from kvpact.tiers.base import Tier
from kvpact_testkit.peers.tier import PeerSuite, damaged
from kvpact_testkit.peers.vllm_tiers import VllmTier
from kvpact_testkit.tier.conformance import Damage, StoreContext

BUCKET = "kvpact-peers"
KEYS = {"access_key": "kvpact", "secret_key": "kvpact"}
"""What the server is told; it takes anything."""


@cache
def server() -> tuple[str, Any]:
    """Host and port of the server, which is started when it is first asked for, and a client of it."""
    started = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    endpoint = "{}:{}".format(*started.get_host_and_port())
    client = boto3.client(
        "s3",
        endpoint_url=f"http://{endpoint}",
        region_name="us-east-1",
        aws_access_key_id=KEYS["access_key"],
        aws_secret_access_key=KEYS["secret_key"],
    )
    client.create_bucket(Bucket=BUCKET)
    return endpoint, client


class VllmObjSuite(PeerSuite):
    """The tier with its defaults, and a prefix for each place."""

    several_writers = False  # the server is a thread of this process, and too slow for three

    # A history takes minutes over this server.
    test_any_history_agrees_with_a_plain_model = None  # type: ignore[assignment]

    def open_tier(self, place: StoreContext) -> Tier:
        store = {"bucket": BUCKET, "endpoint_override": server()[0], **KEYS}
        return VllmTier({"type": "obj", "store_config": store, "prefix": place.name}, place, self.faults)

    def damage(self, place: StoreContext, key: BlockKey, how: Damage) -> bool:
        client = server()[1]
        names = [each["Key"] for each in client.list_objects_v2(Bucket=BUCKET, Prefix=place.name)["Contents"]]
        [name] = [name for name in names if key.hex() in name]
        other = next((each for each in names if each != name), name)
        if how is Damage.GONE:
            client.delete_object(Bucket=BUCKET, Key=name)
            return True
        records = [client.get_object(Bucket=BUCKET, Key=each)["Body"].read() for each in (name, other)]
        raw = damaged(records[0], records[1], how)
        if raw is not None:
            client.put_object(Bucket=BUCKET, Key=name, Body=raw)
        return raw is not None

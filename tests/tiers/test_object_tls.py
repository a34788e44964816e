"""An S3 server whose certificate is signed by an authority of its own, which `ca_file` names as it does for Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from chain_calls import put_document, served_of_document
from kvpact.errors import TierError
from kvpact.identity.keys import Namespace
from kvpact.tiers.objects.store import open_objects
from kvpact.tiers.registry import TierContext, open_tier
from kvpact.tiers.shared.store import StoreError
from kvpact.tiers.urls import parse_tier_url
from kvpact_testkit.sample_blocks import document
from servers.object_server import CREDENTIALS, object_server
from servers.redis_server import Authority

PLACE = TierContext(Namespace({"model": "kvpact-tests", "block_size": "16"}), 4096)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def endpoint(authority: Authority) -> Iterator[str]:
    certificates = authority.certificates, *authority.own_certificate
    with object_server(certificates) as traffic, pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        for name, text in CREDENTIALS.items():
            patch.setenv(name, text)
        yield traffic.server


def test_s3_is_reached_with_the_certificates_of_its_own_authority(endpoint: str, authority: Authority) -> None:
    url = parse_tier_url(f"s3://bucket/x?endpoint={endpoint}&ca_file={authority.certificates}&timeout=20s")
    with closing(open_tier(url, PLACE)) as tier:
        wanted = document("over TLS", 3)
        assert put_document(tier, wanted, 4096) == served_of_document(tier, wanted, 4096) == 3


def test_a_certificate_that_nobody_trusts_is_named_as_the_cause_and_ca_file_as_the_way_out(endpoint: str) -> None:
    with closing(open_tier(parse_tier_url(f"s3://bucket/x?endpoint={endpoint}&timeout=2s"), PLACE)) as tier:
        assert tier.lookup([bytes(32)]) == [False]
        said = tier.health().reason
        assert "the certificate of its server is not accepted (UnknownIssuer)" in said
        assert '"ca_file"' in said


def test_a_server_that_speaks_no_tls_is_said_to_speak_none() -> None:
    with object_server() as traffic, pytest.MonkeyPatch.context() as patch:
        for name, text in CREDENTIALS.items():
            patch.setenv(name, text)
        endpoint = traffic.server.replace("http://", "https://")
        with (
            closing(open_objects(parse_tier_url(f"s3://bucket/x?endpoint={endpoint}&timeout=1s"))) as store,
            pytest.raises(StoreError, match="the server does not speak TLS; write http in its endpoint"),
        ):
            store.exists([f"{'0' * 16}/{'0' * 64}"])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, r"there is no file .*/ca\.pem; ca_file names the certificates"),
        ("no certificate", "holds no certificates in PEM form"),
        ("-----BEGIN CERTIFICATE-----\nbm9uZQ==\n-----END CERTIFICATE-----\n", "obstore does not take"),
        ("-----BEGIN CERTIFICATE-----\n", "obstore does not take"),
    ],
)
def test_a_ca_file_that_is_none_is_refused_with_its_name(
    endpoint: str, tmp_path: Path, content: str | None, why: str
) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TierError, match=why) as refused:
        open_objects(parse_tier_url(f"s3://bucket/x?endpoint={endpoint}&ca_file={path}"))
    assert "ca_file" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_ca_file_without_tls_is_refused(authority: Authority) -> None:
    url = f"s3://bucket/x?endpoint=http://127.0.0.1:1&allow_http=true&ca_file={authority.certificates}"
    with pytest.raises(ValueError, match="ca_file is for TLS; write https in its endpoint"):
        parse_tier_url(url)
    with pytest.raises(ValueError, match='unknown option "ca_file"'):
        parse_tier_url(f"file:///mnt/x?ca_file={authority.certificates}")

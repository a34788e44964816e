"""Records in object stores."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from kvpact.own_files import group_number
from kvpact.tiers.backend import (
    STORE_OPTIONS,
    Backend,
    UrlRules,
    address_in,
    some_file,
    some_text,
    whole_number,
    yes_or_no,
)

_ENDPOINT: Final = re.compile(r"https?://([A-Za-z0-9.:\[\]_-]+)(/[A-Za-z0-9._~/-]*)?")
"""An endpoint must hold no credentials."""


def endpoint(text: str) -> str:
    """The address of a server; obstore panics on some texts that are none."""
    found = _ENDPOINT.fullmatch(text)
    with suppress(ValueError):
        if found is not None and address_in(found[1], 0):
            return text
    raise ValueError('it is no address such as "https://objects.example:9000"; credentials stand in the environment')


def _encrypted(options: Mapping[str, str]) -> None:
    if options.get("endpoint", "").startswith("http://"):
        if options.get("allow_http") != "true":
            raise ValueError('its endpoint is not encrypted; use https, or add "allow_http=true"')
        if "ca_file" in options:
            raise ValueError("ca_file is for TLS; write https in its endpoint, or leave ca_file out")


_OPTIONS = {
    **STORE_OPTIONS, "endpoint": endpoint, "region": some_text, "allow_http": yes_or_no, "concurrency": whole_number,
    "anonymous": yes_or_no,
}  # fmt: skip

_OVER_TLS = {**_OPTIONS, "ca_file": some_file}

BACKEND = Backend(
    "object",
    "kvpact.tiers.objects.store:open_objects",
    {
        "s3": UrlRules("s3://bucket/prefix?region=eu-central-1", _OVER_TLS, together=_encrypted),
        "gs": UrlRules("gs://bucket/prefix", _OVER_TLS, together=_encrypted),
        "az": UrlRules("az://container/prefix", _OVER_TLS, together=_encrypted),
        "file": UrlRules("file:///mnt/objects/kvpact", {**_OPTIONS, "group": group_number}, together=_encrypted),
    },
)

"""One bucket, container or directory through the package obstore: requests for objects and parts of them.

Owns the options of the client, the limits on time and parallel requests, and the meaning of errors; a message never
repeats text of a server or the client, which may hold credentials. Knows nothing of records.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

from kvpact.errors import NoSuchTier, TierError
from kvpact.own_files import Access, NotOurs, OwnFolder
from kvpact.tiers.daemon_pool import DaemonPool
from kvpact.tiers.free_space import FULL
from kvpact.tiers.objects.files import ObjectFiles
from kvpact.tiers.objects.packs import PackVersion
from kvpact.tiers.shared.store import StoreError, StoreFull
from kvpact.tiers.urls import TierURL

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS: Final = 2.0
CONCURRENCY: Final = 16

RETRIES: Final = 10
RETRIED_PART: Final = 0.75
"""The part of a request's time after which no further try begins, so that the last try has time to end."""

FIRST_BACKOFF_SECONDS: Final = 0.05
LONGEST_BACKOFF_SECONDS: Final = 0.5

PAGE_OBJECTS: Final = 1000
"""Objects in one page of a listing; S3 allows no more."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class StoreRefused(StoreError):
    """The store exists and refuses us until its settings or ours are changed."""


class ClientBroken(StoreRefused):
    """The client itself breaks down on our options, and prints that on standard error each time."""


class ObjectChanged(Exception):
    """The object is not of the requested version."""


@dataclass(frozen=True, slots=True)
class ObjectBytes:
    """Bytes of an object, and its version."""

    data: memoryview
    object_bytes: int
    version: PackVersion


class Bucket:
    """Objects by name. A single request ends soon after `timeout`; `each` gives up exactly then."""

    def __init__(
        self, client: Any, place: str, *, timeout: float, concurrency: int, files: ObjectFiles | None = None
    ) -> None:
        """`client` is a store of obstore. With `files` its objects are files, and `put` replaces any version."""
        self._api = import_module("obstore")
        self._failures = (import_module("obstore.exceptions").BaseError, OSError)
        self._changed = import_module("obstore.exceptions").PreconditionError
        self._exists = import_module("obstore.exceptions").AlreadyExistsError
        self.client = client
        """The store object of obstore."""
        self.place = place
        self.timeout = timeout
        self.concurrency = concurrency
        self.files = files
        """None in a bucket."""
        self._pool = DaemonPool("kvpact-objects", concurrency)

    def each(self, call: Callable[[Item], Result], items: Sequence[Item], requests: int = 1) -> list[Result]:
        """`call` for every item, in parallel, each with the time of `requests` requests. Raises StoreError after that.

        A call that has not ended then goes on for a while, and its result is dropped.
        """
        futures = [self._pool.submit(partial(call, item)) for item in items]
        rounds = requests * math.ceil(len(items) / self.concurrency)
        _, late = wait(futures, self.timeout * rounds)
        for future in late:
            future.cancel()
        if late:
            raise StoreError(f"{self.place} has not answered within {self.timeout:g} s")
        try:
            return [future.result() for future in futures]
        except BaseException as error:
            if type(error).__module__ != "pyo3_runtime":
                raise
            # A panic in the client's Rust code is no Exception and would end the engine.
            raise ClientBroken(f"{self.place}: obstore broke down on this request; check the tier's options") from None

    def get(
        self, name: str, start: int = 0, end: int | None = None, version: PackVersion | None = None
    ) -> ObjectBytes | None:
        """Bytes [start, end) of an object, by default all, fewer if it ends before; None if there is no such object.

        Raises ObjectChanged if it is there in another `version`.
        """
        if self.files is not None and self.files.path_of(name).is_fifo():  # planted: its opening would never end
            return None
        options: dict[str, object] = {}
        if start or end is not None:
            options["range"] = {"offset": start} if end is None else (start, end)
        if version and "e_tag" in version:
            options["if_match"] = version["e_tag"]
        try:
            result = self._api.get(self.client, name, options=options)
            meta = result.meta
            return ObjectBytes(memoryview(result.bytes()), meta["size"], _version(meta))
        except self._changed:
            raise ObjectChanged(name) from None
        except self._failures as error:
            if re.search(r"InvalidRange|[Rr]ange was invalid", str(error)):  # the object ends before `start`
                return ObjectBytes(memoryview(b""), 0, {})
            if self._gone(error):
                return None
            raise self._translated(error) from None

    def put(self, name: str, data: bytes, replaced: PackVersion | None = None) -> PackVersion | None:
        """Store a new object, or replace the version `replaced`; None if another one is there."""
        mode: str | PackVersion = "create"
        if replaced is not None:
            mode = replaced if replaced and self.files is None else "overwrite"
        try:
            if self.files is not None:
                self.files.prepare(name)
                if mode == "create" and not self.files.has_links:
                    if self.files.path_of(name).exists():
                        return None
                    mode = "overwrite"  # of two writers at once the last one wins
            result = self._api.put(self.client, name, data, mode=mode, use_multipart=False)
            if self.files is not None:
                self.files.settle(name)
            return _version(result)
        except (self._changed, self._exists):
            return None
        except self._failures as error:
            if replaced is not None and self._gone(error):
                return None
            raise self._translated(error) from None

    def delete(self, name: str) -> None:
        """Remove an object if it exists."""
        try:
            self._api.delete(self.client, name)
        except self._failures as error:
            if not self._gone(error):
                raise self._translated(error) from None

    def pages(self, folder: str = "") -> Iterator[list[str]]:
        """The names of all objects in a folder, or in all."""
        listing = self._api.list(self.client, prefix=folder or None, chunk_size=PAGE_OBJECTS)
        return iter(lambda: self.each(self.next_page, [listing])[0], None)

    def next_page(self, listing: Any) -> list[str] | None:
        """The next names of a listing; None at its end."""
        try:
            page = next(listing, None)
            return None if page is None else [entry["path"] for entry in page]
        except self._failures as error:
            if self._gone(error):
                return None
            raise self._translated(error) from None

    def close(self) -> None:
        """Start no more requests. Does not wait for those under way."""
        self._pool.close()

    @staticmethod
    def _gone(error: Exception) -> bool:
        return isinstance(error, FileNotFoundError) and not _NO_BUCKET.search(str(error))

    def _translated(self, error: Exception) -> StoreError:
        """The StoreError for an error of the client; it takes only words from it that cannot be a secret."""
        text = str(error)
        if self.files is not None and (number := re.search(r"(?:os error|Errno) (\d+)", text)):
            kind = StoreFull if int(number[1]) in FULL else StoreError
            return kind(f"{self.place}: {os.strerror(int(number[1]))}")
        status = re.search(r"status code: (\d{3})", text)
        code = re.search(r"<Code>(\w{1,40})</Code>", text)
        answer = f"HTTP {status[1]}{f' ({code[1]})' if code else ''}" if status else type(error).__name__
        if _FULL.search(answer):
            right = "raise its quota, or have a lifecycle rule remove objects"
            return StoreFull(f"{self.place} is full: {answer}; {right}")
        if re.search(r"performing \w+ http://.*builder error", text):
            return StoreRefused(
                f"{self.place}: its endpoint, which the environment names (like AWS_ENDPOINT_URL), is not encrypted; "
                'use https, or add "allow_http=true"'
            )
        if _NO_BUCKET.search(text):
            return StoreRefused(f"{self.place}: there is no such bucket; create it, or mend the tier's URL")
        if _CREDENTIALS.search(text):
            return StoreRefused(
                f'{self.place}: no credentials; set them in the environment, or "anonymous=true" for a public bucket'
            )
        if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError") or answer.startswith("HTTP 40"):
            return StoreRefused(
                f"{self.place} refused: {answer}; the credentials must be valid and may list, get, put and delete"
            )
        if status:
            return StoreError(f"{self.place} answered {answer}")
        if refused := re.search(r"InvalidCertificate\(\s*(\w+)", text):
            right = 'name the file of the certificates that sign it with "ca_file"'
            return StoreError(f"{self.place}: the certificate of its server is not accepted ({refused[1]}); {right}")
        if "InvalidContentType" in text:
            right = 'write http in its endpoint, and "allow_http=true"'
            return StoreError(f"{self.place}: the server does not speak TLS; {right}")
        if re.search(r"TimedOut|kind: Timeout|timed out", text):
            return StoreError(f"{self.place} has not answered within {self.timeout:g} s")
        if re.search(r"kind: (Connect|Request)|error sending request", text):
            return StoreError(f"{self.place} cannot be reached")
        return StoreError(f"{self.place}: the answer is unusable ({answer})")


def _version(meta: Mapping[str, Any]) -> PackVersion:
    return {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}


_NO_BUCKET: Final = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
_FULL: Final = re.compile(r"HTTP 507|Quota(Exceeded|Full)|StorageFull|InsufficientStorage|NoSpace")
"""Answers of servers whose disks, or a bucket's quota, are full."""

_CREDENTIALS: Final = re.compile(
    r"169\.254\.16\d\.\d+|metadata\.google|[Cc]redential provider|MissingAccountKey|login\."
)


def open_bucket(url: TierURL, *, for_tool: bool = False) -> Bucket:
    """The bucket at a URL, after one test request. One that does not answer now may do so later.

    With `for_tool` no directory is created.

    Raises NoSuchTier for options that it cannot have, and without obstore; TierError if the bucket is not there
    or refuses us, which may change.
    """
    place = f"{url.scheme}://{url.host}{url.path}"
    try:
        stores = import_module("obstore.store")
    except ImportError:
        raise NoSuchTier(f"{place} needs the package obstore: pip install 'kvpact[s3]'") from None
    amiss = _variable_amiss(url)
    if amiss:
        raise NoSuchTier(f"{place}: {amiss}")
    timeout = url.seconds("timeout", TIMEOUT_SECONDS)
    folder = _folder(url, for_tool=for_tool) if url.scheme == "file" else None
    try:
        if folder is None:
            store = _client(stores, url, timeout)
        else:
            store = stores.LocalStore(folder.path) if folder.is_there else stores.MemoryStore()
    except TierError:
        raise
    except Exception:  # any error about the options, whose text would repeat them
        raise NoSuchTier(
            f"{place}: obstore does not take these options; check endpoint, region, path and ca_file"
        ) from None
    concurrency = int(url.options.get("concurrency", CONCURRENCY))
    files = ObjectFiles(folder, marks_uses=not for_tool) if folder is not None else None
    bucket = Bucket(store, place, timeout=timeout, concurrency=concurrency, files=files)
    try:
        bucket.each(lambda name: bucket.get(name, 0, 1), [_PROBED])
    except StoreRefused as refused:
        bucket.close()
        raise (NoSuchTier if isinstance(refused, ClientBroken) else TierError)(str(refused)) from None
    except StoreError:
        pass
    return bucket


_OF_S3: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_VARIABLES: Final = {
    "s3": _OF_S3,
    "gs": (
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
}
"""The variables with credentials of which obstore takes an empty one for a value."""


def _variable_amiss(url: TierURL) -> str:
    """A variable with credentials that cannot be right, and what to do; empty if there is none."""
    if url.options.get("anonymous") == "true":
        return ""
    for name in _VARIABLES.get(url.scheme, ()):
        if os.environ.get(name) == "":
            return f"{name} is empty in the environment; set it to its value, or unset it"
    given = [name for name in _OF_S3 if name in os.environ]
    if url.scheme == "s3" and len(given) == 1:
        (other,) = {*_OF_S3} - {*given}
        return f"{given[0]} is set in the environment and {other} is not; set both, or neither"
    return ""


_PROBED: Final = "kvpact-is-not-an-object"


def _folder(url: TierURL, *, for_tool: bool) -> OwnFolder:
    """Our folder for objects that are files; it hides them until their modes are set. Raises TierError."""
    try:
        if for_tool:
            return OwnFolder.look(Path(url.path))
        return OwnFolder.make(Path(url.path), Access.of(url.options.get("group")))
    except NotOurs as error:
        raise TierError(f"file tier: {error}") from None


def _certificates(ca_file: Path) -> bytes:
    """Certificates in PEM form. Raises TierError."""
    try:
        content = ca_file.read_bytes()
    except OSError as error:
        raise TierError(f"ca_file={ca_file}: cannot be read: {error.strerror}") from None
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise TierError(f"ca_file={ca_file}: holds no certificates in PEM form (-----BEGIN CERTIFICATE-----)")
    return content


def _client(stores: Any, url: TierURL, timeout: float) -> Any:
    """obstore's store for a URL. Its own providers find credentials: environment, files, instance metadata."""
    limit = timedelta(seconds=timeout)
    ca_file = url.ca_file()
    trusted = {"root_certificate": _certificates(Path(ca_file))} if ca_file is not None else {}
    common: dict[str, object] = {
        "prefix": url.path.strip("/") or None,
        "client_options": {
            "timeout": limit,
            "connect_timeout": limit,
            "allow_http": url.options.get("allow_http") == "true",
            **trusted,
        },
        "retry_config": {
            "max_retries": RETRIES,
            "retry_timeout": limit * RETRIED_PART,
            "backoff": {
                "init_backoff": timedelta(seconds=FIRST_BACKOFF_SECONDS),
                "max_backoff": timedelta(seconds=LONGEST_BACKOFF_SECONDS),
                "base": 2,
            },
        },
    }
    if url.options.get("anonymous") == "true":
        common["skip_signature"] = True
    if endpoint := url.options.get("endpoint"):
        common["base_url" if url.scheme == "gs" else "endpoint"] = endpoint
    if "region" in url.options and url.scheme == "s3":
        common["region"] = url.options["region"]
    make = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[url.scheme]
    return make(url.host, **common)

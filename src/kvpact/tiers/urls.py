"""Places of tiers, as URLs such as `disk:///var/cache/kvpact?capacity=200GiB`.

Owns the check of a URL against the rules of its kind, so that a mistake is found before anything is opened, and the
rule that no credential is ever shown.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from itertools import chain, count
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from kvpact.errors import TierError
from kvpact.tiers.backend import UrlRules, address_in
from kvpact.tiers.backends import ENTRY_POINTS, MEMORY, SCHEMES, kind_of
from kvpact.units import parse_duration, parse_size

_SECRET_NAMES: Final = "password|secret|token|key|credential"


def redact(url: str) -> str:
    """The URL with user, password and the values of secret options replaced by `***`, fit for a log."""
    shown = re.sub(r"(?s)(?<=//)[^/].*@", "***@", url)  # greedy: a password may hold any character
    shown = re.sub(r"(?i)([?&][^=&]*=)[^&#]*(?:@|%40)", r"\1***@", shown)  # an option may be a URL
    return re.sub(rf"(?i)([?&][^=&]*(?:{_SECRET_NAMES})[^=&]*=)[^&#]*", r"\1***", shown)


def host_and_port(host: str, port: int) -> str:
    """An address as text: "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class TierURL:
    """Where a tier below memory keeps its blocks."""

    scheme: str
    path: str
    """Percent-decoded; absolute for `disk` and `dir`, a bucket's prefix, a database's number."""
    options: Mapping[str, str]
    """Options, percent-decoded and known to the scheme."""
    host: str = field(default="", repr=False)
    """The text between "//" and the path, unchanged; it may hold a credential."""

    @property
    def capacity(self) -> int:
        """Bytes the tier may occupy; 0 where a URL without it was given to be looked at."""
        return self.size("capacity", 0)

    def seconds(self, option: str, default: float) -> float:
        """The value of an option that is a time."""
        return parse_duration(self.options[option]) if option in self.options else default

    def size(self, option: str, default: int) -> int:
        """The value of an option that is a size, in bytes."""
        return parse_size(self.options[option]) if option in self.options else default

    def ca_file(self) -> str | None:
        """File with the certificates that sign the server's; None for the system's. Raises TierError if it is gone."""
        path = self.options.get("ca_file")
        if path is not None and not Path(path).is_file():
            text = f"there is no file {path}; ca_file names the certificates that sign the server's"
            raise TierError(f"{self}: {text}")
        return path

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each server that the URL names, the kind's own where it names none. Raises ValueError."""
        rules = SCHEMES[self.scheme]
        try:
            return [address_in(text, rules.port) for text in self.host.rpartition("@")[2].split(",")]
        except ValueError:
            raise ValueError(
                f"a host and port like cache:{rules.port} is needed, an IPv6 address in brackets, a port from 1 to "
                f'65535; like "{rules.example}"'
            ) from None

    @property
    def url(self) -> str:
        """The URL in full; it parses back to an equal value and may hold a credential."""
        options = urlencode(self.options, quote_via=quote)
        return f"{self.scheme}://{self.host}{quote(self.path)}{'?' if options else ''}{options}"

    @property
    def place(self) -> tuple[str, str, str]:
        """Scheme, servers or host without credentials, and path, which no two tiers may share."""
        rules = SCHEMES.get(self.scheme)
        host = self.host.rpartition("@")[2]
        if rules is None or not rules.port:
            return self.scheme, host, self.path.rstrip("/")
        servers = ",".join(sorted(host_and_port(*address) for address in self.addresses))
        return self.scheme, servers, self.path.rstrip("/") or rules.default_path

    @property
    def holds_secret(self) -> bool:
        """True if a password, or an option that may be a secret, stands in the URL itself.

        The name of a file with a secret is no secret, nor is a user's name alone in a URL of a kind that kvpact knows.
        """
        user = self.host.rpartition("@")[0]
        if user and (":" in user or self.scheme not in SCHEMES):
            return True
        return any(
            (re.search(_SECRET_NAMES, name, re.IGNORECASE) and not name.endswith("_file")) or "@" in text
            for name, text in self.options.items()
        )

    def __str__(self) -> str:
        return redact(self.url)

    def __repr__(self) -> str:
        return f"TierURL({redact(self.url)!r})"


def tier_labels(tiers: Sequence[TierURL]) -> tuple[str, ...]:
    """Names of these tiers in metrics and logs: each by its option `name`, or else by its kind."""
    return distinct([tier.options.get("name", "") for tier in tiers], [kind_of(tier.scheme) for tier in tiers])


def distinct(names: Sequence[str], kinds: Sequence[str]) -> tuple[str, ...]:
    """Each name, or else the kind; the second of one kind without a name is "kind-2", and so on."""
    found: list[str] = []
    for name, kind in zip(names, kinds, strict=True):
        numbered = chain((kind,), (f"{kind}-{number}" for number in count(2)))
        found.append(name or next(label for label in numbered if label not in (MEMORY, *names, *found)))
    return tuple(found)


_DISK_EXAMPLE: Final = SCHEMES["disk"].example


def other_schemes() -> set[str]:
    """Kinds of tier that installed packages add."""
    return {entry.name for entry in entry_points(group=ENTRY_POINTS)} - SCHEMES.keys()


def parse_tier_url(value: object) -> TierURL:
    """Parse and check one tier URL. Another package checks the URLs of its kinds when it opens them.

    Raises:
        ValueError: unknown scheme or option, relative path, missing host, missing or impossible capacity.
    """
    if isinstance(value, TierURL):
        return value
    if not isinstance(value, str):
        raise ValueError(f'a tier is a URL such as "{_DISK_EXAMPLE}"')
    if re.search(r"""^[\["']|,\s*["']?[a-z+]+://""", value.strip()):
        raise ValueError(f'one URL is needed, like "{_DISK_EXAMPLE}"; KVPACT_TIERS separates them by spaces alone')
    if value.startswith(("/", "~", ".")):
        raise ValueError(f'a path alone is no tier; write the whole path into a URL, such as "{_DISK_EXAMPLE}"')
    try:
        parts = urlsplit(value.strip())
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:  # its message would repeat parts of the URL
        raise ValueError(f'not a well-formed URL; one looks like "{_DISK_EXAMPLE}"') from None
    options = dict(pairs)
    if parts.fragment or "\0" in unquote(parts.path):
        raise ValueError('"#" and NUL have no meaning in the path of a tier; write "#" as "%23"')
    if len(options) != len(pairs):
        raise ValueError("an option stands there twice; keep one")
    url = TierURL(parts.scheme, unquote(parts.path), options, parts.netloc)
    if (name := options.get("name")) is not None and not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,39}", name):
        raise ValueError(f'name="{name}": small letters, digits, "-" and "_" are needed, 40 at most')
    rules = SCHEMES.get(parts.scheme)
    if rules is not None:
        _check(url, rules)
    elif parts.scheme not in (others := other_schemes()):
        raise ValueError(f'unknown kind of tier "{parts.scheme}"{nearest(parts.scheme, [*SCHEMES, *sorted(others)])}')
    return url


def _check(url: TierURL, rules: UrlRules) -> None:
    like = f'like "{rules.example}"'
    if rules.directory or url.scheme == "file":
        if url.host or not url.path.startswith("/"):
            raise ValueError(f"a {url.scheme} tier needs an absolute path behind three slashes, {like}")
        if url.path == "/":
            raise ValueError(f'a {url.scheme} tier needs a directory of its own, not "/"; {like}')
    elif "@" in url.path:
        raise ValueError('a "/" in a user name or password must be written as "%2F"')
    elif not url.host.rpartition("@")[2]:
        raise ValueError(f"a {url.scheme} tier needs a host or bucket behind two slashes, {like}")
    elif "@" in url.host and not rules.port:
        raise ValueError(f"a {url.scheme} tier takes its credentials from the environment; leave them out of the URL")
    if rules.port and len(url.addresses) > 1 and rules.one:
        raise ValueError(f"{rules.one}; {like}")
    if not re.fullmatch(rules.path[0], url.path, re.ASCII | re.DOTALL):
        raise ValueError(f"{rules.path[1]}, {like}")
    for name, text in url.options.items():
        if name == "name":
            continue
        if name not in rules.options:
            raise ValueError(f'unknown option "{name}"{nearest(name, (*rules.options, "name"))}')
        try:
            rules.options[name](text)
        except ValueError as error:
            raise ValueError(f'{name}="{redact(text)}": {error}') from None
    rules.together(url.options)
    if rules.directory:
        if "capacity" not in url.options:
            raise ValueError(f'a {url.scheme} tier needs a limit: add "?capacity=200GiB", {like}')
        if url.capacity == 0:
            raise ValueError('capacity is 0; give the tier room, such as "?capacity=200GiB", or leave it out')


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown `name`: the most similar known one, or all of them."""
    candidates = list(known)
    near = difflib.get_close_matches(name.lower(), candidates, n=1, cutoff=0.7)
    return f'; did you mean "{near[0]}"?' if near else f"; known: {', '.join(candidates)}"

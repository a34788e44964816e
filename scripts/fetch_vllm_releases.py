"""Bring the releases of vLLM that the driver runs on into the cache folder: `fetch_vllm_releases.py [RELEASE ...]`."""

from __future__ import annotations

import sys

from kvpact_testkit.vllm.releases import RELEASES, fetch_release, installed_release


def main(releases: list[str]) -> None:
    """Fetch these releases, or all but the installed one."""
    for release in releases or [release for release in RELEASES if release != installed_release()]:
        print(f"vLLM {release}: {fetch_release(release)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

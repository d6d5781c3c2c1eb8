"""URLs of object stores, without secrets."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from elastic_train.config import IS_URL
from elastic_train.errors import UsageError

PACKAGES = {
    "s3": "'elastic_train[remote]'",
    "gs": "'elastic_train[remote]' gcsfs",
    "az": "'elastic_train[remote]' adlfs",
    "memory": "'elastic_train[remote]'",
    "file": "'elastic_train[remote]'",
}
"""what pip has to install, by scheme"""


@dataclass(frozen=True)
class StoreUrl:
    scheme: str
    place: str
    """bucket and prefix; an absolute path of file"""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.place}"

    def below(self, name: str) -> StoreUrl:
        return StoreUrl(self.scheme, f"{self.place}/{name}")


def is_url(text: object) -> bool:
    return IS_URL.match(str(text)) is not None


def parse_url(text: str, what: str = "") -> StoreUrl:
    """The store that a URL names. `what` stands before it in an error, such as a flag.

    Raises:
        UsageError: it is of a scheme that does not work, names no place, or holds a secret, which is not repeated.
    """
    name = f"{what} " if what else ""
    scheme = text.partition(":")[0].lower()
    shown = f"{scheme}://..."
    if scheme not in PACKAGES:
        known = ", ".join(f"{one}://" for one in PACKAGES)
        raise UsageError(f"{name}{shown}: works with a folder, or with {known}")
    if not text[len(scheme) :].startswith("://"):
        raise UsageError(f"{name}{scheme}:/...: a URL has two slashes: {scheme}://")
    try:
        parts = urlsplit(text)
    except ValueError as error:  # brackets that are no address
        raise UsageError(f"{name}{shown}: is no URL: {error}") from None
    place = text.partition("://")[2].rstrip("/")
    if parts.query or parts.fragment or "@" in (parts.netloc if scheme == "file" else place):
        raise UsageError(
            f"{name}{shown}: credentials do not belong into a URL, nor does anything behind ? or #; the store's own "
            "environment variables or files give them, such as AWS_ACCESS_KEY_ID or ~/.aws/credentials"
        )
    if (
        not place
        or (place.startswith("/") and scheme != "file")
        or ".." in place.split("/")
        or (scheme == "file" and not place.startswith("/"))
    ):
        example = "file:///shared/run-1" if scheme == "file" else f"{scheme}://bucket/run-1"
        raise UsageError(f"{name}{shown}: names no place; such as {example}")
    return StoreUrl(scheme, place)

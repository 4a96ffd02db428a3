"""Who may ask the server: keys, hosts and origins."""

import hmac
import ipaddress
import re
import socket
from argparse import Namespace
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path

from .answer_stream import RequestError
from .body import SHOWN

LONGEST_KEY = 4096  # characters


def admits(key: str, header: str | None) -> bool:
    """Whether an Authorization header has the key; as slow for a near miss as for any."""
    scheme, _, given = (header or "").strip().partition(" ")
    found = given.strip().encode("utf-8", "surrogateescape")
    return hmac.compare_digest(found, key.encode()) and scheme.lower() == "bearer"


@dataclass(frozen=True)
class Access:
    """Rules for who may ask: clients with the key, and no pages of other sites.

    A browser lets every page ask this machine, and says which one does (``Origin``). ``origins``
    may ask besides the server's own page; "*" is all. A page whose name was made to mean this
    machine is recognised by the name that it asks for (``Host``): a server that ``is_local``, or
    has ``hosts``, accepts only these and this machine's names; "*" is all.
    """

    key: str | None = field(default=None, repr=False)
    origins: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    is_local: bool = True

    def check_key(self, headers: Message) -> None:
        """Raise RequestError if a key is required and was not given."""
        if self.key is None:
            return
        # Clients of the Anthropic API have a header of their own.
        given = headers["Authorization"] or f"Bearer {headers['x-api-key'] or ''}"
        if not admits(self.key, given):
            raise RequestError(
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'.", 401
            )

    def check_page(self, headers: Message) -> None:
        """Raise RequestError for a request that the page of another site makes."""
        host = (headers["Host"] or "").strip().lower()
        if (self.is_local or self.hosts) and host and not self._is_known(_name_in(host)):
            raise RequestError(
                f"the Host {host[:SHOWN]!r} is no name of this machine: ask for localhost, or "
                "start the server with --allowed-hosts.",
                403,
            )
        if not self._may_ask(headers, host):
            raise RequestError(
                f"pages of {(headers['Origin'] or 'other sites')[:SHOWN]!r} may not ask here: "
                "start the server with --allowed-origins to let them.",
                403,
            )

    def shared_with(self, origin: str | None) -> str | None:
        """Return the origin whose pages may read the answer; None for the server's own only."""
        if "*" in self.origins:
            return "*"
        return origin if origin in self.origins else None

    def _is_known(self, name: str) -> bool:
        if "*" in self.hosts or name in self.hosts or name == "localhost":
            return True
        try:
            # To others' machines it is known by numbers, which no page can make mean another.
            return ipaddress.ip_address(name).is_loopback or not self.is_local
        except ValueError:
            return name.endswith(".localhost")  # which browsers never look up

    def _may_ask(self, headers: Message, host: str) -> bool:
        origin = headers["Origin"]
        if self.shared_with(origin) is not None:
            return True
        if origin is not None:
            return origin.lower() in (f"http://{host}", f"https://{host}")
        is_link = headers["Sec-Fetch-Mode"] == "navigate"  # followed by somebody who sees it
        return is_link or headers["Sec-Fetch-Site"] not in ("cross-site", "same-site")


def read_access(args: Namespace) -> Access:
    """Read the rules from the flags. Raises ValueError as ``read_key`` does."""
    return Access(
        read_key(args),
        frozenset(args.allowed_origins),
        frozenset(host.lower() for host in args.allowed_hosts),
        is_loopback(args.host),
    )


def _name_in(host: str) -> str:
    """The name in a Host header: [::1]:8080 -> ::1"""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def read_key(args: Namespace) -> str | None:
    """Read the key that the flags give, if any.

    Raises ValueError where the flags contradict each other, or where other machines could ask
    and neither a key nor ``--no-api-key`` was given.
    """
    given = [args.api_key is not None, args.api_key_file is not None, args.no_api_key]
    if sum(given) > 1:
        raise ValueError("give only one of --api-key, --api-key-file and --no-api-key.")
    key: str | None = args.api_key
    source = "--api-key"
    if args.api_key_file is not None:
        source = f"--api-key-file {args.api_key_file}"
        try:
            with Path(args.api_key_file).open("rb") as file:
                key = file.read(LONGEST_KEY + 2).decode().strip()
        except (OSError, UnicodeError) as err:
            reason = err.strerror if isinstance(err, OSError) else "it is not text"
            raise ValueError(
                f"{source} could not be read ({reason}): name a file that holds the key."
            ) from err
    if key is not None and (len(key) > LONGEST_KEY or not re.fullmatch("[!-~]+", key)):
        raise ValueError(
            f"the API key of {source} is empty, too long, or has characters that no header "
            f"can carry: give 1 to {LONGEST_KEY} letters, digits and signs, without spaces."
        )
    if key is None and not args.no_api_key and not is_loopback(args.host):
        raise ValueError(
            f"other machines can reach --host {args.host}: give --api-key-file FILE, or "
            "--no-api-key to answer whoever asks."
        )
    return key


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. False where that is not known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return False
    addresses = [str(address[0]).partition("%")[0] for *_, address in found]
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)

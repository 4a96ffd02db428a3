"""Who may ask: the API key, and when one is required."""

import hmac
import ipaddress
import socket
from argparse import Namespace
from pathlib import Path

LONGEST_KEY = 4096  # characters


class ApiKey:
    """A key that clients send as ``Authorization: Bearer KEY``."""

    def __init__(self, key: str, source: str):
        """``source`` says where it was given. Raises ValueError for what no header can carry."""
        if not 0 < len(key) <= LONGEST_KEY or not all("!" <= char <= "~" for char in key):
            raise ValueError(
                f"the API key of {source} is empty, too long, or has characters that no header "
                f"can carry: give 1 to {LONGEST_KEY} letters, digits and signs, without spaces."
            )
        self._key = key.encode()

    def admits(self, header: str | None) -> bool:
        """Whether an Authorization header has the key; as slow for a near miss as for any."""
        scheme, _, given = (header or "").strip().partition(" ")
        found = given.strip().encode("utf-8", "surrogateescape")
        return hmac.compare_digest(found, self._key) and scheme.lower() == "bearer"


def read_key(args: Namespace) -> ApiKey | None:
    """The key of the flags, if there is one.

    Raises ValueError where the flags contradict each other, or where other machines could ask
    and neither a key nor ``--no-api-key`` was given.
    """
    given = [args.api_key is not None, args.api_key_file is not None, args.no_api_key]
    if sum(given) > 1:
        raise ValueError("give only one of --api-key, --api-key-file and --no-api-key.")
    if args.api_key is not None:
        return ApiKey(args.api_key, "--api-key")
    if args.api_key_file is not None:
        return ApiKey(_read_file(args.api_key_file), f"--api-key-file {args.api_key_file}")
    if not args.no_api_key and not is_loopback(args.host):
        raise ValueError(
            f"other machines can reach --host {args.host}: give --api-key-file FILE, or "
            "--no-api-key to answer whoever asks."
        )
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. False where that is not known."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return False
    addresses = [str(address[0]).partition("%")[0] for *_, address in found]
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def _read_file(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            return file.read(LONGEST_KEY + 2).decode().strip()
    except (OSError, UnicodeError) as err:
        reason = err.strerror if isinstance(err, OSError) else "it is not text"
        raise ValueError(
            f"--api-key-file {name} could not be read ({reason}): name a file that holds the key."
        ) from err

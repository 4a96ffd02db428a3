"""Files from and to the Hugging Face hub, its errors said in one sentence."""

import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, get_session, hf_hub_url, hf_raise_for_status, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers

# The base of what the HTTP library raises; which library that is changes between versions.
HTTP_ERROR = HfHubHTTPError.__bases__[0]
TIMEOUT = 30.0  # seconds without a byte
LONGEST_PATH = 4096  # characters, as Linux has it
REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")
SNAPSHOT = re.compile(r".*/models--([^/]+?)--([^/]+)/snapshots/([^/]+)/?")
EAGLE_4 = re.compile(r"eagle[-_. ]?4(?![\db])", re.IGNORECASE)  # not 4bit, 4B, 4096
# A GGUF file of a repository, or a folder.
INSIDE = re.compile(rf"(?P<repo>{REPO_ID.pattern})/(?P<name>[\w./-]+\.gguf|\w[\w-]*)")
TERMS = "{repo} asks for its terms to be accepted: do so on its hub page, then run `hf auth login`"
NO_REPO = (
    "{repo} is neither a folder here nor a repository on the hub (or it is private: run `hf auth "
    "login`)"
)
REASONS = {
    GatedRepoError: TERMS,
    RepositoryNotFoundError: NO_REPO,
    RevisionNotFoundError: "{repo} has no revision {revision} on the hub",
    HFValidationError: "{repo} is neither a folder here nor a repository id",
}
"""Errors of the hub in a sentence each; the first that fits counts."""
NO_ACCESS = (
    "the hub does not let you read {repo} (403): ask for access on its page, or run `hf auth "
    "login` with a token that has it"
)
NO_HUB = (
    "the hub could not be reached for {repo}, and it is not in the local cache; check the "
    "connection, or give a folder"
)


class FileMissing(ValueError):
    """The repository has no file of that name."""


def refuse_eagle_4(text: str, source: str) -> None:
    """Raise ValueError where ``text``, a name or an entry of a config, speaks of EAGLE-4."""
    if EAGLE_4.search(text):
        raise ValueError(
            f"{source} is an EAGLE-4 head, whose weights and code are under a source-available "
            "licence that forbids competing use, so nothing of it is downloaded or read; use an "
            "EAGLE-3 head of the same target"
        )


@contextmanager
def explained(repo: str, revision: str | None = None) -> Iterator[None]:
    """Run a block that asks the hub for a repository; its errors become ValueErrors."""
    try:
        yield
    except (HTTP_ERROR, HFValidationError, OSError) as err:
        fallback = NO_ACCESS if _is_forbidden(err) else NO_HUB
        words = next((words for kind, words in REASONS.items() if isinstance(err, kind)), fallback)
        raise ValueError(words.format(repo=repo, revision=revision)) from err


def _is_forbidden(err: BaseException | None) -> bool:
    """Whether an error, or its cause, is the hub's 403."""
    response = getattr(err, "response", None)
    is_own = getattr(response, "status_code", None) == 403
    return is_own or (err is not None and _is_forbidden(err.__cause__))


def fetch(repo: str, patterns: Sequence[str], revision: str | None = None) -> Path:
    """Download the files of a repository that match the patterns; return their folder.

    The folder is named after the commit. Raises ValueError where there is no such repository, no
    access or no hub.
    """
    refuse_eagle_4(repo, repo)
    with explained(repo, revision):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))


def snapshot_of(path: str) -> tuple[str, str | None]:
    """The repository and the commit of a folder in the hub's cache; any other place as it is."""
    found = SNAPSHOT.fullmatch(path)
    return (path, None) if found is None else (f"{found[1]}/{found[2]}", found[3])


def read_range(repo: str, name: str, start: int, end: int, commit: str) -> tuple[bytes, int]:
    """Bytes ``start`` to ``end`` of a repository's file, fewer where it ends, and its size.

    Raises ValueError as ``fetch`` does, FileMissing where there is no such file.
    """
    refuse_eagle_4(repo, repo)
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}
    with explained(repo, commit):
        try:
            answer = get_session().get(
                hf_hub_url(repo, name, revision=commit), headers=headers, timeout=TIMEOUT
            )
            hf_raise_for_status(answer)
        except EntryNotFoundError as err:
            raise FileMissing(f"{repo} has no {name} on the hub") from err
    content: bytes = answer.content
    if answer.status_code != 206:  # a server that sends whole files only
        return content[start:end], len(content)
    return content, int(answer.headers["Content-Range"].rpartition("/")[2])


def _existing(source: str) -> Path | None:
    """Return the folder or file of a name; None if there is none. Raises ValueError for others."""
    if not source.strip() or not source.isprintable() or len(source) > LONGEST_PATH:
        raise ValueError(
            f"{source[:60]!r} is no name of a model: give a folder, or a repository such as "
            "owner/name"
        )
    try:
        path = Path(source).expanduser()
        mode = path.stat().st_mode
    except (OSError, RuntimeError):  # none, a part that is too long, or nobody's home
        return None
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise ValueError(f"{source} is a device or a pipe: give the folder of a model")
    return path


def locate(source: str, patterns: Sequence[str], revision: str | None = None) -> Path:
    """The path of a local folder or file, or of a downloaded repository (see ``fetch``).

    ``owner/name/file.gguf`` is that one file of the repository, ``owner/name/folder`` what lies
    in that folder of it.
    """
    if (path := _existing(source)) is not None:
        return path
    if inner := INSIDE.fullmatch(source):
        repo = inner["repo"]
        name = inner["name"]
        is_file = name.endswith(".gguf")
        wanted = [name] if is_file else [f"{name}/{own}" for own in patterns]
        path = fetch(repo, wanted, revision) / name
        if not (path.exists() if is_file else path.is_dir()):
            raise ValueError(f"{repo} has no {'' if is_file else 'folder '}{name} on the hub")
        return path
    if not REPO_ID.fullmatch(source):
        raise ValueError(f"{source} does not exist, and it is not a repository id either")
    return fetch(source, patterns, revision)


def upload(folder: Path, repo: str) -> str:
    """Put a converted folder on the hub and return its address; ValueError where it fails."""
    api = HfApi()
    try:
        address = api.create_repo(repo, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repo, repo_type="model")
    except (HTTP_ERROR, HFValidationError, OSError) as err:
        reason = str(err).strip().splitlines()[0]
        raise ValueError(
            f"{folder} is complete, but it could not be uploaded to {repo}: {reason}"
        ) from err
    return str(address)

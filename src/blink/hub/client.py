# SPDX-License-Identifier: Apache-2.0
"""Talk to the hub by huggingface_hub: what a repository has, and its files into the cache.

What a hub answers becomes names of files. Each of them is looked at before anything is written.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from threading import Event
from typing import Any, Final

from huggingface_hub import HfApi, constants, hf_hub_download, set_client_factory
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import _http
from tqdm import tqdm

from blink.errors import ConfigError
from blink.fields import one_line, show

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
# What marks a version: the library makes a file's name of it.
_MARK: Final = re.compile(r'(?:W/)?"?\w[\w.:+=-]{0,199}"?', re.ASCII)
_MARKS: Final = ("etag", "x-linked-etag", "x-repo-commit")
_TIMEOUT: Final = 15.0
_WORKERS: Final = 4


class UnreachableError(Exception):
    """The hub does not answer: what is in the cache may do."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one revision."""

    commit: str
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Hub:
    """A hub, as one user sees it."""

    repository: str
    revision: str = ""
    token: str = ""
    folder: str = ""

    @property
    def cache(self) -> Path:
        """The folder that holds the files of all repositories."""
        return Path(self.folder or constants.HF_HUB_CACHE).expanduser()

    def list_files(self) -> Listing:
        """Ask for the files of the revision.

        Raises:
            UnreachableError: nobody answers, or the environment says not to ask.
            ConfigError: there is no such model, or this user may not have it.
        """
        if constants.is_offline_mode():
            raise UnreachableError("HF_HUB_OFFLINE is set")
        with self._explaining():
            api = HfApi(endpoint=_endpoint(), token=self.token or None)
            info = api.model_info(
                self.repository,
                revision=self.revision or None,
                timeout=max(_TIMEOUT, constants.HF_HUB_ETAG_TIMEOUT),
                files_metadata=True,
            )
        if not _COMMIT.fullmatch(info.sha or ""):
            raise ConfigError(f"{self.repository}: the hub names no commit ({show(info.sha)}); try again later.")
        return Listing(str(info.sha), {file.rfilename: file.size or 0 for file in info.siblings or ()})

    def download(self, listing: Listing, names: Sequence[str]) -> Path:
        """Bring files into the cache, as far as they are not there; return the folder in which they lie.

        Raises:
            UnreachableError: the hub has ceased to answer.
            ConfigError: this user may not have them, or there is no room for them.
        """
        folder = self.snapshot(listing.commit)
        missing = [name for name in names if not (folder / name).exists()]
        if not missing:
            return folder
        _watch_marks()
        total = sum(listing.sizes.get(name, 0) for name in missing)
        if not sys.stderr.isatty() and total > 1 << 20:
            print(f"downloading {self.repository}: {len(missing)} files, {total / 1e9:.2f} GB", file=sys.stderr)
        stopped = Event()
        with self._explaining(), _progress(self.repository, total) as bar, ThreadPoolExecutor(_WORKERS) as pool:
            part = _part_of(bar, stopped)
            try:
                list(pool.map(lambda name: self._fetch(listing.commit, name, part), missing))
            except BaseException:  # Ctrl-C too: what is under way ends with its next bytes
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return folder

    def keep(self, commit: str) -> None:
        """Note that the revision is this commit, all of whose files that are needed are there."""
        reference = self._folder / "refs" / (self.revision or constants.DEFAULT_REVISION)
        if not _COMMIT.fullmatch(self.revision):
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(commit)

    def snapshot(self, commit: str) -> Path:
        """Return the folder of a commit's files."""
        return self._folder / "snapshots" / commit

    def find_snapshot(self) -> Path | None:
        """Return the folder of the revision in the cache, if it is there."""
        reference = self._folder / "refs" / (self.revision or constants.DEFAULT_REVISION)
        commit = reference.read_text().strip() if reference.is_file() else self.revision
        folder = self.snapshot(commit)
        return folder if commit and "/" not in commit and commit != ".." and folder.is_dir() else None

    @property
    def _folder(self) -> Path:
        return self.cache / f"models--{self.repository.replace('/', '--')}"

    def _fetch(self, commit: str, name: str, part: Any) -> None:
        hf_hub_download(
            self.repository,
            name,
            revision=commit,
            cache_dir=self.cache,
            token=self.token or None,
            endpoint=_endpoint(),
            tqdm_class=part,
        )

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Say what to do about an error of the hub's."""
        name = self.repository
        try:
            yield
        except GatedRepoError as error:
            page = f"{_endpoint() or constants.ENDPOINT}/{name}"
            raise ConfigError(
                f"{name} is gated: accept its terms at {page}, then give your token by HF_TOKEN or --hf-token."
            ) from error
        except RevisionNotFoundError as error:
            raise ConfigError(f"{name} has no revision {self.revision!r}; change --revision.") from error
        except RepositoryNotFoundError as error:
            raise ConfigError(
                f"MODEL '{name}' is no file or directory on this machine, and no model on the hub that you may see: "
                "check its name; if it is private, give your token by HF_TOKEN or --hf-token."
            ) from error
        except HFValidationError as error:
            raise ConfigError(f"MODEL '{name}' cannot be a name on the hub: {one_line(error)}") from error
        except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
            raise UnreachableError(one_line(error)) from error
        except HfHubHTTPError as error:
            if error.response.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise ConfigError(f"The hub refuses the token for {name}: check HF_TOKEN and --hf-token.") from error
            raise UnreachableError(f"the hub answered {error.response.status_code}") from error
        except OSError as error:
            if error.errno is None:
                raise UnreachableError(one_line(error)) from error
            raise ConfigError(f"Cannot write to {self.cache} ({error}); give another --download-dir.") from error
        except ConfigError:
            raise
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2"):
                raise
            raise UnreachableError(one_line(error) or type(error).__name__) from error


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


class _WatchedClients:
    """Makes the library's HTTP clients, which it throws away after some errors, with a look at each answer."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __call__(self) -> Any:
        client = self._make()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks["response"], _check_marks]}
        return client


def _watch_marks() -> None:
    """Let no answer of the hub name a file outside of the cache: the library takes some of its headers for names."""
    make = _http._GLOBAL_CLIENT_FACTORY  # the program's own, if it has one
    if not isinstance(make, _WatchedClients):
        set_client_factory(_WatchedClients(make))


def _check_marks(response: Any) -> None:
    for name in _MARKS if response.request.method == "HEAD" else ():
        mark = response.headers.get(name)
        if mark is not None and not _MARK.fullmatch(mark):
            raise ConfigError(f"The hub's answer is malformed ({name}: {show(mark)}); nothing was written.")


def _progress(name: str, total: int) -> tqdm[Any]:
    return tqdm(total=total, desc=f"downloading {name}", unit="B", unit_scale=True, disable=None)


def _part_of(bar: tqdm[Any], stopped: Event) -> Any:
    """Return a class like tqdm, whose bars are parts of one that all files share, and end a download if `stopped`."""

    class Part:
        def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
            bar.update(initial)

        def __enter__(self) -> Part:
            return self

        def __exit__(self, *_: object) -> None: ...

        def close(self) -> None: ...

        def update(self, count: float | None = 1) -> None:
            if stopped.is_set():
                raise InterruptedError("another download failed")
            bar.update(count or 0)

        def update_transfer(self, _: float | None = 1) -> None: ...

        def set_postfix_str(self, *_: object, **__: object) -> None: ...

        def set_transfer_postfix_str(self, *_: object, **__: object) -> None: ...

    return Part

"""Models of the Hugging Face hub as local folders. The only file that imports its client.

The client's own settings apply: HF_HOME and HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT.
Files in its cache are not fetched again, and are used if the hub cannot be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ...errors import ModelLoadError
from ...frontend.client.progress import ByteProgress
from .model_files import PICKLED_SUFFIXES, why_not_pickled

# Weights as safetensors, and all files of configuration, tokenizers and templates. tokenizer.model
# is not among them: its contents are in tokenizer.json.
_DESCRIBING = ("*.json", "*.jinja")
_WANTED = ("*.safetensors", *_DESCRIBING)
# Other forms of the same weights, which some repositories also have.
_NOT_WANTED = ("*/*.safetensors", "consolidated*.safetensors", "onnx/*", "openvino/*", "original/*")
_BLOCK_BYTES = 1 << 21  # fetched at a time from a partly read file

_T = TypeVar("_T")


def fetch_snapshot(
    repo: str,
    revision: str | None = None,
    on_progress: ByteProgress | None = None,
    has_weights: bool = True,
) -> Path:
    """The folder with the files of the model `repo`, fetched if they are not in the cache.
    `has_weights`: fetch the weights too, not only what describes them.

    Raises ModelLoadError with the remedy: offline, gated, not found, no safetensors (whether
    weights are requested or not, as far as the hub can be reached).
    """
    from huggingface_hub import snapshot_download

    def fetch() -> str:
        return snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(_WANTED if has_weights else _DESCRIBING),
            ignore_patterns=list(_NOT_WANTED),
            tqdm_class=_bars(on_progress),
        )

    folder = Path(_explained(fetch, repo, repo, revision))
    if not any(folder.glob("*.safetensors")):
        _require_weights(repo, revision, folder, has_weights)
    return folder


def fetch_file(
    repo: str, name: str, revision: str | None = None, on_progress: ByteProgress | None = None
) -> Path:
    """One file of the model `repo`. Raises ModelLoadError as `fetch_snapshot` does."""
    from huggingface_hub import hf_hub_download

    def fetch() -> str:
        return hf_hub_download(repo, name, revision=revision, tqdm_class=_bars(on_progress))

    return Path(_explained(fetch, repo, f"{repo}/{name}", revision))


def read_file(
    repo: str, name: str, read: Callable[[BinaryIO, int], _T], revision: str | None = None
) -> _T:
    """The result of `read` for the file's stream and its size in bytes. If the file is not cached,
    only what `read` takes from the stream is fetched, a block at a time, and nothing is stored.

    Raises ModelLoadError as `fetch_snapshot` does, and any error of `read`.
    """
    from huggingface_hub import HfFileSystem, constants, hf_hub_download

    def fetch() -> _T:
        about = hf_hub_download(repo, name, revision=revision, dry_run=True)
        cached = Path(about.local_path)
        if cached.exists():
            with cached.open("rb") as stream:
                return read(stream, cached.stat().st_size)
        # A separate instance: those cached by the library keep listings forever.
        hub = HfFileSystem(endpoint=constants.ENDPOINT, skip_instance_cache=True)
        path = f"{repo}@{about.commit_hash}/{name}"
        with hub.open(path, block_size=_BLOCK_BYTES, cache_type="readahead") as remote:
            return read(BufferedReader(remote, _BLOCK_BYTES), int(remote.size))

    return _explained(fetch, repo, f"{repo}/{name}", revision)


def _explained(fetch: Callable[[], _T], repo: str, model: str, revision: str | None) -> _T:
    """The result of `fetch`; `model` is what was requested, all of `repo` or one of its files."""
    from huggingface_hub import errors

    shown = model if revision is None else f"{model}@{revision}"
    try:
        return fetch()
    except ModelLoadError:
        raise
    except errors.GatedRepoError:
        raise ModelLoadError(
            f"{shown} is gated: accept its terms at https://huggingface.co/{repo}, then set "
            "HF_TOKEN to a token of that account"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelLoadError(f"{repo} has no revision {revision!r} on the hub") from None
    except errors.RepositoryNotFoundError:
        raise ModelLoadError(
            f"{shown} is neither a folder here nor a model on the hub; for a private one set "
            "HF_TOKEN"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise _out_of_reach(f"{shown} is no folder here,", error) from None
    except errors.EntryNotFoundError:
        raise ModelLoadError(f"{shown} is not among the files of that model on the hub") from None
    except errors.HFValidationError as error:
        raise ModelLoadError(f"{shown} is neither a folder nor a model's id: {error}") from None
    except Exception as error:  # its HTTP client's errors differ between versions
        raise ModelLoadError(
            f"{shown} cannot be fetched: {type(error).__name__}: {error}"
        ) from error


def _out_of_reach(what: str, error: BaseException) -> ModelLoadError:
    return ModelLoadError(
        f"{what} not in the hub's cache ({_cache()}) and the hub cannot be reached: "
        f"{_reason(error)}; give a folder, or run once online"
    )


def _reason(error: BaseException) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}".splitlines()[0]


def _cache() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _require_weights(repo: str, revision: str | None, folder: Path, has_weights: bool) -> None:
    """Checks a model without safetensors in the cache; `has_weights`: they were requested.

    Raises ModelLoadError with the reason if it cannot be loaded.
    """
    from huggingface_hub import HfApi

    try:
        # One request; `list_repo_files` would retry for half a minute if none is answered.
        siblings = HfApi().model_info(repo, revision=revision or "main").siblings
    except Exception as error:  # the cache has no listing
        if not has_weights:
            return
        shown = repo if revision is None else f"{repo}@{revision}"
        raise _out_of_reach(f"the weights of {shown} are", error) from None
    names = [sibling.rfilename for sibling in siblings or ()]
    if not has_weights and any(map(_is_wanted, names)):
        return
    pickled = [name for name in names if name.endswith(PICKLED_SUFFIXES)]
    if pickled:
        raise ModelLoadError(why_not_pickled(repo, pickled))
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if ggufs:
        raise ModelLoadError(f"{repo} holds GGUF files: name one, as in {repo}/{ggufs[0]}")
    raise ModelLoadError(f"{repo} holds no safetensors (looked for in {folder})")


def _is_wanted(name: str) -> bool:
    """Whether a file of the hub contains weights to fetch."""
    is_among_others = any(fnmatch(name, pattern) for pattern in _NOT_WANTED)
    return name.endswith(".safetensors") and not is_among_others


def _bars(on_progress: ByteProgress | None) -> Any:
    """The class that the client uses for its progress bars; they print nothing."""
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        """Reports the bytes of a whole download, one of several bars."""

        def __init__(self, *args: Any, **options: Any) -> None:
            name = options.get("name")
            self._is_of_bytes = options.get("unit") == "B" and not str(name).endswith("transfer")
            options = {**options, "disable": False, "file": _NOWHERE}
            super().__init__(*args, **options)  # type: ignore[no-untyped-call]

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            pass

        def update(self, n: float | None = 1) -> bool | None:
            is_shown: bool | None = super().update(n)
            if on_progress is not None and self._is_of_bytes and self.total:
                on_progress(int(min(self.n, self.total)), int(self.total))
            return is_shown

    return Bar


class _Nowhere:
    def write(self, text: str) -> None:
        pass

    def flush(self) -> None:
        pass


_NOWHERE = _Nowhere()

"""Six ways in which a stranger could have his pickle loaded by torch's compiler; the variables are as before."""

import inspect
import os
import pickle
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch._inductor import codecache, config
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch._inductor.utils import clear_inductor_caches

from bayeskit._compiler.inductor import compile_with_inductor
from bayeskit._compiler.tracing import traced
from bayeskit._core import compiler_cache as module
from bayeskit._core import trusted_folders as trusted_folders
from bayeskit._core.compiler_cache import compiler_cache
from bayeskit.errors import CompilationWarning

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "getuid"), reason="users have no numbers here"),
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning"),
]

TORCH, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
#: How torch is told to use no precompiled headers; versions that precompile none, such as 2.6, know no such option.
NO_HEADERS = {"cpp_cache_precompile_headers": False} if hasattr(config, "cpp_cache_precompile_headers") else {}
MATRIX = torch.arange(9.0, dtype=torch.float64).reshape(3, 3)


class Marker:
    """What makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(autouse=True)
def anew(tmp_path, monkeypatch):
    """Let folders be looked at anew; bayeskit's own and temporary files lie in the test's folder."""
    (tmp_path / "temporary").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for memory in (module._check_contents_once, trusted_folders._of_this_process):
        memory.cache_clear()
    clear_inductor_caches()
    yield
    for memory in (module._check_contents_once, trusted_folders._of_this_process):
        memory.cache_clear()
    clear_inductor_caches()


def product():
    """Compile a product of matrices, which takes no C++ compiler, and compute it."""
    clear_inductor_caches()
    (found,) = compile_with_inductor(traced(lambda x: (x @ x,), MATRIX), (MATRIX,), {})(MATRIX)
    return found


@pytest.fixture(scope="module")
def poison(tmp_path_factory):
    """Return a folder of the compiler in which each pickle of a graph is a stranger's, and what these make."""
    folder, marker = tmp_path_factory.mktemp("poison"), tmp_path_factory.mktemp("marker") / "made"
    with pytest.MonkeyPatch.context() as context:
        context.setenv(TORCH, str(folder))
        product()
    pickles = [path for path in (folder / "fxgraph").rglob("*") if path.is_file()]
    assert pickles
    for path in pickles:
        path.write_bytes(pickle.dumps(Marker(marker)))
    return folder, marker


def plant(poison, folder):
    source, marker = poison
    shutil.rmtree(marker, ignore_errors=True)
    shutil.copytree(source, folder)
    folder.chmod(0o700)
    return marker


def test_what_is_planted_would_be_loaded_from_a_trusted_folder(poison, tmp_path, monkeypatch):
    marker = plant(poison, tmp_path / "cache")
    monkeypatch.setenv(TORCH, str(tmp_path / "cache"))
    with suppress(Exception):  # what a stranger's pickle leads to
        product()
    assert marker.exists()


def made_before(folder, seem):
    seem(folder)


def swapped_file(folder, seem):
    path = next(path for path in (folder / "fxgraph").rglob("*") if path.is_file())
    seem(path)


def link_to_the_folder(folder, seem):
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


def link_in_the_folder(folder, seem):
    (folder / "fxgraph").rename(folder.with_name("elsewhere"))
    (folder / "fxgraph").symlink_to(folder.with_name("elsewhere"))


def parent_that_all_can_write(folder, seem):
    folder.parent.chmod(0o777)


def folder_that_all_can_write(folder, seem):
    folder.chmod(0o777)


def other_owner_above(folder, seem):
    seem(folder.parent)


def file_that_all_can_write(folder, seem):
    """Stand for what a stranger put there when a folder of an older version was open."""
    swapped = next(path for path in (folder / "fxgraph").rglob("*") if path.is_file())
    swapped.chmod(0o666)
    folder.chmod(0o755)


WAYS = (
    made_before,
    swapped_file,
    link_to_the_folder,
    link_in_the_folder,
    parent_that_all_can_write,
    folder_that_all_can_write,
    other_owner_above,
    file_that_all_can_write,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_no_way_in(way, poison, tmp_path, monkeypatch):
    folder = tmp_path / "above" / "cache"
    folder.parent.mkdir(mode=0o700)
    marker = plant(poison, folder)
    lstat = os.lstat

    def seem(strange):
        def seen(path):
            fields = list(lstat(path))
            if os.path.abspath(path) == str(strange):
                fields[stat.ST_UID] = 4711
            return os.stat_result(fields)

        monkeypatch.setattr(os, "lstat", seen)
        monkeypatch.setattr(Path, "lstat", seen)

    way(folder, seem)
    monkeypatch.setenv(TORCH, str(folder))
    with pytest.warns(CompilationWarning, match="is not loaded from .*cache, which TORCHINDUCTOR_CACHE_DIR names"):
        found = product()
    assert torch.equal(found, MATRIX @ MATRIX)
    assert not marker.exists()
    assert os.environ[TORCH] == str(folder)
    kept = tmp_path / "home" / "bayeskit" / "torch"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700 and any((kept / "fxgraph").iterdir())


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give a folder away")
def test_torch_s_own_folder_that_a_real_stranger_made_is_not_used_and_nobody_is_bothered(poison, monkeypatch):
    monkeypatch.delenv(TORCH, raising=False)
    folder = Path(default_cache_dir())
    assert str(folder).startswith(tempfile.gettempdir())
    marker = plant(poison, folder)
    os.chown(folder, 4711, -1)
    with compiler_cache() as cache:
        assert cache.options == NO_HEADERS and cache.problem is None
    assert torch.equal(product(), MATRIX @ MATRIX)
    assert not marker.exists() and TORCH not in os.environ


def test_torch_precompiles_headers_only_where_it_can_be_told_not_to():
    assert ("precompiled_headers" in inspect.getsource(codecache)) == bool(NO_HEADERS)


def test_headers_that_a_stranger_may_have_compiled_are_not_used(tmp_path, monkeypatch):
    headers = Path(default_cache_dir()) / "precompiled_headers"
    headers.mkdir(parents=True)
    headers.chmod(0o777)
    given = []

    def recorded(graph, examples, options):
        given.append(options)
        return graph

    monkeypatch.setenv(TORCH, str(tmp_path / "chosen"))
    monkeypatch.setattr("torch._inductor.compile", recorded)
    product()
    headers.chmod(0o700)
    product()
    chosen = [{name: options[name] for name in options if name == "cpp_cache_precompile_headers"} for options in given]
    assert chosen == [NO_HEADERS, {}]


def test_a_choice_of_the_user_is_kept_and_made_closed(tmp_path, monkeypatch):
    monkeypatch.setenv(TORCH, str(tmp_path / "chosen"))
    monkeypatch.delenv(TRITON, raising=False)
    with compiler_cache() as cache:
        assert cache == (tmp_path / "chosen", {}, None)
        assert stat.S_IMODE((tmp_path / "chosen").stat().st_mode) == 0o700
        default = Path(default_cache_dir())  # made for the headers only
        assert default.exists() == bool(NO_HEADERS)
        assert not NO_HEADERS or stat.S_IMODE(default.stat().st_mode) == 0o700
        os.environ[TRITON] = "what torch sets"
    assert TRITON not in os.environ


def test_the_folder_of_triton_is_looked_at_too(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv(TORCH, str(tmp_path / "chosen"))
    monkeypatch.setenv(TRITON, str(tmp_path / "open"))
    with compiler_cache():
        assert os.environ[TRITON] == str(tmp_path / "chosen" / "triton")
    assert os.environ[TRITON] == str(tmp_path / "open")


def test_contexts_that_overlap_restore_what_was_before_the_first(tmp_path, monkeypatch):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv(TORCH, str(tmp_path / "open"))
    first, second = compiler_cache(), compiler_cache()
    one, other = first.__enter__(), second.__enter__()
    assert one == other and one.problem is not None
    first.__exit__(None, None, None)
    assert os.environ[TORCH] == str(one.folder)
    second.__exit__(None, None, None)
    assert os.environ[TORCH] == str(tmp_path / "open")


def test_without_any_trusted_folder_nothing_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "own_folders", lambda: iter([tmp_path / "open"]))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv(TORCH, str(tmp_path / "open"))
    with pytest.raises(OSError, match="no folder can hold compiled code: other users can write to"):
        product()
    assert os.environ[TORCH] == str(tmp_path / "open")

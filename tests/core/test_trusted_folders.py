"""Six ways in which a stranger could have his code loaded, for bayeskit's libraries; and what is refused by name."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bayeskit._core import libraries as libraries
from bayeskit._core import trusted_folders as trusted_folders
from bayeskit._core.libraries import FLAGS, load_library
from bayeskit._core.trusted_folders import check_contents, is_own_file, make_private, own_folders

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="users have no numbers here")

FLAT = ("-O0", *FLAGS[1:])
OURS = {"answer.cpp": 'extern "C" int answer() { return 1; }'}
THEIRS = {"answer.cpp": 'extern "C" int answer() { return 666; }'}
STRANGER = 4711


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return the folder of bayeskit's libraries, which is not made yet; other temporary files lie beside it."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    trusted_folders._of_this_process.cache_clear()
    yield tmp_path / "cache" / "bayeskit"
    trusted_folders._of_this_process.cache_clear()


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    """Return the bytes of a library that answers otherwise."""
    made = tmp_path_factory.mktemp("evil") / "made"
    with pytest.MonkeyPatch.context() as context:
        context.setattr(libraries, "own_folders", lambda: iter([made]))
        assert load_library("answer", THEIRS, FLAT).answer() == 666
    (path,) = made.iterdir()
    return path.read_bytes()


@pytest.fixture
def owner(monkeypatch):
    """Return a function that lets a path seem to belong to a stranger."""
    lstat, owned = os.lstat, set()

    def seen(path, *args, **kwargs):
        status = lstat(path, *args, **kwargs)
        if os.path.abspath(path) not in owned:
            return status
        fields = list(status)
        fields[stat.ST_UID] = STRANGER
        return os.stat_result(fields)

    monkeypatch.setattr(os, "lstat", seen)
    monkeypatch.setattr(Path, "lstat", lambda path: seen(path))
    return lambda path: owned.add(os.path.abspath(path))


def name_of(content, sources=OURS):
    """Return the name under which a library of these sources is looked for, with the digest of other contents."""
    identity = libraries._identity(libraries.compiler(), sources, FLAT)
    return f"answer_{identity}_{libraries._digest(content)}.so"


def plant(folder, content):
    """Put a library where one of our sources is looked for, under a name that fits its contents."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name_of(content)
    path.write_bytes(content)
    path.chmod(0o700)
    return path


def answer():
    return load_library("answer", OURS, FLAT).answer()


@pytest.mark.compiler
def test_what_is_planted_would_be_loaded_from_a_trusted_folder(home, evil):
    make_private(home)
    plant(home, evil)
    assert answer() == 666


@pytest.mark.compiler
def test_a_folder_that_a_stranger_made_before_is_not_used(home, evil, owner):
    plant(home, evil)
    owner(home)
    assert answer() == 1
    assert [path.read_bytes() == evil for path in home.iterdir()] == [True], "nothing was written there either"
    temporary = Path(tempfile.gettempdir()) / f"bayeskit_{os.getuid()}"
    assert stat.S_IMODE(temporary.stat().st_mode) == 0o700 and len(list(temporary.iterdir())) == 1


@pytest.mark.compiler
def test_a_file_that_was_swapped_is_replaced(home, evil):
    assert answer() == 1
    (path,) = home.iterdir()
    ours = path.read_bytes()
    path.unlink()  # a new file, because this process has the old one open
    path.write_bytes(evil)
    assert answer() == 1
    assert [found.read_bytes() for found in home.iterdir()] == [ours]


@pytest.mark.compiler
@pytest.mark.parametrize("what", ["file", "folder", "way"])
def test_a_link_is_not_followed(what, home, evil, owner, tmp_path):
    theirs = plant(tmp_path / "downloads" / "bayeskit", evil)
    home.parent.mkdir()
    if what == "file":
        home.mkdir(mode=0o700)
        (home / theirs.name).symlink_to(theirs)
    elif what == "folder":
        home.symlink_to(theirs.parent)
    else:
        home.parent.rmdir()
        home.parent.symlink_to(theirs.parent.parent)
        owner(home.parent)
    assert answer() == 1
    assert theirs.read_bytes() == evil


@pytest.mark.compiler
@pytest.mark.parametrize("place", ["folder", "parent", "parent by a link"])
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write_or_replace_is_not_used(mode, place, home, evil, tmp_path):
    plant(home, evil)
    home.chmod(0o700)
    if place == "parent by a link":
        home.parent.rename(tmp_path / "elsewhere")
        (tmp_path / "open").mkdir()
        (tmp_path / "elsewhere").rename(tmp_path / "open" / "cache")
        home.parent.symlink_to("open/cache")
        (tmp_path / "open").chmod(mode)
    else:
        (home if place == "folder" else home.parent).chmod(mode)
    assert answer() == 1
    if place == "parent":
        home.parent.chmod(mode | stat.S_ISVTX)  # where others can make folders and not rename ours, as in /tmp
        assert answer() == 666


@pytest.mark.compiler
def test_a_file_of_another_owner_is_not_loaded(home, evil, owner):
    make_private(home)
    owner(plant(home, evil))
    assert answer() == 1
    make_private(home)
    (path,) = home.iterdir()
    path.chmod(0o777)
    assert not is_own_file(path)


@pytest.mark.compiler
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give a file away")
def test_a_folder_and_a_file_of_a_real_stranger_are_not_used(home, evil):
    path = plant(home, evil)
    home.chmod(0o700)
    os.chown(path, STRANGER, -1)
    assert answer() == 1 and not path.exists()
    plant(home, evil)
    os.chown(home, STRANGER, -1)
    assert answer() == 1 and path.exists()


@pytest.mark.compiler
def test_a_library_of_an_older_digest_is_not_loaded(home, evil):
    make_private(home)
    older = home / name_of(evil, THEIRS)  # of other sources
    older.write_bytes(evil)
    renamed = home / name_of(b"what the file held before")
    renamed.write_bytes(evil)
    assert answer() == 1
    assert older.exists() and not renamed.exists()


@pytest.mark.compiler
def test_without_a_trusted_folder_one_of_this_process_is_used_and_deleted(home, evil):
    plant(home, evil)
    home.chmod(0o777)
    taken = Path(tempfile.gettempdir()) / f"bayeskit_{os.getuid()}"
    plant(taken, evil)
    taken.chmod(0o777)
    code = (
        f"from bayeskit._core.libraries import load_library; print(load_library('answer', {OURS!r}, {FLAT!r}).answer())"
    )
    environment = os.environ | {"TMPDIR": tempfile.gettempdir()}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "1\n", done.stderr
    assert list(taken.parent.iterdir()) == [taken], "the folder of the process is deleted"
    taken.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="other users can write to .*temporary and replace"):
        answer()


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_new_folders_are_closed_whatever_the_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a", tmp_path / "a" / "b")] == [0o700] * 2


def test_links_of_this_user_on_the_way_are_followed_and_circles_refused(tmp_path):
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/deep/../deep")
    make_private(tmp_path / "link" / "cache")
    assert (tmp_path / "real" / "deep" / "cache").is_dir()
    (tmp_path / "x").symlink_to("y")
    (tmp_path / "y").symlink_to("x")
    with pytest.raises((OSError, RuntimeError)):
        make_private(tmp_path / "x" / "cache")


def test_nothing_is_made_where_a_stranger_s_link_leads(tmp_path, owner):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    owner(tmp_path / "link")
    with pytest.raises(PermissionError, match="link belongs to another user, who can replace .*link/a"):
        make_private(tmp_path / "link" / "a" / "b")
    assert list((tmp_path / "real").iterdir()) == []


def test_contents_of_an_open_folder_are_looked_at(tmp_path, owner):
    folder = tmp_path / "cache"
    (folder / "below").mkdir(parents=True)
    file = folder / "below" / "pickle"
    file.write_bytes(b"")
    file.chmod(0o666)
    folder.chmod(0o700)
    check_contents(folder)  # nobody else can enter
    folder.chmod(0o755)
    with pytest.raises(PermissionError, match="pickle may come from another user; delete"):
        check_contents(folder)
    file.chmod(0o644)
    check_contents(folder)
    owner(file)
    with pytest.raises(PermissionError, match="pickle may come from another user"):
        check_contents(folder)


def test_folders_of_this_user_come_in_this_order(home):
    first, second, third = own_folders()
    assert first == home and second.name == f"bayeskit_{os.getuid()}" and stat.S_IMODE(third.stat().st_mode) == 0o700
    shutil.rmtree(third)

"""Files that another user has placed are never read, followed or overwritten, and never block a call."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import pytest

from tricomm.store import files

OTHER = 4711
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory to which all users may write, as /tmp is."""
    tmp_path.chmod(0o1777)
    return tmp_path


def _link(file: Path) -> None:
    target = file.with_name("target")
    target.write_bytes(b"secret")
    file.symlink_to(target)


def _of_another_user(file: Path) -> None:
    file.write_bytes(b"planted")
    os.chown(file, OTHER, OTHER)


PLANTED = [
    pytest.param(_link, ["it is a symbolic link"], id="link"),
    pytest.param(lambda file: file.symlink_to(file.with_name("nothing")), ["it is a symbolic link"], id="dangling"),
    pytest.param(os.mkfifo, ["it is no regular file", "No such device"], id="fifo"),
    pytest.param(os.mkdir, ["it is no regular file", "Is a directory"], id="directory"),
    pytest.param(_of_another_user, [f"another user than uid 0 (uid {OTHER}"], id="owner", marks=as_root),
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("mode", ["rb", "ab"])
@pytest.mark.parametrize(("plant", "words"), PLANTED)
def test_only_the_users_regular_files_are_read(folder, plant, words, mode):
    file = folder / "file"
    plant(file)
    with pytest.raises(OSError) as told:
        files.opened(file, mode)
    assert any(word in told.value.strerror for word in words)
    assert not (folder / "nothing").exists()
    assert not (folder / "target").exists() or (folder / "target").read_bytes() == b"secret"


@as_root
def test_a_file_of_root_is_read_by_others_if_allowed(folder, monkeypatch):
    (folder / "file").write_bytes(b"by root")
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    assert files.read(folder / "file", 7, root=True) == b"by root"
    with pytest.raises(PermissionError):
        files.read(folder / "file", 7)


def test_a_file_without_an_end_is_not_read(folder):
    (folder / "file").write_bytes(b"12345678")
    assert files.read(folder / "file", 8) == b"12345678"
    with pytest.raises(OSError, match="it has more than 7 bytes"):
        files.read(folder / "file", 7)


def test_a_new_file_is_private_to_the_user(folder):
    files.opened(folder / "file", "ab").close()
    assert stat.S_IMODE((folder / "file").stat().st_mode) == 0o600


def test_a_file_is_replaced_whole_and_no_link_is_followed(folder):
    file, target = folder / "file", folder / "target"
    _link(file)
    for name in ("file.part", f"file.{os.getpid()}.part"):  # predictable names
        (folder / name).symlink_to(target)
    files.replace(file, b"new")
    assert file.read_bytes() == b"new" and not file.is_symlink() and target.read_bytes() == b"secret"
    assert stat.S_IMODE(file.stat().st_mode) & 0o022 == 0


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(folder, monkeypatch):
    file = folder / "file"
    file.write_bytes(b"old")

    def full(old: str, new: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        files.replace(file, b"new")
    assert file.read_bytes() == b"old" and list(folder.iterdir()) == [file]


def test_a_device_is_not_replaced_by_a_file():
    with pytest.raises(OSError, match="device"):
        files.replace("/dev/null", b"")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_waiting_for_a_lock_has_a_timeout(folder):
    with files.locked(folder / "lock", 1.0):
        with pytest.raises(TimeoutError, match="another process has held it for 0.1 s"):
            with files.locked(folder / "lock", 0.1):
                pass
    with files.locked(folder / "lock", 0.0):
        pass


def _keeps_its_lock(folder, read, write):
    """Whether a child that is forked while a lock is held keeps it locked."""
    with files.locked(folder / "lock", 1.0):
        if (child := os.fork()) == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    try:
        with files.locked(folder / "lock", 0.1):
            return False
    except TimeoutError:
        return True
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_keep_the_lock(folder):
    assert not _keeps_its_lock(folder, *os.pipe())


def test_without_the_unlock_a_forked_child_keeps_the_lock(folder, monkeypatch):
    flock = fcntl.flock
    monkeypatch.setattr(files.fcntl, "flock", lambda fd, how: None if how == fcntl.LOCK_UN else flock(fd, how))
    assert _keeps_its_lock(folder, *os.pipe())


def test_a_file_that_others_can_write_is_refused_if_requested(folder):
    file = folder / "file"
    file.write_bytes(b"1")
    for mode in (0o664, 0o646):
        file.chmod(mode)
        assert files.read(file, 1) == b"1"
        with pytest.raises(PermissionError, match=rf"other users can write it \(uid \d+, mode {mode:o}\)"):
            files.read(file, 1, shared=False)
    file.chmod(0o644)
    assert files.read(file, 1, shared=False) == b"1"


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o770, 0o757])
def test_a_directory_in_which_others_replace_files_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match=rf"can change what is in it \(uid \d+, mode {mode:o}\)"):
        files.check_directory(tmp_path)
    tmp_path.chmod(mode | stat.S_ISVTX)
    files.check_directory(tmp_path)


def test_a_link_to_a_directory_is_followed_and_other_files_are_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    files.check_directory(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        files.check_directory(tmp_path / "file")


@as_root
def test_a_directory_or_a_link_of_another_user_is_refused(folder):
    (folder / "theirs").mkdir(mode=0o755)
    os.chown(folder / "theirs", OTHER, OTHER)
    (folder / "link").symlink_to("/etc")
    os.lchown(folder / "link", OTHER, OTHER)
    for name in ("theirs", "link"):
        with pytest.raises(PermissionError, match=f"uid {OTHER}"):
            files.check_directory(folder / name)


def test_a_new_directory_is_private_to_the_user(tmp_path):
    files.make_directory(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700

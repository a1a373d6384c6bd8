import os
import stat

import pytest

from prorl_gym.toolserver.file_editor import FileEditor


@pytest.fixture
def edit(tmp_path):
    editor = FileEditor(str(tmp_path), 20_000)
    return lambda command, path="f", **arguments: editor.run({"command": command, "path": path, **arguments})


def test_view_numbers_lines_as_cat_does(edit, tmp_path):
    (tmp_path / "f").write_text("a\nb\x0cc\u2028d\ne")
    assert edit("view").text == "     1\ta\n     2\tb\x0cc\u2028d\n     3\te"
    assert edit("view", view_range=[2, -1]).text.startswith("     2\t")
    assert edit("view", view_range=[2, 99]).text.endswith("     3\te")
    for wrong in ([0, 1], [4, 5], [3, 2]):
        reply = edit("view", view_range=wrong)
        assert reply.error
        assert "has 3 lines" in reply.text


def test_a_view_of_very_many_lines_keeps_both_ends(edit, tmp_path):
    (tmp_path / "f").write_text("".join(f"x{n}\n" for n in range(1_000_000)))
    text = edit("view").text
    assert text.startswith("     1\tx0\n")
    assert text.endswith("1000000\tx999999")
    assert "lines left out" in text
    assert len(text) < 70_000


def test_view_of_a_directory_is_two_levels_without_hidden_names(edit, tmp_path):
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "x.py").touch()
    assert edit("view", ".").text.splitlines()[1:] == ["  a/", "    b/", "  x.py"]


@pytest.mark.parametrize("content", [b"\x00\x01", b"\xff\xfe\x00\xd8", b"text\0more"])
def test_binary_files_are_refused(edit, tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    for reply in (
        edit("view"),
        edit("str_replace", old_str="t", new_str="u"),
        edit("insert", insert_line=0, new_str="x"),
    ):
        assert reply.error
        assert "binary" in reply.text
    assert (tmp_path / "f").read_bytes() == content


def test_devices_pipes_and_missing_files_are_errors_not_hangs(edit, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in edit("view", "pipe").text
    assert "not a regular file" in edit("view", "/dev/zero").text
    assert "No such file" in edit("view", "absent").text
    assert "more than" in edit("view", "/proc/self/pagemap").text
    assert "directory" in edit("str_replace", ".", old_str="a", new_str="b").text


def test_create_makes_parents_and_never_overwrites(edit, tmp_path):
    assert not edit("create", "d/e/f", file_text="x").error
    assert (tmp_path / "d/e/f").read_text() == "x"
    assert "exists already" in edit("create", "d/e/f", file_text="y").text
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "exists already" in edit("create", "link", file_text="y").text
    assert (tmp_path / "d/e/f").read_text() == "x"


@pytest.mark.parametrize(("content", "old"), [("kl\nm", ""), ("k\tl", "   "), ("abc", "abd"), ("", "x")])
def test_a_degenerate_or_absent_match_changes_nothing(edit, tmp_path, content, old):
    (tmp_path / "f").write_text(content)
    assert edit("str_replace", old_str=old, new_str="Q").error
    assert (tmp_path / "f").read_text() == content


def test_a_match_must_be_unique_and_the_places_are_named(edit, tmp_path):
    (tmp_path / "f").write_text("a\nb\na\n")
    reply = edit("str_replace", old_str="a", new_str="c")
    assert "2 times" in reply.text
    assert "lines 1, 3" in reply.text
    (tmp_path / "f").write_text("aaa")
    assert "2 times" in edit("str_replace", old_str="aa", new_str="c").text


def test_white_space_is_exact_and_a_near_miss_is_named(edit, tmp_path):
    (tmp_path / "f").write_text("def f():\n    return 1\n")
    reply = edit("str_replace", old_str="  return 1 ", new_str="    return 2  ")
    assert reply.error
    assert "other white space, at line 2" in reply.text
    (tmp_path / "f").write_text("if x:\n\ty=1\n\tz=2\n")
    edit("str_replace", old_str="\ty=1", new_str="\ty=9")
    assert (tmp_path / "f").read_text() == "if x:\n\ty=9\n\tz=2\n"


def test_mode_links_and_inode_are_kept(edit, tmp_path):
    script = tmp_path / "f"
    script.write_text("#!/bin/sh\necho a\n")
    script.chmod(0o755)
    (tmp_path / "hard").hardlink_to(script)
    (tmp_path / "soft").symlink_to("f")
    edit("str_replace", "soft", old_str="echo a", new_str="echo bb")
    assert stat.S_IMODE(script.stat().st_mode) == 0o755
    assert (tmp_path / "hard").read_text() == "#!/bin/sh\necho bb\n"
    assert (tmp_path / "soft").is_symlink()


@pytest.mark.parametrize(
    ("raw", "old", "new", "expected"),
    [
        (b"a\r\nb\r\nc\r\n", "a\nb", "x\ny", b"x\r\ny\r\nc\r\n"),
        (b"a\r\nb\nc", "b", "x", b"a\r\nx\nc"),
        ("\ufeffé\n".encode(), "é", "è", "\ufeffè\n".encode()),
        ("é\n".encode("latin-1"), "é", "è", "è\n".encode("latin-1")),
        ("\ufeffa\nb\n".encode("utf-16-le"), "a", "z", "\ufeffz\nb\n".encode("utf-16-le")),
        (b"a\nend", "a", "b", b"b\nend"),
        (b"\x1b[0m keep \x0c\na\n", "a", "b", b"\x1b[0m keep \x0c\nb\n"),
    ],
)
def test_bytes_outside_the_edit_stay(edit, tmp_path, raw, old, new, expected):
    (tmp_path / "f").write_bytes(raw)
    assert not edit("str_replace", old_str=old, new_str=new).error
    assert (tmp_path / "f").read_bytes() == expected


def test_text_that_the_encoding_cannot_hold_is_refused(edit, tmp_path):
    (tmp_path / "f").write_bytes(b"caf\xe9\n")
    assert "encoding" in edit("str_replace", old_str="caf", new_str="🚀").text
    assert (tmp_path / "f").read_bytes() == b"caf\xe9\n"


@pytest.mark.parametrize(
    ("content", "line", "new", "expected"),
    [
        ("a\nb", 2, "c", "a\nb\nc"),
        ("a\nb\n", 2, "c", "a\nb\nc\n"),
        ("a\nb\n", 0, "c\nd\n", "c\nd\na\nb\n"),
        ("a\nb\n", 1, "c", "a\nc\nb\n"),
        ("", 0, "c", "c\n"),
    ],
)
def test_insert(edit, tmp_path, content, line, new, expected):
    (tmp_path / "f").write_text(content)
    assert not edit("insert", insert_line=line, new_str=new).error
    assert (tmp_path / "f").read_text() == expected


def test_insert_outside_the_file_is_refused(edit, tmp_path):
    (tmp_path / "f").write_text("a\n")
    for line in (-1, 2):
        assert "has 1 lines" in edit("insert", insert_line=line, new_str="x").text


def test_snippets_carry_the_files_own_line_numbers(edit, tmp_path):
    (tmp_path / "f").write_text("".join(f"line {n}\n" for n in range(1, 501)))
    assert "   321\tnew 321\n" in edit("str_replace", old_str="line 321\n", new_str="new 321\n").text
    reply = edit("insert", insert_line=400, new_str="inserted").text
    assert "   400\tline 400\n   401\tinserted\n   402\tline 401\n" in reply


def test_undo_takes_edits_back_one_by_one(edit, tmp_path):
    edit("create", file_text="one\n")
    edit("str_replace", old_str="one", new_str="two")
    edit("insert", insert_line=1, new_str="three")
    edit("undo_edit")
    assert (tmp_path / "f").read_text() == "two\n"
    edit("undo_edit")
    assert (tmp_path / "f").read_text() == "one\n"
    edit("undo_edit")
    assert not (tmp_path / "f").exists()
    assert "no edit" in edit("undo_edit").text


def test_undo_refuses_when_something_else_changed_the_file(edit, tmp_path):
    edit("create", file_text="one\n")
    (tmp_path / "f").write_text("other")
    assert "changed by something else" in edit("undo_edit").text
    assert (tmp_path / "f").read_text() == "other"


def test_a_failed_write_is_taken_back(edit, tmp_path, monkeypatch):
    (tmp_path / "f").write_text("a" * 5000 + "END")
    real, calls = os.pwrite, []

    def full_disk(descriptor, view, offset):
        calls.append(offset)
        if len(calls) == 1:
            return real(descriptor, view[:10], offset)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(descriptor, view, offset)

    monkeypatch.setattr(os, "pwrite", full_disk)
    reply = edit("str_replace", old_str="END", new_str="b" * 100)
    assert "No space left" in reply.text
    assert (tmp_path / "f").read_text() == "a" * 5000 + "END"

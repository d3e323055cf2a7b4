"""Nothing is there for its own tests alone."""

import unused


def test_every_name_and_parameter_has_a_use_or_a_reason():
    assert sorted(unused.KEPT) == sorted(unused.without_use())


def test_a_name_and_a_parameter_without_a_use_are_found(tmp_path, monkeypatch):
    room = tmp_path / "room"
    room.mkdir()
    (room / "__init__.py").write_text(
        '__all__ = ["idle", "busy", "Thing"]\nbusy(1, c=2)\nThing'
    )
    (room / "work.py").write_text(
        "_LIMIT, _MOST = 1, 2\n"
        "def idle(): ...\n"
        "def _unasked(): return _LIMIT\n"
        "def busy(a, b, *, c): ...\n"
        "class Thing:\n"
        "    def __init__(self, size): ...\n"
    )
    monkeypatch.setattr(unused, "PACKAGE", tmp_path)
    monkeypatch.setattr(unused, "KEPT", {"room.Thing(size)": "a reason"})
    monkeypatch.setattr(unused, "notebooks", lambda: [])
    monkeypatch.setattr(unused, "ROOT", tmp_path)
    (tmp_path / "README.md").write_text("")
    private = ["work._MOST", "work._unasked"]
    assert unused.unused() == [*private, "room.idle", "room.busy(b)"]

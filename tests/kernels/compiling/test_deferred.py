"""Forms are loaded at their first use, and cost no import afterwards."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from weft.kernels.shared.deferred import deferred


def test_a_module_takes_its_place_at_its_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_form.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    user = ModuleType("user_of_a_late_form")
    monkeypatch.setitem(sys.modules, user.__name__, user)
    stand_in = deferred(user.__name__, "late_form")
    vars(user)["_form"] = stand_in
    assert "late_form" not in sys.modules
    assert stand_in.double(2) == 4
    form = sys.modules.pop("late_form")
    assert vars(user)["_form"] is form


def test_a_module_that_is_missing_is_named_at_its_first_use() -> None:
    """And at every later one."""
    form = deferred(__name__, "weft.kernels.no_such_form")
    for _ in range(2):
        with pytest.raises(ImportError, match="no_such_form"):
            form.double(2)

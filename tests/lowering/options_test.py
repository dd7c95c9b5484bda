"""Options that an option does not take are named where they are written."""
from __future__ import annotations

import pytest

import tiletrace as tt
from tiletrace.core.errors import TileTypeError


@pytest.mark.parametrize(("given", "hint"), [
    ({"l2_promotion": 512}, "bytes that TMA brings into L2: 0, 64, 128, 256"), ({"l2_promotion": "128"}, "bytes"),
    ({"l2_promotion": True}, "bytes"), ({"ctas_per_sm": 0}, "an int from 1 to 32"), ({"ctas_per_sm": 2.0}, "an int"),
    ({"overlap_launch": 1}, "True or False"), ({"debug": "yes"}, "True or False"), ({"target": 90}, '"sm_90a"'),
    ({"force": ("copy", "tma")}, "(op, variant)"), ({"force": {"copy": "tma"}}, "(op, variant)")], ids=str)
def test_a_value_that_an_option_does_not_take_is_refused_on_the_line_that_gives_it(given, hint):
  with pytest.raises(TileTypeError) as e:
    tt.CompileOptions(**given)

  (name, value), text = next(iter(given.items())), str(e.value)
  assert f"CompileOptions: {name}={value!r}" in text and hint in text
  assert "options_test.py" in text and "tt.CompileOptions(**given)" in text


def test_what_is_no_options_is_refused():
  options = {"debug": True}
  with pytest.raises(TileTypeError, match=r"tile_call\(kernel\): options=\{'debug': True\}(.*\n)*.*tt.CompileOptions"):
    tt.tile_call(lambda x, y: None, (), grid=1, name="kernel", options=options)  # type: ignore[arg-type]

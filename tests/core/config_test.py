"""The TT_* switches."""
from __future__ import annotations

import dataclasses
import doctest
import os

import pytest

from tiletrace.core import config
from tiletrace.core.config import Config, ConfigError, Dump, describe, read


def test_defaults_hold_where_nothing_is_set():
  assert read({}) == Config(dump=Dump(), force=(), cache=True, cache_dir=os.path.expanduser("~/.cache/tiletrace"),
                            ptxas=None, lineinfo=False, verify=True, stop_after=None, backend=None,
                            debug=False, profile=False, target=None)


def test_an_empty_variable_counts_as_not_set():
  assert read({s.name: "" for s in config.SWITCHES}) == read({})


def test_every_switch_is_read():
  got = read({"TT_DUMP": "layout, ptx", "TT_FORCE": "copy:tma,reduce:shuffle", "TT_CACHE": "0", "TT_CACHE_DIR": "/c",
              "TT_PTXAS": "/bin/ptxas", "TT_LINEINFO": "1", "TT_VERIFY": "0", "TT_STOP_AFTER": "schedule",
              "TT_BACKEND": "sim", "TT_DEBUG": "1", "TT_PROFILE": "1", "TT_TARGET": "sm_80"})
  assert got == Config(dump=Dump(frozenset({"layout", "ptx"})), force=(("copy", "tma"), ("reduce", "shuffle")),
                       cache=False, cache_dir="/c", ptxas="/bin/ptxas", lineinfo=True, verify=False,
                       stop_after="schedule", backend="sim", debug=True, profile=True, target="sm_80")


def test_dumps_name_stages_and_a_directory():
  dump = read({"TT_DUMP": "all@/tmp/x"}).dump
  assert dump.directory == "/tmp/x"
  assert dump.wants("ptx")
  assert not read({"TT_DUMP": "layout"}).dump.wants("ptx")
  assert not read({}).dump.wants("ptx")


@pytest.mark.parametrize("name, value, expected", [
    ("TT_CACHE", "yes", "0 or 1"), ("TT_LINEINFO", "true", "0 or 1"), ("TT_DUMP", "all@", "a directory"),
    ("TT_FORCE", "copy", "op:variant"), ("TT_FORCE", "copy:a:b", "op:variant"), ("TT_FORCE", "copy:", "op:variant"),
    ("TT_BACKEND", "gpu", "xla or sim"), ("TT_DEBUG", "on", "0 or 1")])
def test_a_value_that_is_not_understood_is_an_error_with_an_example(name, value, expected):
  with pytest.raises(ConfigError) as e:
    read({name: value})
  assert f"{name} must be " in str(e.value)
  assert expected in str(e.value)
  assert f"{name}={next(s.example for s in config.SWITCHES if s.name == name)}" in str(e.value)


def test_switches_are_read_at_use(monkeypatch):
  monkeypatch.setenv("TT_STOP_AFTER", "layout")
  assert read().stop_after == "layout"
  monkeypatch.setenv("TT_STOP_AFTER", "ptx")
  assert read().stop_after == "ptx"


def test_the_table_has_each_switch_once_and_each_field_its_switch():
  assert {s.field for s in config.SWITCHES} == {f.name for f in dataclasses.fields(Config)}
  table = describe()
  assert all(table.count(f"| `{s.name}` |") == 1 for s in config.SWITCHES)
  assert all(read({s.name: s.example}) != read({}) for s in config.SWITCHES)


def test_examples_in_docstrings_hold():
  assert doctest.testmod(config).failed == 0

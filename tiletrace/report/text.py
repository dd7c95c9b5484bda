"""A report for people."""
from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Data = dict[str, Any]


def readable(d: Data) -> str:
  """The report's data as text."""
  out = [f"{d['kernel']} ({d['source']}) for {d['target']}: grid {tuple(d['grid'])}, {d['threads']} threads, "
         f"{d['smem_bytes']} bytes of shared memory"]
  out += _work(d)
  out += _section("operations", _ops(d["ops"]))
  out += _section("conversions of layouts", map(_conversion, d["conversions"]))
  out += _section("layouts", _layouts(d["layouts"]))
  out += _section("schedule", d["notes"])
  out += _section("barriers", _barriers(d))
  out += _section("shared memory over time", _shared_memory(d["shared_memory"]))
  out += _section("registers", _registers(d))
  out += _section("occupancy", _occupancy(d))
  return "\n".join(out) + "\n"


def _section(title: str, lines: Iterable[str]) -> list[str]:
  found = [f"  {line}" for line in lines]
  return [f"{title}:", *found] if found else []


def _times(n: int, unit: str = "x") -> str:
  return f"  {n}{unit}" if n != 1 else ""


def _plural(n: int, what: str) -> str:
  return f"{n} {what}{'' if n == 1 else 's'}"


def _si(n: float) -> str:
  """With three decimals and a prefix of SI."""
  for prefix, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
    if n >= unit:
      return f"{n / unit:.3f} {prefix}"
  return f"{n} "


# ---- work


def _work(d: Data) -> Iterator[str]:
  w, r, c = d["work"], d["roofline"], d["cost"]
  parts = [f"{_si(c['flops'])}FLOP of matrix products in {', '.join(w['tensor_flops'])}"] if c["flops"] else []
  parts += [f"{_si(w['other_flops'])}FLOP of other arithmetic"] if w["other_flops"] else []
  parts.append(f"{_si(c['bytes'])}B of arguments")
  yield "  " + ", ".join(parts) + ("" if w["exact"] else " (at least: trip counts depend on data)")
  if r["bound"] is None:
    return
  times = ", ".join(f"{k} {s * 1e6:.2f} us" for k, s in r["seconds"].items() if s)
  yield f"  at least {r['at_least_seconds'] * 1e6:.2f} us on one {r['device']}, bound by {r['bound']} ({times})"
  yield (f"  asks for {_si(w['loaded_bytes'])}B and stores {_si(w['stored_bytes'])}B of global memory"
         + (f"; {w['wavefronts']} bank wavefronts, {w['least_wavefronts']} without conflicts" if w["wavefronts"]
            else ""))
  yield (f"  {r['flops_per_byte']:.1f} FLOPs a byte; from {r['ridge_flops_per_byte']:.0f} on, arithmetic bounds"
         + (f"; {r['sms_used']:.0%} of the SMs have a program" if r["sms_used"] < 1 else ""))


# ---- operations


def _ops(ops: Sequence[Data]) -> Iterator[str]:
  """Those with a choice or with accesses in full; what only computes, by line."""
  def computes(op: Data) -> tuple[bool, str]:
    return op["variant"] is None and not op["accesses"], op["line"]

  for (plain, line), group in itertools.groupby(ops, key=computes):
    if plain:
      held = [(o["op"], o["layout"]) for o in group]
      yield f"{line}  {_in_layouts(held)}"
      continue
    for op in group:
      yield (f"{line}  {op['op']}{': ' + op['variant'] if op['variant'] is not None else ''}"
             f"{' in ' + op['layout'] if op['layout'] is not None else ''}{_times(op['count'])}")
      yield from (f"    {_access(a)}" for a in op["accesses"])
      yield from (f"    not {x['variant']}: {x['reason']}" for x in op["declined"])


def _in_layouts(held: Sequence[tuple[str, str | None]]) -> str:
  parts = []
  for layout, group in itertools.groupby(held, key=lambda h: h[1]):
    names = [name for name, _ in group]
    listed = ", ".join(f"{n} ({names.count(n)}x)" if names.count(n) > 1 else n for n in dict.fromkeys(names))
    parts.append(listed + (f" in {layout}" if layout is not None else ""))
  return "; ".join(parts)


def _access(a: Data) -> str:
  where = f"{a['buffer']} {a['layout']}" if a["layout"] is not None else a["buffer"]
  unit = "box" if a["instruction"].startswith("TMA") else "instruction"
  count = f"{a['instructions']} {unit}{'' if a['instructions'] == 1 else 'es' if unit == 'box' else 's'}"
  parts = [f"{where}: {a['instruction']}", count, f"{a['nbytes']} bytes"]
  if a["wavefronts"] is not None:
    more = a["wavefronts"] - a["least_wavefronts"]
    parts.append(_plural(a["wavefronts"], "bank wavefront")
                 + (f", {more} by conflicts" if more else ", no conflicts"))
  if a["sectors"] is not None:
    parts.append(_plural(a["sectors"], "sector")
                 + (f", {a['least_sectors']} would do" if a["sectors"] > a["least_sectors"] else ""))
  return ", ".join(parts) + f"  ({a['role']}){_times(a['count'] * a['trips'])}{'' if a['exact'] else ' or other'}"


def _conversion(c: Data) -> str:
  cost = (f"{_plural(c['shuffles'], 'shuffle')}, {_plural(c['instructions'], 'instruction')} a thread"
          if c["class"] == "shuffle" else f"{c['shared_bytes']} bytes through shared memory" if c["class"] == "shared"
          else f"{_plural(c['instructions'], 'byte permute')} a thread" if c["instructions"] else "free")
  return f"{c['line']}  {c['type']} from {c['from']} to {c['to']}: {c['class']}, {cost}{_times(c['trips'])}"


def _layouts(layouts: Data) -> Iterator[str]:
  for name, x in layouts.items():
    held = (f"{_plural(x['elements_per_thread'], 'element')} a thread"
            + (f" ({', '.join(map(str, x['registers']))} registers)" if x["registers"] else "")
            + f", {_plural(x['warps'], 'warp')}" + (f", {x['copies']} copies" if x["copies"] > 1 else "")
            if x["of"] == "registers" else "shared memory, element offsets")
    yield f"{name} = {x['layout']}"
    yield f"  of {', '.join(x['variables'][:8])}{', ...' if len(x['variables']) > 8 else ''}: {held}"
    yield from (f"    {line}" for line in x["drawing"])


# ---- resources


def _barriers(d: Data) -> Iterator[str]:
  for b in d["mbarriers"]:
    yield f"{b['barrier']}: {_plural(b['count'], 'mbarrier')}, {_plural(b['arrivals'], 'arrival')} a phase"
    yield from (f"  {u['role']} {u['what']}{' ' + str(u['bytes']) + ' bytes' if 'bytes' in u else ''} at {u['line']}"
                f"{_times(u['trips'])}" for u in b["uses"])
  for o in d["ordering"]:
    detail = f" ({o['detail']})" if o["detail"] else ""
    yield (f"{o['line']}  {o['op']}{detail}" + (f" of {o['threads']} threads" if o["op"] == "sync" else "")
           + f", {o['role']}{_times(o['count'] * o['trips'])}")


def _shared_memory(m: Data) -> Iterator[str]:
  """One row a buffer, one column a line of the kernel; w: written, r: read, b: both, a dash: held."""
  steps, marks = m["steps"], {"read": "r", "write": "w", "read and write": "b"}
  if not m["buffers"]:
    return
  for i, (role, group) in enumerate(itertools.groupby(enumerate(steps), key=lambda s: s[1]["role"])):
    columns = list(group)
    numbers = f"{columns[0][0] + 1}-{columns[-1][0] + 1}" if len(columns) > 1 else f"{columns[0][0] + 1}"
    lines = ", ".join(s["line"] for _, s in columns)
    yield f"{'columns ' if i == 0 else '        '}{numbers}: {role} at {lines}"
  width = max(len(b["buffer"]) for b in m["buffers"])
  for b in m["buffers"]:
    row = ["-" if b["live"] and b["live"][0] <= i <= b["live"][1] else "." for i in range(len(steps))]
    for use in b["uses"]:
      row[use["step"]] = marks[use["access"]]
    yield f"{b['offset']:>8} {b['bytes']:>8}  {b['buffer'].ljust(width)} |{''.join(row)}| {b['type']}"
  yield f"{m['live_peak_bytes']} bytes of {m['bytes']} are live at once"


def _registers(d: Data) -> Iterator[str]:
  r = d["registers"]
  if "at_entry" in r:
    yield (f"{r['at_entry']} a thread at entry, of {r['at_most_at_entry']} that {d['threads']} threads can have; "
           f"{r['spill_stores']} bytes spilled, {r['spill_loads']} loaded back")
  else:
    yield f"at most {r['at_most_at_entry']} a thread at entry; compile() tells what ptxas took"
  for role in r["roles"]:
    held = ", ".join(f"{f['fragment']} {f['registers']}" for f in role["fragments"])
    budget = f", {role['budget']} by setmaxnreg" if role["budget"] is not None else ""
    yield (f"{role['role']}{budget}: {role['fragment_registers']} in fragments" + (f" ({held})" if held else ""))
  yield from d.get("assembled", {}).get("warnings", ())


def _occupancy(d: Data) -> Iterator[str]:
  o = d["occupancy"]
  each = ", ".join(f"{k} {n}" for k, n in o["limits"].items())
  unknown = "" if o["registers_known"] else "; registers are not known before compile()"
  yield f"{_plural(o['ctas_per_sm'], 'CTA')} an SM, limited by {o['limited_by']} ({each}{unknown})"
  yield f"{o['warps_per_sm']} of {o['most_warps_per_sm']} warps an SM"
  if o["persistent"]:
    taken = ", each taken when one is free" if o["persistent"] == "dynamic" else ""
    yield f"{_plural(o['programs'], 'program')} on {_plural(o['ctas'], 'persistent CTA')}{taken}, {o['busy']:.0%} busy"
  else:
    yield f"{_plural(o['programs'], 'program')} in {o['waves']:.2f} waves, {o['busy']:.0%} of their places taken"

"""PTX of blocks that run in clusters and bring each other what all of them need; triton 3.6 has no words for it.

Copies by tensor maps become multicasts where the record says so: `ptx.evicting`. Here stand the meetings of the blocks:

- Before a block may write to another one, the barriers of that must be there: all threads meet once they are.
- An arrival that says that a slot has been read goes to the barriers of all blocks.
- What a role stores for another one in another block (`block/spread.py`) goes there, and then its arrival; whoever
  waits for that sees the numbers.
- A block must not end while another may still reach its shared memory: the role that fills slots waits for the last
  arrivals of all of them (`block/emit_roles.py`).

The emitter marks where barriers are there, and the arrivals. A text of which anything is not understood is refused.
"""

from __future__ import annotations

import re

MARK = "// jtile.cluster"
READY, ARRIVE = "ready", "arrive"
FAR, NEAR, ARRIVE_AT, AWAIT = "far", "near", "arrive at", "await"  # what follows reaches another block, or waits for it
SHARED = ".multicast::cluster "  # what a copy to all blocks says
WAITS = "griddepcontrol.wait"  # the instruction that waits for the kernels in front
_START = re.compile(r"^\{\n", re.M)
_ARRIVE = re.compile(r"^\s*(@!?%p\d+ )?\s*mbarrier\.arrive\.shared::cta\.b64 _, \[(%r\d+)\](, \d+)?;\s*$")
_FAR_STORE = re.compile(r"^\s*st\.shared((?:\.v(\d))?\.b(\d+))\s+\[(%r\d+)(\+\d+)?\], (.*;)\s*$")
_AWAIT = re.compile(r"mbarrier\.try_wait\.parity\.shared(::cta)?\.b64")
_THREADS = re.compile(r"^\.reqntid ", re.M)
_RETURN = re.compile(r"^\s*ret;\s*$")
_WAIT = "\tbarrier.cluster.wait.aligned;"


def met(text: str, blocks: int, warps: int) -> str:
    """PTX of a kernel in clusters of `blocks` blocks, whose first role has `warps` warps. Where it may start while the
    kernel in front of it runs, it says itself how large its clusters are, since no node of a command buffer can.

    Raises:
      ValueError: something stands where it was not expected.
    """
    out: list[str] = []
    pending, ready = "", 0  # what is to come
    for line in _to_others(text.split("\n"), 32 * warps):
        if pending and (found := _ARRIVE.match(line)):
            out += _at_all(found[1] or "", found[2], found[3] or "", blocks)
            pending = ""
            continue
        if pending and (line.strip().startswith("$L") or "mbarrier" in line):
            raise ValueError(f"the arrival of a cluster is not understood: {line.strip()}")
        if _RETURN.match(line):
            out.append("\t@%cluster_worker barrier.cluster.wait.aligned;")
        out.append(line)
        if MARK in line:
            what = line.split(MARK)[1].strip()
            pending = what if what == ARRIVE else ""
            if what == READY:
                ready += 1
                out += ["\tfence.mbarrier_init.release.cluster;", "\tbarrier.cluster.arrive.relaxed.aligned;", _WAIT]
    reaches = SHARED in text or f"{MARK} {FAR}" in text
    if pending or ready != 1 or not any(map(_RETURN.match, out)) or not reaches:
        raise ValueError("the meetings of a cluster are not where they were expected")
    # Threads of other roles arrive at the first meeting at once: they hear of its end from the first role.
    begin = (
        "\t.reg .pred %cluster_worker;\n\t.reg .b32 %cluster_thread;\n\tmov.u32 %cluster_thread, %tid.x;\n"
        f"\tsetp.ge.u32 %cluster_worker, %cluster_thread, {32 * warps};\n"
        "\t@%cluster_worker barrier.cluster.arrive.relaxed.aligned;\n"
    )
    text = _START.sub(lambda m: m[0] + begin, "\n".join(out), count=1)
    says = f".reqnctapercluster {blocks}, 1, 1\n" if WAITS in text else ".explicitcluster\n"
    return _THREADS.sub(lambda m: f"{says}{m[0]}", text, count=1)


def _at_all(when: str, barrier: str, count: str, blocks: int) -> list[str]:
    """An arrival at the barrier of each block of a cluster."""
    lines = ["\t{", "\t.reg .b32 %there;"]
    for block in range(blocks):
        lines.append(f"\tmapa.shared::cluster.u32 %there, {barrier}, {block};")
        lines.append(f"\t{when}mbarrier.arrive.shared::cluster.b64 _, [%there]{count};")
    return [*lines, "\t}"]


def _to_others(lines: list[str], threads: int) -> list[str]:
    """Lines in which what is marked so reaches another block: stores, and the arrival behind them."""
    out: list[str] = []
    state, block, left = "", "", 0  # the mark whose lines come, the block, and bytes to be stored
    for line in lines:
        if MARK in line:
            words = line.split(MARK)[1].split()
            if words[0] == NEAR:
                if state != FAR or left:
                    raise ValueError(f"stores to another block of a cluster are not understood: {left} bytes miss")
                line, state = f"{line}\n\tfence.acq_rel.cluster;", ""
            elif words[0] == FAR:
                state, block, left = FAR, words[1], int(words[2])
            elif words[:2] == ARRIVE_AT.split():
                state, block = ARRIVE_AT, words[2]
            elif words[0] == AWAIT:
                state = AWAIT
        elif state == FAR and (found := _FAR_STORE.match(line)):
            left -= threads * int(found[2] or 1) * int(found[3]) // 8
            out += ["\t{", "\t.reg .b32 %there;", f"\tmapa.shared::cluster.u32 %there, {found[4]}, {block};"]
            out += [f"\tst.shared::cluster{found[1]} [%there{found[5] or ''}], {found[6]}", "\t}"]
            continue
        elif state == ARRIVE_AT and (found := _ARRIVE.match(line)):
            out += ["\t{", "\t.reg .b32 %there;", f"\tmapa.shared::cluster.u32 %there, {found[2]}, {block};"]
            arrive = "mbarrier.arrive.release.cluster.shared::cluster.b64"
            out += [f"\t{found[1] or ''}{arrive} _, [%there]{found[3] or ''};", "\t}"]
            state = ""
            continue
        elif state == AWAIT and _AWAIT.search(line):
            line = _AWAIT.sub("mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64", line)
            state = ""
        elif state and (line.strip().startswith("st.") or "mbarrier" in line):
            raise ValueError(f"what reaches another block of a cluster is not understood: {line.strip()}")
        out.append(line)
    if state:
        raise ValueError("what reaches another block of a cluster is not where it was expected")
    return out

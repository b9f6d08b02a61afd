"""Read and draw the waveform file (VCD) that a testbench leaves."""

import re
from pathlib import Path

from helpers import style


def read_vcd(path, limit=4 << 20):
    """Read a waveform file: {signal: [(time, value as a string of 0 1 x z, one per bit), ...]}.

    Of several values at one time only the last, the settled one, is kept.
    """
    text = Path(path).read_text(errors="replace")[:limit]
    signals, changes, now = {}, {}, 0
    head, _, body = text.partition("$enddefinitions")
    for width, key, name in re.findall(r"\$var \w+ +(\d+) +(\S+) +(\S+)[^$]*\$end", head):
        signals.setdefault(key, (name, int(width)))
    for line in body.splitlines():
        if line.startswith("#"):
            now = int(line[1:])
            continue
        value, _, key = line[1:].partition(" ") if line[:1] in "bB" else (line[:1], "", line[1:])
        if key in signals and set(value) <= set("01xzXZ"):
            name, width = signals[key]
            value = value.lower().rjust(width, value[0].lower() if value[0] in "xzXZ" else "0")
            events = changes.setdefault(name, [])
            if events and events[-1][0] == now:
                events.pop()
            if not events or events[-1][1] != value:
                events.append((now, value))
    return changes


def draw_waves(ax, changes, at, before=60, after=40):
    """Draw signals around time `at`: one lane each, buses with their values in hexadecimal."""
    start, end = max(0, at - before), at + after
    lanes = [name for name in changes if name != "tb_mismatch"][:12]
    lanes += ["tb_mismatch"] * ("tb_mismatch" in changes)
    for lane, name in enumerate(reversed(lanes)):
        events = [event for event in changes[name] if event[0] <= end]
        for (time_, value), (until, _) in zip(events, [*events[1:], (end, "")], strict=True):
            left, right = max(time_, start), min(until, end)
            known = set(value) <= {"0", "1"}
            if right <= left:
                continue
            if len(value) == 1 and known:
                level = lane + 0.6 * int(value)
                ax.plot([left, right], [level, level], color=style.BLUE, linewidth=1.5)
                if left > start:
                    ax.plot([left, left], [lane, lane + 0.6], color=style.BLUE, linewidth=0.8)
                continue
            ax.fill_between([left, right], lane, lane + 0.6, linewidth=0,
                            color=style.SKY if known else "#DDDDDD")
            ax.plot([left, left], [lane, lane + 0.6], color="white", linewidth=2.5)
            shown = f"{int(value, 2):x}" if known else value[:4]
            if right - left >= 0.015 * len(shown) * (end - start):
                ax.text((left + right) / 2, lane + 0.28, shown, ha="center", va="center",
                        fontsize=8)
    ax.axvline(at, color=style.RED, linestyle="--", linewidth=1)
    ax.set_yticks([lane + 0.3 for lane in range(len(lanes))], list(reversed(lanes)))
    ax.set(xlabel="simulation time (ps)", xlim=(start, end))
    ax.grid(False)

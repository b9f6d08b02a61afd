"""Why each flag of the serving command is there: 05's table, for Docker's options and vLLM's."""

from pathlib import Path

import pandas as pd

YOURS = "yours, from the settings"


def _reasons() -> dict[str, str]:
    """flags.csv: the reason by flag, and by variable that the command sets."""
    table = pd.read_csv(Path(__file__).with_suffix(".csv"))
    return dict(zip(table.flag, table.why, strict=True))


def explain(command: list[str]) -> pd.DataFrame:
    """One row per flag: the flag, its values, the reason; `YOURS` where flags.csv knows none.

    Docker's `-e` has the reasons of the variables that it sets.
    """
    first = "run" if "run" in command else "serve"
    begin = command.index(first) + 1
    values: dict[str, list[str]] = {}
    flag = ""
    for part in command[begin:]:
        if part.startswith("-"):
            flag, equals, value = part.partition("=")
            known = values.setdefault(flag, [])
            if equals:
                known.append(value)
        elif flag:
            values[flag].append(part)
    reasons = _reasons()
    variables = []
    for setting in values.get("-e", ()):
        name = setting.partition("=")[0]
        variables.append(reasons.get(name, f"{name}: {YOURS}"))
    reasons["-e"] = "; ".join(variables)
    table = []
    for flag, given in values.items():
        why = reasons.get(flag, YOURS)
        table.append({"flag": flag, "value": " ".join(given), "why": why})
    return pd.DataFrame(table).set_index("flag")

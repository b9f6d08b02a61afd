"""Why each flag of the serving command is there: 05's table, for Docker's options and vLLM's."""

from pathlib import Path

import pandas as pd

YOURS = "yours, from the settings"


def _reasons() -> dict[str, str]:
    """flags.csv: the reason by flag, and by variable that the command sets."""
    path = Path(__file__).with_suffix(".csv")
    table = pd.read_csv(path, index_col="flag")
    return table.why.to_dict()


def explain(command: list[str]) -> pd.DataFrame:
    """One row per flag: the flag, its values, the reason; `YOURS` where flags.csv knows none.

    Docker's `-e` has the reasons of the variables that it sets.
    """
    values = _values_by_flag(command)
    reasons = _reasons()
    variables = []
    for setting in values.get("-e", ()):
        name, _, _ = setting.partition("=")
        unknown = f"{name}: {YOURS}"
        reason = reasons.get(name, unknown)
        variables.append(reason)
    reasons["-e"] = "; ".join(variables)

    rows = []
    for flag, words in values.items():
        row = {
            "flag": flag,
            "value": " ".join(words),
            "why": reasons.get(flag, YOURS)}
        rows.append(row)
    return pd.DataFrame(rows).set_index("flag")


def _values_by_flag(command: list[str]) -> dict[str, list[str]]:
    """The words behind each flag of a command, in order; a flag that comes twice has both."""
    first = "serve"
    if "run" in command:  # of Docker
        first = "run"
    begin = command.index(first) + 1
    values: dict[str, list[str]] = {}
    flag = ""
    for word in command[begin:]:
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            known = values.setdefault(flag, [])
            if equals:
                known.append(value)
        elif flag:
            values[flag].append(word)
    return values

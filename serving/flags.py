"""Why each flag of the serving command is there: 05's table, for Docker's options and vLLM's."""

from pathlib import Path

import pandas as pd

YOURS = "yours, from the settings"


def explain(command):
    """One row per flag: the flag, its values, the reason; `YOURS` where flags.csv knows none.

    Docker's `-e` has the reasons of the variables that it sets.
    """
    reasons = dict(pd.read_csv(Path(__file__).with_suffix(".csv")).values)
    rows = {}
    first = command.index("run") + 1 if "run" in command else command.index("serve") + 1
    for part in command[first:]:
        if part.startswith("-"):
            flag, equals, value = part.partition("=")
            rows.setdefault(flag, []).extend([value] if equals else [])
        elif rows:
            rows[flag].append(part)
    names = [variable.partition("=")[0] for variable in rows.get("-e", ())]
    reasons["-e"] = "; ".join(reasons.get(name, f"{name}: {YOURS}") for name in names)
    return pd.DataFrame([(flag, " ".join(values), reasons.get(flag, YOURS)) for flag, values in rows.items()],
                        columns=["flag", "value", "why"]).set_index("flag")

"""What the site's page "What will it cost me?" computes with. Standard library only."""

import math

from tpu_time import bands, fit


def _row(step: fit.Fit, dollars: float) -> dict:
    """One slice and base dtype, under the names that cost.js reads; no price: None."""
    return {"slice": step.slice, "model": step.model, "base": step.base_dtype, "remat": step.remat,
            "rows": step.rows, "length": step.row_length, "fits": step.fits,
            "compiled": step.compiled, "gib": round(step.total, 2), "limit": round(step.limit, 2),
            "speed": step.speed or step.bound, "predicted": step.speed is not None,
            "slowed": step.slowed,
            "saveEvery": fit.save_every(step), "assumed": fit.assumed_of(step),
            "stepTokens": fit.step_tokens(step), "forward": 2 / fit.STEP_FLOPS[step.remat],
            "answers": fit.answer_minutes(step), "pace": step.pace,
            "price": None if math.isnan(dollars) else dollars}


def page_data() -> dict:
    """Everything that the page needs, as JSON can hold it."""
    rows = []
    for step, dollars in fit.renters_rows(("31b",)):
        rows.append(_row(step, dollars))
    for step, dollars in fit.renters_rows(fit.SMALL, fit.ONE_CHIP | fit.SLICES):
        rows.append(_row(step, dollars))
    saved = {}
    for model in fit.CHECKPOINT_GB:
        saved[model] = fit.ADAPTER_BYTES * fit.adapter_parameters(model) / 1e9
    return {"rows": rows, "fill": fit.FILL, "every": fit.EVERY,
            "heldOut": fit.HELD_OUT, "gbPerS": fit.GB_PER_S,
            "whereFrom": fit.WHERE_FROM,
            "miss": math.exp(bands.typical_miss()), "compileMinutes": fit.COMPILE_MINUTES,
            "checkpointGb": fit.CHECKPOINT_GB, "savedGb": saved}

"""Which part of the model does an instruction of a compiled step belong to?

The answer stands in the instruction's own name: where the code runs, `jax.named_scope` names what
it is (`helpers/gemma.py`, `helpers/train.py`), and XLA keeps that name as `op_name`. So nothing
here knows a function of another file; whoever renames one changes no attribution.
"""

import re

from tpu_time.hlo import Place

PARTS = ("MLP", "output matrix", "projections", "attention", "LoRA", "norms", "conversions",
         "optimizer", "other")
# A scope, and the part that it means. `lora` and `base` are looked at before.
SCOPES = {"norm": "norms", "mlp": "MLP", "attention": "attention", "projection": "projections",
          "output_matrix": "output matrix", "loss": "output matrix", "optimizer": "optimizer"}
# Tunix's trainer names nothing, so of the published step three parts are known by their functions.
UPDATE = re.compile(r"^(Optimizer\.|MultiSteps|scale_by_|global_norm|clip_by_|apply_updates|tree_|"
                    r"add_decayed|safe_increment)")
LOSS = ("Embedder.decode", "_default_loss_fn")
STOCK_LORA = ("_compute_lora_delta", "LoraProvider.")


def scopes_of(op_name: str) -> list[str]:
    """The names that an operation stands under, outermost first.

    JAX writes `jit(step)/transpose(jvp(hidden_states))/mlp/lora/dot_general`: a transformation
    stands around the first name inside it.
    """
    names = re.split(r"[/()]", op_name)
    return [name for name in names if name]


def part_of(stack: list[Place], op_name: str, product: bool, moves: bool) -> str:
    """The part of the model that an instruction belongs to, one of `PARTS`.

    Args:
      stack: the calls that made it, innermost first.
      op_name: JAX's name of the operation, with its scopes.
      product: it contains a matrix product, or moves what one needs or made over the links.
      moves: it only converts, copies or rearranges.
    """
    scopes = scopes_of(op_name)
    names = [place.function for place in stack]
    is_update = any(UPDATE.match(name) for name in names)
    if is_update or "optimizer" in scopes:
        return "optimizer"
    if product and _is_adapter(scopes, names, op_name):
        return "LoRA"
    if moves and not product:
        return "conversions"
    for scope in reversed(scopes):  # the innermost that means something
        if scope == "projection" and not product:
            continue  # what is done to queries, keys and values is attention
        if scope in SCOPES:
            return SCOPES[scope]
    is_loss = any(name.startswith(LOSS) for name in names)
    if is_loss or "log_softmax" in op_name:
        return "output matrix"
    return "other"


def _is_adapter(scopes: list[str], names: list[str], op_name: str) -> bool:
    """Is this product one of A or B? The base's own stands under `lora`, too, but in `base`."""
    if "lora" in scopes:
        return "base" not in scopes
    equation = re.search(r"[\w,]+->\w+", op_name)
    if equation and "r" in equation[0]:  # Qwix's letter of the rank
        return True
    return any(name.startswith(STOCK_LORA) for name in names)

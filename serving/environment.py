"""What our children know of the shell that started us, and what of it may be shown.

A server or client that inherits everything behaves differently in every shell: HTTP_PROXY sends
requests for 127.0.0.1 to a stranger, VLLM_API_KEY makes our own server refuse us. So a child gets
what describes the machine and its user, and beside that only what `Options.environment` says.
"""

import os
import re
import tempfile
from collections.abc import Iterable, Mapping

from tables.errors import UserError

# A child inherits these, and what begins with one of the prefixes.
NAMES = (
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR LD_LIBRARY_PATH LD_PRELOAD SSH_AUTH_SOCK "
    "HF_HOME HF_HUB_CACHE NUMBA_CACHE_DIR").split()
PREFIXES = tuple((
    "LC_ XDG_ DOCKER_ CUDA_ NVIDIA_ TPU_ LIBTPU_ PJRT_ JAX_ XLA_ OMP_ MKL_ KMP_ TORCH "
    "TRITON_").split())
NO_SECRETS = ("SSH_AUTH_SOCK", "TPU_PROCESS_KEY")  # whatever their names say
SECRET = re.compile(r"(?i)(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASS|PAT|CREDENTIALS?|AUTH)($|_)")
# Flags of vLLM that are named like secrets and hold none.
HARMLESS = re.compile(r"(?i)TOKEN_(THRESHOLD|IDS)|^(NO_)?ALLOW_CREDENTIALS$")
SHORTEST = 6  # a shorter value, such as "1" or "true", isn't a secret: it would blacken every text
SOCKET_PATH = 107  # characters that Linux takes of a socket's path
SOCKET_NAME = 37   # of them, a slash and the name that vLLM gives a socket
API_KEY = "VLLM_API_KEY"  # with it, vLLM asks every client for this key


def is_secret(name: str) -> bool:
    """Whether a variable of this name holds something that nobody else may read."""
    if name in NO_SECRETS or HARMLESS.search(name):
        return False
    return SECRET.search(name) is not None


def secrets() -> dict[str, str]:
    """{value: name} of every secret in this process's environment, the longest value first."""
    names = {}
    for name, value in os.environ.items():
        if is_secret(name) and len(value) >= SHORTEST:
            names[value] = name
    longest_first = sorted(names, key=len, reverse=True)
    return {value: names[value] for value in longest_first}


def without_secrets(text: str) -> str:
    """The text, with the variable's name in place of each secret value, such as `$HF_TOKEN`."""
    for value, name in secrets().items():
        text = text.replace(value, f"${name}")
    return text


def check_settings(settings: Iterable[str]) -> None:
    """Raise if `Options.environment` holds something else than NAME=value and names of the shell.

    Raises:
      UserError: a secret's value stands in it, or a name is named that the shell doesn't have.
    """
    for setting in settings:
        name, equals, _ = setting.partition("=")
        if equals and is_secret(name):
            raise UserError(
                f"environment holds the value of {name}, and options.json would keep it. Write "
                f'environment=("{name}",) and set {name} in the shell: the server gets it there.')
        if not equals and name not in os.environ:
            raise UserError(
                f'environment=("{name}",) takes {name} from the shell, '
                f"and it isn't set there. Run: export {name}=...")


def values_of(settings: Iterable[str]) -> dict[str, str]:
    """{name: value} of settings; a name without a value has the shell's."""
    values = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            value = os.environ[name]
        values[name] = value
    return values


def for_child(
        settings: Iterable[str] = (),
        places: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment of a server or of a client: the machine's part of ours, and `settings`.

    Proxies, tokens, and every VLLM_ variable stay outside. vLLM would tell its makers of each
    start, and write that into ~/.config/vllm; here it does only if the settings say so. It puts
    its sockets into TMPDIR, and if their paths are too long there, it doesn't start; then they go
    into /tmp.

    Args:
      settings: "NAME=value", or "NAME" for a variable of the shell.
      places: where it may write (`commands.own_places`), unless the settings say otherwise.
    """
    values = {"NO_COLOR": "1", "NO_PROXY": "*", "no_proxy": "*", "VLLM_NO_USAGE_STATS": "1"}
    values.update(places or {})
    if len(tempfile.gettempdir()) + SOCKET_NAME > SOCKET_PATH:
        values["VLLM_RPC_BASE_PATH"] = "/tmp"
    for name, value in os.environ.items():
        is_the_machines = name in NAMES or name.startswith(PREFIXES)
        if is_the_machines and not is_secret(name):
            values[name] = value
    values.update(values_of(settings))
    return values


def api_key(settings: Iterable[str], shell: Mapping[str, str] = os.environ) -> str:
    """The key that a server with these settings asks for; "" if it asks for none."""
    if API_KEY not in settings:
        return ""
    return shell.get(API_KEY, "")

"""Questions to a recorded server over HTTP, and what it counts. No question goes through a
proxy."""

import collections
import contextlib
import http.client
import json
import math
import os
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from serving import environment
from serving.options import adapter_rank, check_adapter
from serving.records import ServerRecord
from tables.errors import UserError

if TYPE_CHECKING:
    import openai

Counters = collections.defaultdict[Any, Any]  # by a metric's name, or (name, position)

DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
RUNTIME = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"  # a variable that lets a server load adapters
TOKEN_TIME = "vllm:inter_token_latency_seconds"  # a histogram, on the server's own clock


# -- HTTP ------------------------------------------------------------------------------------------

def _direct() -> urllib.request.OpenerDirector:
    """An opener that asks the server itself, whatever HTTP_PROXY says."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _headers(record: ServerRecord) -> dict[str, str]:
    """The headers of a question to this server, with its key if it asks for one."""
    headers = {"Content-Type": "application/json"}
    key = environment.api_key(record.environment)
    if key:
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _message_of(answer: str) -> str:
    """The server's own words in the body of a refusal, or the body."""
    with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
        body = json.loads(answer)
        return str(body["error"]["message"])
    return answer


def request(record: ServerRecord, path: str, payload: object = None, timeout: float = 60.0) -> str:
    """The server's answer to a GET (or, with `payload`, a POST of JSON), as text.

    Args:
      timeout: seconds.

    Raises:
      UserError: no server answers, or it refuses; its own message is repeated.
    """
    data = None
    if payload is not None:
        data = json.dumps(payload).encode()
    url = record.base_url + path
    question = urllib.request.Request(url, data, _headers(record))
    try:
        with _direct().open(question, timeout=timeout) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        body = error.read().decode(errors="replace")
        message = environment.without_secrets(_message_of(body))
        raise UserError(f"{path}: HTTP {error.code}: {message[:300]}") from error
    except (OSError, http.client.HTTPException) as error:  # the second: it died while it answered
        reason = getattr(error, "reason", error)
        raise UserError(
            f"no server answers at {record.base_url} ({reason}). Run 05_serve_vllm.") from error


def post(record: ServerRecord, path: str, payload: object, timeout: float = 600.0) -> Any:
    """`request` with a payload, its answer decoded from JSON."""
    answer = request(record, path, payload, timeout)
    return json.loads(answer)


def healthy(record: ServerRecord) -> bool:
    """Whether the server answers its health check."""
    with contextlib.suppress(UserError):
        request(record, "/health", timeout=5.0)
        return True
    return False


def openai_client(record: ServerRecord) -> "openai.OpenAI":
    """OpenAI's own client for this server: no proxy, no second try, and a key if the server asks
    for one."""
    import openai  # a second to import, and a sweep doesn't need it
    key = environment.api_key(record.environment)
    return openai.OpenAI(
        base_url=f"{record.base_url}/v1",
        api_key=key or "unused",
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False))


def load_adapter(record: ServerRecord, name: str, folder: str) -> None:
    """Have a running server serve one more adapter, under a name of its own.

    It needs a server that was started with adapters and with `RUNTIME` among its variables, and not
    in a container, which sees no other folders than those of its start. A restart forgets what was
    added.

    Args:
      name: what clients will ask for.
      folder: of PEFT.

    Raises:
      UserError: the server takes no adapters while it runs, or not this one; says why.
    """
    if record.container:
        raise UserError(
            f"{record.name} runs in a container, which only has the adapters named at its start. "
            "Name this one in adapters, too, and start the server again.")
    most = _largest_rank(record.command)
    if most is None or not _takes_adapters(record.environment):
        raise UserError(f"{record.name} takes no adapters while it runs. Start it with at least "
                        f'one in adapters, and with environment=("{RUNTIME}",).')
    check_adapter(folder, record.model)
    rank = adapter_rank(folder)
    if rank > most:
        raise UserError(f"the adapter {folder} has rank {rank}, and this server was started for "
                        f"{most} at most. Name this adapter in adapters, and start it again.")
    place = Path(folder).resolve()  # the server may stand in another folder
    payload = {"lora_name": name, "lora_path": str(place)}
    request(record, "/v1/load_lora_adapter", payload)


def _takes_adapters(settings: list[str]) -> bool:
    """Whether a server with these variables takes adapters while it runs (`vllm/envs.py`).

    A name without a value had the shell's at the start. If this shell doesn't have it, the server
    decides.
    """
    variable = RUNTIME.partition("=")[0]
    allowed = False
    for setting in settings:
        name, equals, value = setting.partition("=")
        if name != variable:
            continue
        if not equals:
            value = os.environ.get(variable, "1")
        allowed = value.strip().lower() in ("1", "true")
    return allowed


def _largest_rank(command: list[str]) -> int | None:
    """The --max-lora-rank of a command; None if it has none.

    `Options.flags` may name it again, and vLLM takes the last one. It reads `_` as `-`.
    """
    largest = None
    for place, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != "--max-lora-rank":
            continue
        if not equals:
            value = command[place + 1]
        largest = int(value)
    return largest


def template_arguments(thinking: bool) -> dict:
    """What a chat request has to hold so that the template renders prompts with or without
    thinking."""
    return {"chat_template_kwargs": {"enable_thinking": thinking}}


def chat_request(text: str, system: str, thinking: bool, **more: object) -> dict:
    """Arguments for OpenAI's `chat.completions.create`: one question, answered greedily.

    Args:
      system: the system message; "" for none.
      thinking: whether the model may fill its thought channel first.
      more: further arguments, such as `model` and `max_tokens`.
    """
    messages = []
    if system:
        messages.append({"role": "system", "content": system})
    messages.append({"role": "user", "content": text.strip()})
    request = {
        "messages": messages,
        "temperature": 0,
        "extra_body": template_arguments(thinking)}
    return request | more


# -- What it counts --------------------------------------------------------------------------------

def counters(record: ServerRecord) -> Counters:
    """The server's metrics: name -> sum over its labels, and (name, position) -> sum per draft
    token.

    Prometheus' names: a counter ends in `_total`. "cache" has the labels of vLLM's
    cache_config_info.
    """
    text = request(record, "/metrics")
    values: Counters = collections.defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] += sample.value
            if "position" in sample.labels:
                position = int(sample.labels["position"])
                values[sample.name, position] += sample.value
            if sample.name == "vllm:cache_config_info":
                values["cache"] = sample.labels
    return values


def acceptance(before: Counters, after: Counters) -> dict | None:
    """What speculation gained between two answers of `counters`.

    Returns:
      {"drafts": ..., "by position": share of drafts whose token at this position was accepted,
      "tokens per step": accepted tokens and the one that every step gives}, or None without a
      draft.
    """
    drafts = after[DRAFTS] - before[DRAFTS]
    accepted = after[ACCEPTED] - before[ACCEPTED]
    if not drafts:
        return None
    positions = [key for key in after if key[0] == ACCEPTED_AT]
    shares = []
    for key in sorted(positions):
        accepted_there = after[key] - before[key]
        shares.append(accepted_there / drafts)
    return {
        "drafts": int(drafts),
        "by position": shares,
        "tokens per step": 1 + accepted / drafts,
    }


def seconds_per_token(before: Counters, after: Counters) -> float:
    """Seconds between two tokens of an answer on the server's own clock, on average; nan without
    any.

    Args:
      before, after: answers of `counters`, around the requests that count.
    """
    count = f"{TOKEN_TIME}_count"
    total = f"{TOKEN_TIME}_sum"
    tokens = after[count] - before[count]
    if not tokens:
        return math.nan
    seconds = after[total] - before[total]
    return seconds / tokens


def streamed(client: "openai.OpenAI", record: ServerRecord, request: dict,
             show: bool = False) -> tuple[list[float], str, float]:
    """One answer, read along.

    Args:
      request: for the chat completions of `client`.
      show: print each piece as it comes.

    Returns:
      (seconds from sending the request to each piece, the whole text, seconds that a token took on
      the server's own clock).
    """
    before = counters(record)
    arrivals = []
    text = ""
    start = time.perf_counter()
    for chunk in client.chat.completions.create(**request, stream=True):
        piece = None
        if chunk.choices:
            piece = chunk.choices[0].delta.content
        if not piece:
            continue
        arrivals.append(time.perf_counter() - start)
        text += piece
        if show:
            print(piece, end="", flush=True)
    if show:
        print()
    after = counters(record)
    return arrivals, text, seconds_per_token(before, after)


def wait_idle(record: ServerRecord, patience: float = 60.0) -> Counters:
    """The counters of the server, once no request runs or waits there.

    Args:
      patience: seconds.

    Raises:
      UserError: some requests stay.
    """
    deadline = time.monotonic() + patience
    while True:
        values = counters(record)
        running = int(values["vllm:num_requests_running"])
        waiting = int(values["vllm:num_requests_waiting"])
        if not running and not waiting:
            return values
        if time.monotonic() > deadline:
            raise UserError(
                f"the server is not idle: {running} requests run and {waiting} wait after "
                f"{patience:.0f} s. Another client uses it: end that, then run this again.")
        time.sleep(0.2)

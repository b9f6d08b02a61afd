"""A server with /v1/completions, asked for one answer at a time: directly, and with patience."""

import socket
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, NamedTuple

import openai

from tables.errors import UserError


class Reply(NamedTuple):
    """What the server answered."""

    text: str
    finish: str   # "stop", "length", or "error": the server refused
    tokens: int
    error: str = ""


class Client:
    """A client of one model on one server; many threads may use it at once.

    A server on this machine is asked directly, whatever proxy the environment names.

    Args:
      base_url: the server's address, without /v1.
      model: the name under which it serves the model.
      context: how many tokens a prompt and its answer may have together.
      turn_end: the text of the token that ends the model's turn; the answer stands before it.
      patience: seconds to wait for a server that can't be reached.
      alive: whether the server still lives. Nobody waits for one that has died.
      key: what the server asks for (VLLM_API_KEY), if it asks for one.
    """

    def __init__(
            self,
            base_url: str,
            model: str,
            context: int,
            turn_end: str = "",
            patience: float = 900.0,
            alive: Callable[[], bool] = lambda: True,
            key: str = "") -> None:
        self.base_url = base_url
        self.model = model
        self.context = context
        self.turn_end = turn_end
        self.patience = patience
        self.alive = alive
        direct = is_this_machine(base_url)
        self._openai = openai.OpenAI(
            base_url=f"{base_url}/v1",
            api_key=key or "unused",
            max_retries=2,
            http_client=openai.DefaultHttpxClient(trust_env=not direct))

    def complete(
            self,
            ids: list[int],
            max_tokens: int,
            temperature: float,
            top_p: float,
            options: dict[str, Any]) -> Reply:
        """The completion of a prompt of token ids; a refusal of the server is an "error".

        Args:
          ids: the prompt.
          options: fields of the request that vLLM knows beside OpenAI's.

        Raises:
          UserError: the server has died, or can't be reached for `patience` seconds.
        """
        end = time.monotonic() + self.patience
        while True:
            try:
                return self._ask(ids, max_tokens, temperature, top_p, options)
            except openai.APIConnectionError as error:
                trouble = self._trouble(error, end)
                if trouble:
                    raise UserError(f"{trouble} The answers so far are saved: run this notebook "
                                    "again, and see serve/server.log.") from error
            time.sleep(1.0)

    def _trouble(self, error: openai.APIConnectionError, end: float) -> str:
        """Why it's no use to ask once more; "" while it is."""
        if not self.alive():
            return f"the server at {self.base_url} has died."
        if time.monotonic() > end:
            cause = error.__cause__ or error
            return (f"the server at {self.base_url} hasn't answered for {self.patience:.0f} s "
                    f"({cause}).")
        return ""

    def _ask(
            self,
            ids: list[int],
            max_tokens: int,
            temperature: float,
            top_p: float,
            options: dict[str, Any]) -> Reply:
        """One request. We wait as long as ten tokens a second take, and ten minutes more."""
        try:
            answer = self._openai.completions.create(
                model=self.model,
                prompt=ids,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                extra_body=options,
                timeout=600 + max_tokens / 10)
        except openai.APIStatusError as error:
            refusal = f"HTTP {error.status_code}: {error}"
            return Reply("", "error", 0, refusal[:300])
        choice = answer.choices[0]
        text = choice.text
        if self.turn_end:
            text = text.partition(self.turn_end)[0]
        tokens = answer.usage.completion_tokens if answer.usage else 0
        return Reply(text, choice.finish_reason, tokens)


def is_this_machine(url: str) -> bool:
    """Does an address lead to this machine? Then it's one that a socket here can listen on."""
    host = urllib.parse.urlsplit(url).hostname
    if not host:
        return False
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family):
            return True
    except OSError:  # also where no such host is known
        return False

"""python -m serving start|status|stop FOLDER: a server as `options.json` in the folder says.

`stop` also ends the servers whose folders are inside it.
"""

import sys
from pathlib import Path

from serving import options, server
from tables.errors import UserError


def start(folder: str) -> str:
    """Start the server, or find it running; its address."""
    wanted = options.read(folder)
    record = server.start(wanted, folder)
    return record.base_url


def status(folder: str) -> str:
    """Which server runs, where, and as which process."""
    record = server.current(folder)
    return f"{record.name} at {record.base_url}, process {record.pid}, log {record.log}"


def stop(folder: str) -> str:
    """End every server whose folder is this one, or is in it."""
    folders = {path.parent for path in Path(folder).rglob("server.*")}
    outcome = "no server was running"
    if not Path(folder).is_dir():  # a slip of the pen must not look as if all had ended
        outcome = f"no server was running: {folder} isn't a folder"
    for place in sorted(folders):
        if server.stop(place):
            outcome = "stopped"
    return outcome


WORDS = {"start": start, "status": status, "stop": stop}


def main(words: list[str]) -> None:
    """Do what the words say; an error is shown as its one line.

    Raises:
      SystemExit: the words aren't these, or what they ask for failed, or Ctrl-C.
    """
    if len(words) != 2 or words[0] not in WORDS:
        sys.exit(__doc__)
    word, folder = words
    try:
        print(WORDS[word](folder))
    except UserError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        message = "interrupted: run it again to be sure"
        if word == "start":
            message = "interrupted: no server was left running"
        print(message, file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])

"""python -m serving start|status|stop FOLDER: a server as `options.json` in the folder says.

`stop` also ends those whose folders are in it.
"""

import sys
from pathlib import Path

from serving import options, server

WORDS = {"start": lambda folder: server.start(options.read(folder), folder)["base_url"],
         "status": lambda folder: "{name} at {base_url}, process {pid}, log {log}".format(
             **server.current(folder)),
         "stop": lambda folder: "stopped" if any([server.stop(path.parent) for path in Path(folder).rglob(
             "server.json")]) else "no server was running"}

if __name__ == "__main__":
    try:
        word, folder = sys.argv[1:]
        print(WORDS[word](folder))
    except (KeyError, ValueError) as error:
        known = len(sys.argv) == 3 and sys.argv[1] in WORDS
        sys.exit(str(error) if known else __doc__)

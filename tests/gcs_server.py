"""A Google Cloud Storage on this machine, for tests: `python gcs_server.py PORT FOLDER`.

gcp-storage-emulator with two more things: the object's generation as a header of every download,
which the real service sends and TensorStore needs; and a slow link, where every upload takes as many
seconds as the file `FOLDER.slow` says.
"""

import sys
import time
from pathlib import Path

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

plain = objects.download


def download(request, response, storage, *args, **kwargs):
    """The emulator's answer with `x-goog-generation`, as the real service sends it."""
    try:
        found = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
        response["x-goog-generation"] = found["generation"]
    except NotFound:
        pass  # the plain answer says so
    return plain(request, response, storage, *args, **kwargs)


def delayed(answer, note):
    """The same answer, after as many seconds as a file says, if there is one."""
    def later(*args, **kwargs):
        time.sleep(float(note.read_text()) if note.exists() else 0)
        return answer(*args, **kwargs)
    return later


if __name__ == "__main__":
    port, folder = int(sys.argv[1]), sys.argv[2]
    note = Path(f"{folder}.slow")
    objects.download = download  # `objects.get` calls it for alt=media
    server.HANDLERS = tuple(
        (pattern, {method: download if answer is plain else
                   delayed(answer, note) if method == "POST" else answer
                   for method, answer in methods.items()}) for pattern, methods in server.HANDLERS)
    server.create_server("localhost", port, False, default_bucket="runs", data_dir=folder).run()

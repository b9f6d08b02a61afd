"""A Google Cloud Storage on this machine, for tests: `python gcs_server.py PORT FOLDER`.

gcp-storage-emulator with the object's generation as a header of every download, which the real
service sends and TensorStore needs.
"""

import sys

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


if __name__ == "__main__":
    port, folder = int(sys.argv[1]), sys.argv[2]
    objects.download = download  # `objects.get` calls it for alt=media
    server.HANDLERS = tuple(
        (pattern, {method: download if answer is plain else answer
                   for method, answer in methods.items()}) for pattern, methods in server.HANDLERS)
    server.create_server("localhost", port, False, default_bucket="runs", data_dir=folder).run()

"""A client with a pool: `pools.py rounds URL WORKERS`, as `rounds` of go/pools.go.

Each worker keeps one connection of http.client. As pools on top of it do, it sends a request again if the server has
closed the connection while it was idle.
"""

import http.client
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

# The last one is of a connection that the node has ended at the client's side.
CLOSED = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError, ConnectionAbortedError)
kept = threading.local()


def ask(url):
    """The name of the pod that has served a request."""
    for _ in range(2):
        is_reused = getattr(kept, "connection", None) is not None
        if not is_reused:
            kept.connection = http.client.HTTPConnection(url.hostname, url.port or 80, timeout=60)
        try:
            kept.connection.request("GET", url.path or "/")
            response = kept.connection.getresponse()
            response.read()
        except CLOSED:
            kept.connection.close()
            kept.connection = None
            if not is_reused:
                raise
            continue
        if response.will_close:
            kept.connection.close()
            kept.connection = None
        if response.status != 200:
            raise ValueError(f"status {response.status}")
        return response.headers["x-pod"]
    raise ConnectionResetError("a new connection was closed, too")


def attempt(url):
    try:
        return ask(url)
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(repr(error), file=sys.stderr)
        return None


def main():
    url, workers = urlsplit(sys.argv[2]), int(sys.argv[3])
    with ThreadPoolExecutor(workers) as pool:
        for line in sys.stdin:
            served = Counter(pool.map(attempt, [url] * int(line)))
            failed = served.pop(None, 0)
            print(failed, *(f"{pod}={count}" for pod, count in served.items()), flush=True)


main()

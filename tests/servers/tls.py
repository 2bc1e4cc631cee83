"""A client of HTTPS without ALPN: `tls.py https URL CA COUNT`.

Sends COUNT requests by HTTP/1.1, one after the other, and keeps its connection while the server does. It verifies the
chain up to the authority in the file CA. CONNECT is the IP address of a host that no DNS knows.
"""

import http.client
import os
import socket
import ssl
import sys
from urllib.parse import urlsplit


def open_connection(url, context):
    """A connection whose handshake is complete."""
    address = os.environ.get("CONNECT") or url.hostname
    stream = socket.create_connection((address, url.port or 443), timeout=60)
    connection = http.client.HTTPSConnection(url.hostname, url.port, context=context)
    connection.sock = context.wrap_socket(stream, server_hostname=url.hostname)
    assert connection.sock.selected_alpn_protocol() is None
    return connection


def send_requests(url, authority, count):
    url = urlsplit(url)
    # `create_default_context` offers no protocols by ALPN, unlike the context that http.client makes itself.
    context = ssl.create_default_context(cafile=authority)
    connection = None
    for _ in range(count):
        if connection is None or connection.sock is None:
            connection = open_connection(url, context)
        connection.request("GET", url.path or "/")
        response = connection.getresponse()
        response.read()
        if response.status != 200 or response.version != 11:
            sys.exit(f"{url.geturl()}: {response.status} by version {response.version}")
    print(f"HTTP/1.1 {count}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["https", url, authority, count]:
            send_requests(url, authority, int(count))
        case _:
            sys.exit("usage: tls.py https URL CA COUNT")

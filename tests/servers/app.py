"""Servers and a client of the kernel tier's table, in Python. See README.md for what a server must do.

`wsgi` and `asgi` are what gunicorn, uvicorn and hypercorn are given. Run as a program it is `grpc`, or the client
`websockets URL COUNT`.
"""

import asyncio
import os
import sys
import time

# Appended lines of two bytes stay whole, whichever of several processes writes them.
BOOK = os.open(os.environ.get("BOOK", "/dev/null"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)


class Begun:
    """A request, from here to the end of the block."""

    def __enter__(self):
        os.write(BOOK, b"+\n")

    def __exit__(self, *_):
        os.write(BOOK, b"-\n")


def is_open():
    return os.path.exists(os.environ["GATE"])


def wait():
    while not is_open():
        time.sleep(0.005)


def wsgi(environ, start_response):
    """One request of WSGI. A generator, so that the server ends the block when it has sent everything."""
    with Begun():
        path = environ["PATH_INFO"]
        status, headers, body = "200 OK", [], [b"hello\n"]
        if path == "/wait":
            wait()
            body = [b"waited\n"]
        elif path == "/chunks":
            body = [b"some words\n"] * 5
        elif path == "/big":
            body = [b"x" * (1 << 20)]
        elif path == "/echo":
            body = [environ["wsgi.input"].read()]
        elif path == "/empty":
            status, body = "204 No Content", []
        elif path == "/early":
            status, body = "413 Payload Too Large", [b"no\n"]
        elif path != "/hello":
            status = "404 Not Found"
        if path != "/chunks" and body:
            headers.append(("Content-Length", str(sum(map(len, body)))))
        start_response(status, headers)
        # gunicorn leaves that to the application.
        if environ["REQUEST_METHOD"] != "HEAD":
            yield from body


async def asgi(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    with Begun():
        await (http if scope["type"] == "http" else websocket)(scope, receive, send)


async def http(scope, receive, send):
    path, status, chunks = scope["path"], 200, [b"hello\n"]
    if path == "/wait":
        while not is_open():
            await asyncio.sleep(0.005)
        chunks = [b"waited\n"]
    elif path == "/chunks":
        chunks = [b"some words\n"] * 5
    elif path == "/big":
        chunks = [b"x" * (1 << 20)]
    elif path == "/echo":
        chunks, more = [b""], True
        while more:
            message = await receive()
            chunks[0] += message.get("body", b"")
            more = message.get("more_body", False)
    elif path == "/empty":
        status, chunks = 204, []
    elif path == "/early":
        status, chunks = 413, [b"no\n"]
    elif path != "/hello":
        status = 404
    headers = []
    if path != "/chunks" and chunks:
        headers = [(b"content-length", str(len(chunks[0])).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for chunk in chunks:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def websocket(_scope, receive, send):
    """Echoes each text until the client has closed."""
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})


def serve_grpc():
    """The service Echo of echo.proto. A message is left as the bytes it is: one field of text."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    def reply(text, context):
        if text[2:] == b"wait":
            wait()
        if text[2:] == b"fail":
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "asked to fail")
        return text

    def unary(text, context):
        with Begun():
            return reply(text, context)

    def server_stream(text, context):
        with Begun():
            for _ in range(3):
                yield reply(text, context)

    def client_stream(texts, context):
        with Begun():
            last = b""
            for text in texts:
                last = reply(text, context)
            return last

    def bidi(texts, context):
        with Begun():
            for text in texts:
                yield reply(text, context)

    methods = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "ServerStream": grpc.unary_stream_rpc_method_handler(server_stream),
        "ClientStream": grpc.stream_unary_rpc_method_handler(client_stream),
        "Bidi": grpc.stream_stream_rpc_method_handler(bidi),
    }
    server = grpc.server(ThreadPoolExecutor(32))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("servers.Echo", methods),))
    server.add_insecure_port("[::]:" + os.environ["PORT"])
    server.start()
    server.wait_for_termination()


async def hold_websockets(url, count):
    """Opens WebSockets, exchanges a message on each, reports that, and closes them at the end of its input."""
    import websockets

    # A busy machine takes longer than the library waits by default.
    options = {"open_timeout": 120, "close_timeout": 120, "ping_interval": None}
    sockets = [await websockets.connect(url, **options) for _ in range(count)]
    for socket in sockets:
        await socket.send("hello")
        assert await socket.recv() == "hello"
    print("open", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    for socket in sockets:
        await socket.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["grpc"]:
            serve_grpc()
        case ["websockets", url, count]:
            asyncio.run(hold_websockets(url, int(count)))
        case _:
            sys.exit("usage: app.py grpc | websockets URL COUNT")

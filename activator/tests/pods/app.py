"""A pod without an HTTP library. Its responses are those of app.mjs and app.go, but for what each server refuses by itself."""
import os, re, socket, sys, threading


def line(f):
    return f.readline(1 << 20).rstrip(b"\r\n")


def body(f, fields):
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        total = 0
        while size := int(line(f).split(b";")[0], 16):
            total += len(f.read(size))
            line(f)
        while line(f):
            pass
        return total
    return len(f.read(int(fields.get(b"content-length", 0))))


def book(method, target):
    """Adds a line to the file that the test names, if it does, before anything is sent."""
    if path := os.environ.get("REQUEST_LOG"):
        with open(path, "ab") as log:
            log.write(b"%s %s\n" % (method, target))


def serve(conn):
    with conn, conn.makefile("rb") as f:
        while first := line(f):
            method, target, _ = first.split(b" ")
            fields = {}
            while field := line(f):
                name, _, value = field.partition(b":")
                fields[name.lower()] = value.strip()
            book(method, target)
            if target == b"/early":
                return conn.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbig\n")
            if target == b"/reject":
                conn.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 3\r\nConnection: close\r\n\r\nno\n")
                conn.shutdown(socket.SHUT_WR)
                return f.read()
            if target == b"/both":
                return conn.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n")
            if b"expect" in fields:
                conn.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            text = b"%s %s %d\n" % (method, target, body(f, fields))
            found = re.match(rb"/many\?n=(\d+)", target)
            extra = b"".join(b"X-Line-%d: v\r\n" % i for i in range(int(found[1]) if found else 0))
            out = b"" if method == b"HEAD" else text
            conn.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n" % (len(text), extra) + out)
            if fields.get(b"connection") == b"close":
                return


def quietly(conn):
    try:
        serve(conn)
    except (OSError, ValueError):
        pass


listener = socket.create_server(("127.0.0.1", 0), backlog=128)
print(listener.getsockname()[1], flush=True)
# Ends with the test.
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    threading.Thread(target=quietly, args=(listener.accept()[0],), daemon=True).start()

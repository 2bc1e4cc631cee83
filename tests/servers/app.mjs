// Node's own servers, and the WebSockets of the package `ws`. See README.md for what a server must do.
//
// `http` is HTTP/1.1, `h2` is HTTP/2 by prior knowledge: without TLS Node has no server for both.

import { appendFileSync, existsSync, openSync } from "node:fs";
import { createServer } from "node:http";
import { createServer as createHttp2Server } from "node:http2";
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";

const { BOOK, GATE, PORT } = process.env;
const book = openSync(BOOK, "a");

/** Notes that a request has begun. What it returns notes its end. */
function begin() {
  appendFileSync(book, "+\n");
  return () => appendFileSync(book, "-\n");
}

async function respond(request, response) {
  // Emitted once, whether the response was sent or the client has gone.
  response.once("close", begin());
  switch (request.url) {
    case "/hello":
      return response.end("hello\n");
    case "/empty":
      return response.writeHead(204).end();
    case "/hints":
      response.writeEarlyHints({ link: "</style.css>; rel=preload" });
      return response.end("hello\n");
    case "/chunks":
      for (let chunk = 0; chunk < 5; chunk += 1) {
        response.write("some words\n");
        await sleep(0);
      }
      return response.end();
    case "/big":
      return response.end("x".repeat(1 << 20));
    case "/echo": {
      const chunks = [];
      for await (const chunk of request) chunks.push(chunk);
      return response.end(Buffer.concat(chunks));
    }
    case "/early":
      return response.writeHead(413).end("no\n");
    case "/wait":
      while (!existsSync(GATE) && !response.destroyed) await sleep(5);
      return response.end("waited\n");
    default:
      return response.writeHead(404).end();
  }
}

/** Echoes each text until the client has closed. */
function echoWebSockets(server) {
  // Debian keeps its packages of Node where only its own Node looks.
  const { WebSocketServer } = createRequire("/usr/share/nodejs/")("./ws");
  new WebSocketServer({ server }).on("connection", (socket) => {
    const end = begin();
    socket.on("message", (data) => socket.send(data.toString()));
    // Emitted when the TCP connection has closed, not only the WebSocket on it.
    socket.on("close", end);
  });
}

/** Echoes each byte on a WebSocket over HTTP/2 (RFC 8441), or resets the stream on request. */
function tunnel(_, { stream }) {
  // Emitted once, however it ends.
  stream.once("close", begin());
  stream.on("error", gone);
  stream.respond({ ":status": 200 });
  stream.on("data", (data) => {
    // Not `close`, which ends the stream in order first.
    if (data.includes("reset")) stream.destroy(new Error("told to reset"));
    else stream.write(data);
  });
  stream.on("end", () => stream.end());
}

// A client that goes away is part of the test.
const gone = (error) => console.error(error.message);
if (process.argv[2] === "h2") {
  const settings = { enableConnectProtocol: true };
  createHttp2Server({ settings }, (request, response) => respond(request, response).catch(gone))
    .on("connect", tunnel)
    .listen(PORT);
} else {
  const server = createServer((request, response) => respond(request, response).catch(gone));
  echoWebSockets(server);
  server.listen(PORT);
}

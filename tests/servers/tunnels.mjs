// A client of WebSockets over HTTP/2 (RFC 8441): `tunnels.mjs URL COUNT end|reset|refused|cut PATH...`.
//
// Opens COUNT WebSockets on one connection, exchanges texts on each, and requests the paths meanwhile. At the end of
// its input, after all responses, it closes the WebSockets, resets their streams, lets the server reset them, or cuts
// the connection.

import { connect } from "node:http2";
import { once } from "node:events";

const [url, count, how, ...paths] = process.argv.slice(2);
const session = connect(url);
await once(session, "remoteSettings");
if (!session.remoteSettings.enableConnectProtocol) throw new Error("the server does not support RFC 8441");

/** A message as a client sends it (RFC 6455 §5.2), masked with zeros. */
function frame(opcode, text) {
  const short = text.length < 126;
  const head = short
    ? [0x80 | opcode, 0x80 | text.length]
    : [0x80 | opcode, 0x80 | 126, text.length >> 8, text.length & 255];
  return Buffer.concat([Buffer.from([...head, 0, 0, 0, 0]), Buffer.from(text)]);
}

/** Sends a text and waits until it has come back. */
async function echo(stream, text) {
  stream.write(frame(1, text));
  let seen = "";
  while (!seen.includes(text)) {
    const [chunk] = await once(stream, "data");
    seen += chunk.toString("latin1");
  }
}

async function open() {
  const stream = session.request({
    ":method": "CONNECT",
    ":protocol": "websocket",
    ":path": "/websocket",
    "sec-websocket-version": "13",
  });
  // The tests end streams in every way, so errors are expected.
  stream.on("error", () => {});
  const [headers] = await once(stream, "response");
  if (headers[":status"] !== 200) throw new Error(`the response has status ${headers[":status"]}`);
  for (const length of [1, 200, 20_000]) await echo(stream, "x".repeat(length));
  return stream;
}

/** Ends a WebSocket in the given way, and waits until its stream has closed. */
async function end(stream) {
  stream.resume();
  const closed = new Promise((done) => stream.once("close", done));
  if (how === "end") {
    stream.end(frame(8, ""));
  } else if (how === "reset") {
    // Not `close`, which ends our side in order first.
    stream.destroy(new Error(how));
  } else if (how === "refused") {
    stream.write(frame(1, "reset"));
  } else {
    // The connection closes without a word of HTTP/2.
    process.exit();
  }
  await closed;
}

async function get(path) {
  const page = session.request({ ":path": path });
  page.resume();
  await once(page, "close");
}

const pages = Promise.all(paths.map(get));
const streams = await Promise.all(Array.from({ length: Number(count) }, open));
process.stdin.resume();
await once(process.stdin, "end");
await pages;
await Promise.all(streams.map(end));
session.close();

// A client of WebSockets over HTTP/2 (RFC 8441): `tunnels.mjs URL COUNT [end|reset|refused|cut]`.
//
// Opens so many on one connection, has texts said again on each, and asks for a page meanwhile. When its input has
// ended, it ends them in order, resets their streams, has the server reset them, or cuts the connection.

import { connect, constants } from "node:http2";
import { once } from "node:events";

const [url, count, how = "end"] = process.argv.slice(2);
const session = connect(url);
await once(session, "remoteSettings");
if (!session.remoteSettings.enableConnectProtocol) throw new Error("the server knows no RFC 8441");

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
  // Ends of every kind are what is tried.
  stream.on("error", () => {});
  const [headers] = await once(stream, "response");
  if (headers[":status"] !== 200) throw new Error(`the server answered ${headers[":status"]}`);
  for (const length of [1, 200, 20_000]) await echo(stream, "x".repeat(length));
  return stream;
}

/** Ends one, and waits until it has ended. */
async function end(stream) {
  stream.resume();
  const closed = once(stream, "close");
  if (how === "end") {
    stream.end(frame(8, ""));
  } else if (how === "reset") {
    stream.close(constants.NGHTTP2_CANCEL);
  } else if (how === "refused") {
    stream.write(frame(1, "reset"));
  } else {
    session.destroy();
  }
  await closed;
}

const streams = await Promise.all(Array.from({ length: Number(count) }, open));
const page = session.request({ ":path": "/hello" });
page.resume();
await once(page, "close");
process.stdin.resume();
await once(process.stdin, "end");
await Promise.all(streams.map(end));
session.close();

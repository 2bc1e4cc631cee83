// A client of HTTPS: `tls.mjs https URL CA COUNT`.
//
// Sends COUNT requests by Node's https (HTTP/1.1), one after the other, and COUNT by its http2 on one connection at a
// time. It verifies the chain up to the authority in the file CA. CONNECT is the IP address of a host that no DNS knows.

import { connect } from "node:http2";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { Agent, request } from "node:https";
import { isIP } from "node:net";

const [role, url, authority, total] = process.argv.slice(2);
if (role !== "https" || total === undefined) throw new Error("usage: tls.mjs https URL CA COUNT");
const count = Number(total);
const options = { ca: readFileSync(authority) };
const fixed = process.env.CONNECT;
if (fixed) {
  const address = { address: fixed, family: isIP(fixed) };
  options.lookup = (_name, { all }, done) =>
    all ? done(null, [address]) : done(null, address.address, address.family);
}

function check(status, version) {
  if (status !== 200) throw new Error(`${url}: ${status} by HTTP/${version}`);
}

async function sendHttp1(agent) {
  const sent = request(url, { ...options, agent });
  sent.end();
  const [response] = await once(sent, "response");
  check(response.statusCode, response.httpVersion);
  if (response.httpVersion !== "1.1") throw new Error(`HTTP/${response.httpVersion}`);
  response.resume();
  await once(response, "end");
}

async function openHttp2() {
  const session = connect(url, options);
  await once(session, "connect");
  if (session.alpnProtocol !== "h2") throw new Error(`ALPN chose ${session.alpnProtocol}`);
  return session;
}

async function sendHttp2(session) {
  const stream = session.request({ ":path": new URL(url).pathname });
  const [headers] = await once(stream, "response");
  check(headers[":status"], "2.0");
  stream.resume();
  await once(stream, "end");
}

const agent = new Agent({ keepAlive: true });
for (let sent = 0; sent < count; sent++) await sendHttp1(agent);
agent.destroy();
console.log(`HTTP/1.1 ${count}`);

let session = await openHttp2();
for (let sent = 0; sent < count; sent++) {
  // After a GOAWAY the next request needs another connection.
  if (session.closed || session.destroyed) session = await openHttp2();
  await sendHttp2(session);
}
session.close();
console.log(`HTTP/2.0 ${count}`);

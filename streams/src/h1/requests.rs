//! Pure: generates streams of HTTP/1 requests.

use super::message::{MessageWriter, mutate};
use crate::rng::SeededRng;

/// Methods that servers accept. Those that stand here several times are picked more often, so that most requests are
/// served and bytes behind an unusual one matter. `HEADS`, `CONN` and `PRIM` begin like methods with own rules.
const METHODS: [&str; 24] = [
    "GET", "GET", "GET", "GET", "GET", "POST", "POST", "POST", "POST", "PUT", "HEAD", "HEAD",
    "HEAD", "DELETE", "OPTIONS", "PATCH", "CONNECT", "TRACE", "HEADS", "CONN", "PRIM", "M-SEARCH",
    "A", "P",
];
const UNUSUAL_METHODS: [&str; 12] =
    ["get", "Get", "_x", "!a", "*", "", "G\0T", "HTTP/1.1", "HEAD\t", "\u{e9}", "PRI", "CONNECT "];
const TARGETS: [&str; 8] = [
    "/",
    "/",
    "/index.html?a=b&c=d",
    "/a/b/c/d/e",
    "http://example.com/x",
    "example.com:443",
    "*",
    "/%20",
];
const UNUSUAL_TARGETS: [&str; 6] = ["", "/a b", "//", "/\u{e9}", "/\0", "?HTTP/1.1"];
const UNUSUAL_VERSIONS: [&str; 9] = [
    "HTTP/1.2",
    "HTTP/2.0",
    "http/1.1",
    "HTTP/1.10",
    "HTTP/1",
    "HTTP/0.9",
    "HTTP/1.1 ",
    "",
    "HTTP",
];

/// Generates a stream of one or several requests.
pub fn generate_stream(rng: &mut SeededRng) -> Vec<u8> {
    let unusual_per_mille = *rng.pick(&[&0, &0, &0, &2, &2, &5, &15, &50, &200]);
    let mut writer = MessageWriter::new(rng, unusual_per_mille);
    for _ in 0..=writer.rng.next_below(5) {
        write_request(&mut writer);
    }
    if unusual_per_mille > 0 && writer.rng.next_bool(30) {
        for _ in 0..=writer.rng.next_below(3) {
            mutate(&mut writer.out, writer.rng);
        }
    }
    // Usual requests at the end show whether the boundaries were kept.
    writer.unusual_per_mille = 0;
    for _ in 0..writer.rng.next_below(3) {
        write_request(&mut writer);
    }
    writer.out
}

fn write_request(writer: &mut MessageWriter<'_>) {
    if writer.is_unusual() {
        let stray = writer.rng.pick(&["\r\n", "\n", "\r\n\r\n", "\r", " ", "\r\n\n\r\n"]);
        writer.out.extend(stray.bytes());
    }
    writer.choose_line_end();
    write_first_line(writer);
    let (framing, body) = writer.framing();
    // Rare, because a server reads nothing behind it.
    writer.closes = writer.rng.next_bool(2);
    writer.headers(framing);
    writer.body(body);
}

fn write_first_line(writer: &mut MessageWriter<'_>) {
    let method = if writer.is_unusual() {
        writer.rng.pick(&UNUSUAL_METHODS)
    } else {
        writer.rng.pick(&METHODS)
    };
    let target = match writer.is_unusual() {
        true => writer.rng.pick(&UNUSUAL_TARGETS).to_owned(),
        false if writer.rng.next_bool(5) => {
            format!("/{}", "x".repeat(writer.rng.next_length(3_000)))
        }
        false => writer.rng.pick(&TARGETS).to_owned(),
    };
    let version = match writer.is_unusual() {
        true => writer.rng.pick(&UNUSUAL_VERSIONS),
        false if writer.rng.next_bool(6) => "HTTP/1.0",
        false => "HTTP/1.1",
    };
    let [first, second] = [(); 2].map(|()| match writer.is_unusual() {
        true => writer.rng.pick(&["  ", "\t", "", "\r"]),
        false => " ",
    });
    writer.line(&format!("{method}{first}{target}{second}{version}"));
}

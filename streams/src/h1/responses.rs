//! Pure: generates HTTP/1 responses to given requests.

use super::{
    message::{MessageBody, MessageWriter, mutate},
    reference::ReferenceRequestKind,
};
use crate::rng::SeededRng;

const STATUSES: [u16; 16] =
    [200, 200, 200, 200, 200, 201, 204, 206, 301, 304, 400, 404, 429, 500, 503, 299];
const UNUSUAL_STATUS_LINES: [&str; 18] = [
    "HTTP/1.1 200",
    "HTTP/1.1 200 ",
    "HTTP/1.1 204",
    "HTTP/1.1  200 OK",
    "HTTP/1.1 20 OK",
    "HTTP/1.1 2000 OK",
    "HTTP/2.0 200 OK",
    "HTTP/1.2 200 OK",
    "http/1.1 200 OK",
    "HTTP/1.1 099 Low",
    "HTTP/1.1 600 High",
    "HTTP/1.1 999 High",
    "HTTP/1.1 000 No",
    "HTTP/1.1 -20 OK",
    "ICY 200 OK",
    "HTTP/1.1\t200 OK",
    "HTTP 200 OK",
    "HTTP/1.1 200 \u{e9}",
];

/// End of a response, and of the connection with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResponseEnd {
    /// The response ends with its last byte.
    AtLastByte,
    /// The response ends with its last byte, and so does the connection.
    AtLastByteThenClose,
    /// The response ends with the connection.
    AtClose,
}

/// Generated response; its fields hold only if nothing in it is unusual.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GeneratedResponse {
    /// Bytes of the response, with interim responses before it.
    pub bytes: Vec<u8>,
    /// Status of the final response.
    pub status: u16,
    /// End of the response, and of the connection.
    pub end: ResponseEnd,
}

/// Generates a response to a request of this kind; `closes` if the connection must end with it. Parts are unusual with
/// a probability of `unusual_per_mille` thousandths.
pub fn generate_response(
    kind: ReferenceRequestKind,
    closes: bool,
    unusual_per_mille: usize,
    rng: &mut SeededRng,
) -> GeneratedResponse {
    let mut writer = MessageWriter::new(rng, unusual_per_mille);
    for _ in 0..writer.rng.next_length(2) {
        let interim = writer.rng.pick(&[
            "HTTP/1.1 100 Continue",
            "HTTP/1.1 103 Early Hints",
            "HTTP/1.1 102 Wait",
        ]);
        writer.line(interim);
        writer.headers(Vec::new());
    }
    writer.choose_line_end();
    let status = match writer.rng.next_below(60) {
        0 => 101,
        other => STATUSES[other % STATUSES.len()],
    };
    let minor = usize::from(writer.rng.next_bool(92));
    match writer.is_unusual() {
        true => {
            let line = writer.rng.pick(&UNUSUAL_STATUS_LINES);
            writer.line(line);
        }
        false => writer.line(&format!("HTTP/1.{minor} {status} Text")),
    }
    let (mut framing, mut body) = writer.framing();
    let has_no_body = kind == ReferenceRequestKind::Head || matches!(status, 204 | 304);
    let becomes_tunnel =
        status == 101 || kind == ReferenceRequestKind::Connect && (200..300).contains(&status);
    if body == MessageBody::None && writer.rng.next_bool(80) {
        framing.push("Content-Length: 0".to_owned());
        body = MessageBody::Sized(0);
    }
    writer.closes = closes;
    writer.headers(framing);
    let end = match body {
        _ if becomes_tunnel => ResponseEnd::AtClose,
        MessageBody::None if !has_no_body => ResponseEnd::AtClose,
        _ if closes => ResponseEnd::AtLastByteThenClose,
        _ => ResponseEnd::AtLastByte,
    };
    if becomes_tunnel || body == MessageBody::None && !has_no_body {
        writer.content(1_000);
    } else if !has_no_body {
        writer.body(body);
    }
    if unusual_per_mille > 0 && writer.rng.next_bool(15) {
        mutate(&mut writer.out, writer.rng);
    }
    GeneratedResponse { bytes: writer.out, status, end }
}

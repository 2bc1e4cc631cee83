//! Pure: recognition of HTTP by the first line that a client sends.

use http::Method;

/// Number of bytes in which the line has to end. It is more than browsers and proxies commonly send.
pub const MAX_REQUEST_LINE_BYTES: usize = 8 << 10;

/// Returns true if the bytes begin with a complete request line of HTTP/1 (RFC 9112 §3). The preface of HTTP/2 begins
/// with a line of the same form.
pub fn has_request_line(bytes: &[u8]) -> bool {
    // Empty lines before it are allowed.
    let is_line_end = |byte: &u8| matches!(byte, b'\r' | b'\n');
    let Some(start) = bytes.iter().position(|byte| !is_line_end(byte)) else { return false };
    let mut lines = bytes[start..].split(|byte| *byte == b'\n');
    let (Some(line), Some(_after)) = (lines.next(), lines.next()) else { return false };
    let mut words = line.split(|byte| *byte == b' ');
    let (method, version) = (words.next(), words.next_back());
    let has_target = words.next().is_some_and(|target| !target.is_empty());
    has_target
        && method.is_some_and(|it| Method::from_bytes(it).is_ok())
        && version.is_some_and(|it| it.starts_with(b"HTTP/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_complete_request_line_is_http() {
        let http: [&[u8]; 5] = [
            b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
            b"\r\nPOST /a?b=c%20d HTTP/1.0\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"get http://a/ HTTP/1.1\r\n",
            b"GET /a b HTTP/1.1\r\n",
        ];
        for bytes in http {
            assert!(has_request_line(bytes), "{}", bytes.escape_ascii());
        }
        let other: [&[u8]; 11] = [
            b"",
            b"\r\n\r\n",
            b"GET / HTTP/1.1",
            b"GET /\r\n",
            b"GET HTTP/1.1\r\n",
            b"GET  HTTP/1.1\r\n",
            b"EHLO a b\r\n",
            b"HTTP/1.1 200 OK\r\n",
            b"\x16\x03\x01\x02\x00\x01\n",
            b"SSH-2.0-OpenSSH_9.6\r\n",
            b" / HTTP/1.1\r\n",
        ];
        for bytes in other {
            assert!(!has_request_line(bytes), "{}", bytes.escape_ascii());
        }
    }
}

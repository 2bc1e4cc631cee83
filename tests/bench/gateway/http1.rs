//! Pure: requests and responses of HTTP/1.1, as far as the bench's own clients and pods need them.

/// One response whose bytes are complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CompleteResponse {
    /// Length of head and body, in bytes.
    pub(crate) length: usize,
    /// Position of the first byte of the body.
    pub(crate) body_start: usize,
}

/// Bytes that are no response to accept, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BadResponse(pub(crate) String);

impl std::fmt::Display for BadResponse {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "unexpected response: {}", self.0)
    }
}

impl std::error::Error for BadResponse {}

/// GET request for the root of a host.
pub(crate) fn get_request(host: &str) -> Vec<u8> {
    format!("GET / HTTP/1.1\r\nhost: {host}\r\n\r\n").into_bytes()
}

/// Position behind the head that `bytes` begin with; `None` if it is not complete.
pub(crate) fn head_length(bytes: &[u8]) -> Option<usize> {
    bytes.windows(4).position(|it| it == b"\r\n\r\n").map(|at| at + 4)
}

/// Finds the response that `bytes` begin with; `None` if it is not complete.
///
/// # Errors
///
/// If its status is not 200, or if it has no length.
pub(crate) fn parse_response(bytes: &[u8]) -> Result<Option<CompleteResponse>, BadResponse> {
    let Some(body_start) = head_length(bytes) else { return Ok(None) };
    let head = String::from_utf8_lossy(&bytes[..body_start]).into_owned();
    let bad = || BadResponse(head.clone());
    if !head.starts_with("HTTP/1.1 200") {
        return Err(bad());
    }
    let body_length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    let length = body_start + body_length.ok_or_else(bad)?;
    Ok((bytes.len() >= length).then_some(CompleteResponse { length, body_start }))
}

//! Pure: comparison of the model's events with the served requests.

use crate::ebpf_model::ModelEvent;

/// Work of a server so far.
#[derive(Clone, Copy, Debug)]
pub struct ServedRequests<'a> {
    /// Statuses of the server's responses, in order.
    pub statuses: &'a [u16],
    /// True if the server may have broken off after the last of them. Then one refusal may have been counted, and one
    /// request that arrived whole behind it may have begun and been aborted by the close.
    pub may_refuse: bool,
    /// True if the last response has switched the connection to another protocol, which ends with the connection.
    pub is_upgraded: bool,
}

/// Checks `events` against the served requests; the error names the difference.
pub fn check_events(events: &[ModelEvent], served: ServedRequests<'_>) -> Result<(), &'static str> {
    let ServedRequests { statuses, may_refuse, is_upgraded } = served;
    let mut responded = Vec::new();
    let (mut strays, mut aborted, mut closed) = (0, 0, 0);
    for event in events {
        match event {
            ModelEvent::Finished(status) => responded.push(*status),
            ModelEvent::Missed(_) if responded.len() < statuses.len() => {
                return Err("a served request was missed");
            }
            ModelEvent::Missed(status) => responded.push(*status),
            // A response without a length is whole when the connection ends.
            ModelEvent::Closed if responded.len() + 1 == statuses.len() => {
                responded.push(statuses[responded.len()]);
            }
            ModelEvent::Closed => closed += 1,
            ModelEvent::Aborted => aborted += 1,
            ModelEvent::Stray => strays += 1,
            ModelEvent::Http2 | ModelEvent::Responded(..) => {
                return Err("HTTP/1.1 passes for HTTP/2");
            }
            ModelEvent::Started | ModelEvent::Desync | ModelEvent::Opaque => {}
        }
    }
    let (expected, more) = responded.split_at(responded.len().min(statuses.len()));
    if expected != statuses {
        return Err("other requests got a response");
    }
    let is_refusal = may_refuse && more.iter().all(|status| *status >= 400);
    if more.len() + strays > 1 || aborted > 1 || !(more.is_empty() || is_refusal) {
        return Err("more requests were counted than served");
    }
    // An upgraded connection and a refusal without a length end with the connection.
    if closed > usize::from(is_upgraded || may_refuse) {
        return Err("a response that is not whole was counted as whole");
    }
    Ok(())
}

/// Returns true if a stream does not begin like HTTP/1. A method may begin with any character of a token (RFC 9110
/// §5.6.2). But all methods in use begin with a letter, unlike other protocols.
fn is_foreign(stream: &[u8]) -> bool {
    let begin = stream.iter().position(|byte| !b"\r\n".contains(byte));
    let first = begin.map_or(&b""[..], |begin| &stream[begin..]);
    first.starts_with(b"PRI * HT") || first.first().is_some_and(|byte| !byte.is_ascii_alphabetic())
}

/// Returns true if neither `stream` nor `events` are HTTP/1: then nothing was counted.
pub fn is_uncounted_foreign(stream: &[u8], events: &[ModelEvent]) -> bool {
    use ModelEvent::{Desync, Http2, Opaque};
    is_foreign(stream) && matches!(events, [Opaque] | [Http2] | [Http2, Desync, Opaque])
}

//! Pure: compares what was counted with what was served.

use crate::tap::Event;

/// What is wrong with `events`, if requests with these statuses were `served`, in this order.
///
/// `may_refuse` if the server may have broken off: then one refusal may have been counted, and one request that came
/// whole behind it may have begun and been ended by the close.
pub fn judge(events: &[Event], served: &[u16], may_refuse: bool) -> Result<(), &'static str> {
    let mut answered = Vec::new();
    let (mut strays, mut closed) = (0, 0);
    for event in events {
        match event {
            Event::Finished(status) => answered.push(*status),
            Event::Missed(_) if answered.len() < served.len() => {
                return Err("a served request was missed");
            }
            Event::Missed(status) => answered.push(*status),
            // An answer without a length ends with the connection.
            Event::Closed if answered.len() + 1 == served.len() => {
                answered.push(served[answered.len()]);
            }
            Event::Closed => closed += 1,
            Event::Stray => strays += 1,
            Event::Started | Event::Desync | Event::Opaque => {}
        }
    }
    let (ours, more) = answered.split_at(answered.len().min(served.len()));
    if ours != served {
        return Err("other requests were answered");
    }
    let is_refusal = may_refuse && more.iter().all(|status| *status >= 400);
    if more.len() + strays > 1 || closed > 1 || !(more.is_empty() || is_refusal) {
        return Err("more requests were counted than served");
    }
    Ok(())
}

/// Whether a stream does not begin as HTTP/1 does. A method may begin with any character of a token (RFC 9110 §5.6.2),
/// but none in use begins without a letter; other protocols do.
pub fn is_foreign(stream: &[u8]) -> bool {
    let begin = stream.iter().position(|byte| !b"\r\n".contains(byte));
    let first = begin.map_or(&b""[..], |begin| &stream[begin..]);
    first.starts_with(b"PRI * HT") || first.first().is_some_and(|byte| !byte.is_ascii_alphabetic())
}

/// What is wrong with `events` of a connection that does not speak HTTP/1: it counts as one request until it closes.
pub fn judge_foreign(events: &[Event]) -> Result<(), &'static str> {
    match events {
        [Event::Started, Event::Opaque] | [Event::Started, Event::Opaque, Event::Closed] => Ok(()),
        _ => Err("another protocol passes for HTTP/1"),
    }
}

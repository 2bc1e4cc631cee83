//! Judge of an exchange: the requests that a pod got are those that a reader of RFC 9112 finds in the client's bytes,
//! or they were refused.
#![allow(clippy::unwrap_used, reason = "tests")]

use streams::h1::reference::{ReferenceStop, ServerProfile, UnusualForm, read_requests};

/// Response that a client got, as far as its reading matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SeenResponse {
    pub(super) status: u16,
    /// True if the pod has sent it. The activator's own responses are refusals.
    pub(super) is_of_pod: bool,
}

/// Header field by which the pod marks its responses.
pub(super) const POD_MARK: &str = "x-pod: ";

/// Observations of one exchange.
#[derive(Debug)]
pub(super) struct Exchange {
    /// Bytes that the pod got, for each connection. The pod asks for the end of the connection in each response.
    pub(super) pod_connections: Vec<Vec<u8>>,
    /// Final responses of the client's connection, in order.
    pub(super) responses: Vec<SeenResponse>,
}

/// Result of the reading of a stream that the judge accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Each request reached the pod.
    Served,
    /// A request was refused, and none behind it has another meaning.
    Refused,
}

/// Request, as far as two readers must agree about it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RequestMeaning {
    method: String,
    target: String,
    /// Content, without the framing of chunks.
    body: Vec<u8>,
}

/// One reader's view of a stream.
#[derive(Debug)]
struct StreamReading {
    requests: Vec<RequestMeaning>,
    stop: ReferenceStop,
    forms: Vec<UnusualForm>,
}

/// Returns true if the client has to half-close its connection: without that, a reader would wait for more.
pub(super) fn needs_end(sent: &[u8]) -> bool {
    let readings = [ServerProfile::Strict, ServerProfile::Lax].map(|it| read_stream(sent, it));
    readings.iter().any(|it| it.stop == ReferenceStop::Short)
}

/// Returns true for a stream that each reader follows to its end, as long as it accepts what a recipient may accept.
pub(super) fn is_clear(sent: &[u8]) -> bool {
    let lax = read_stream(sent, ServerProfile::Lax);
    lax.stop == ReferenceStop::Closed && lax.forms.iter().all(|form| is_permitted(*form, sent))
}

/// Judges an exchange in which the client has sent these bytes. The error names the difference.
pub(super) fn judge(sent: &[u8], seen: &Exchange) -> Result<Verdict, String> {
    let mut pod_requests = Vec::new();
    for bytes in &seen.pod_connections {
        pod_requests.extend(read_pod_request(bytes)?);
    }
    let strict = match compare(&read_stream(sent, ServerProfile::Strict), &pod_requests, seen) {
        Ok(verdict) => return Ok(verdict),
        Err(difference) => difference,
    };
    let lax = read_stream(sent, ServerProfile::Lax);
    let refusable: Vec<_> = lax.forms.iter().filter(|form| !is_permitted(**form, sent)).collect();
    if !refusable.is_empty() {
        return Err(format!("{strict}; {refusable:?} must be refused"));
    }
    compare(&lax, &pod_requests, seen).map_err(|lax| format!("strict: {strict}; lax: {lax}"))
}

/// Returns true if a recipient may accept a form that the strict reader refuses. Where RFC 9112 has no word for it, all
/// servers that accept it read the same boundaries.
fn is_permitted(form: UnusualForm, sent: &[u8]) -> bool {
    match form {
        // Methods are tokens (RFC 9110 §9.1), and later minor versions are read like 1.1 (RFC 9110 §2.5).
        UnusualForm::Method | UnusualForm::Symbol | UnusualForm::Version => true,
        // Bytes beyond ASCII are encoded by careless clients. Control characters end a line for some reader.
        UnusualForm::Target => {
            !sent.iter().any(|byte| byte.is_ascii_control() && !b"\r\n\t".contains(byte))
        }
        // RFC 9112 §2.2.
        UnusualForm::LineFeed => true,
        // RFC 9110 §8.6.
        UnusualForm::Lengths | UnusualForm::LengthList => true,
        // RFC 9112 §6.3, with the connection's end behind the response.
        UnusualForm::LengthAndCoding => true,
        // RFC 9112 §7, RFC 9110 §5.6.1 and §5.5.
        UnusualForm::Codings | UnusualForm::EmptyCoding | UnusualForm::NonAscii => true,
        UnusualForm::ChunkBlank | UnusualForm::ChunkZeros => true,
        UnusualForm::Spaces
        | UnusualForm::Tabs
        | UnusualForm::CarriageReturn
        | UnusualForm::Fold
        | UnusualForm::FoldedClose
        | UnusualForm::ReturnInConnection
        | UnusualForm::Blank
        | UnusualForm::NoColon
        | UnusualForm::Name
        | UnusualForm::Value
        | UnusualForm::OldCoding
        | UnusualForm::ChunkLineFeed
        | UnusualForm::Trailer
        | UnusualForm::Http2Frame => false,
    }
}

/// Reads what the pod got on one connection: at most one whole request, in a form that each server reads alike.
fn read_pod_request(bytes: &[u8]) -> Result<Option<RequestMeaning>, String> {
    let shown = || String::from_utf8_lossy(&bytes[..bytes.len().min(300)]).into_owned();
    let mut reading = read_stream(bytes, ServerProfile::Lax);
    // A client may choose these, and they leave no doubt about boundaries.
    let is_harmless = |form: &UnusualForm| {
        use UnusualForm::{Codings, Method, Symbol, Target};
        matches!(form, Codings | Method | Symbol | Target)
    };
    if !reading.forms.iter().all(is_harmless) || reading.stop == ReferenceStop::Refused {
        return Err(format!("the pod got {:?} in {:?}", reading.forms, shown()));
    }
    if count_chunked(bytes) > 1 {
        return Err(format!("the pod got chunks of chunks: {:?}", shown()));
    }
    let request = reading.requests.pop();
    match reading.requests.is_empty() {
        true => Ok(request),
        false => Err(format!("the pod got a second request: {:?}", shown())),
    }
}

/// Number of times that the head's transfer codings name `chunked`.
fn count_chunked(bytes: &[u8]) -> usize {
    let text = String::from_utf8_lossy(bytes).to_ascii_lowercase();
    let head = text.split("\r\n\r\n").next().unwrap_or_default();
    let values = head.split("\r\n").filter_map(|line| line.strip_prefix("transfer-encoding:"));
    values.flat_map(|value| value.split(',')).filter(|coding| coding.trim() == "chunked").count()
}

/// Reads a stream up to the request after which the connection ends.
fn read_stream(bytes: &[u8], profile: ServerProfile) -> StreamReading {
    let read = read_requests(bytes, profile);
    let closing = read.whole.iter().position(|(head, _)| head.closes);
    let count = closing.map_or(read.whole.len(), |at| at + 1);
    let (mut requests, mut start) = (Vec::new(), 0);
    for (head, end) in &read.whole[..count] {
        requests.push(read_meaning(
            &bytes[start..head.end],
            &bytes[head.end..*end],
            head.is_chunked(),
        ));
        start = *end;
    }
    match closing {
        None => StreamReading { requests, stop: read.stop, forms: read.unusual_forms },
        Some(_) => {
            let forms = read_requests(&bytes[..start], profile).unusual_forms;
            StreamReading { requests, stop: ReferenceStop::Closed, forms }
        }
    }
}

fn read_meaning(head: &[u8], body: &[u8], is_chunked: bool) -> RequestMeaning {
    let head = String::from_utf8_lossy(head);
    let head = head.trim_start_matches(['\r', '\n']);
    let mut words = head.lines().next().unwrap_or_default().split([' ', '\t']);
    let mut next_word = || words.find(|word| !word.is_empty()).unwrap_or_default().to_owned();
    let (method, target) = (next_word(), next_word());
    let body = if is_chunked { join_chunks(body) } else { body.to_vec() };
    RequestMeaning { method, target, body }
}

/// Joins the chunks of a body that the reference has read to its end.
fn join_chunks(mut rest: &[u8]) -> Vec<u8> {
    let mut content = Vec::new();
    let line_end = |bytes: &[u8]| 1 + bytes.iter().position(|byte| *byte == b'\n').unwrap();
    loop {
        let digits = rest.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
        let digits = str::from_utf8(&rest[..digits]).unwrap();
        let size = usize::from_str_radix(digits, 16).unwrap();
        rest = &rest[line_end(rest)..];
        if size == 0 {
            return content;
        }
        content.extend_from_slice(&rest[..size]);
        rest = &rest[size..];
        rest = &rest[line_end(rest)..];
    }
}

impl RequestMeaning {
    /// Returns true if the pod's request means the same. A target in another form than a path is rewritten.
    fn is_same(&self, of_pod: &Self) -> bool {
        let path = match self.target.split_once("://") {
            Some((_, rest)) if !self.target.starts_with('/') => {
                rest.find('/').map(|at| &rest[at..])
            }
            _ => self.target.starts_with('/').then_some(&*self.target),
        };
        self.method == of_pod.method
            && self.body == of_pod.body
            && path.is_none_or(|path| path == of_pod.target)
    }
}

/// Compares the pod's requests and the client's responses with a reading of the client's bytes.
fn compare(
    reading: &StreamReading,
    pod_requests: &[RequestMeaning],
    seen: &Exchange,
) -> Result<Verdict, String> {
    let wanted = &reading.requests;
    let (mut left, mut is_refused) = (pod_requests.iter(), false);
    for (at, response) in seen.responses.iter().enumerate() {
        if !response.is_of_pod {
            is_refused = true;
            if response.status < 400 {
                return Err(format!("response {at} is {}", response.status));
            }
            // It refuses a whole request, or bytes that are none.
            continue;
        }
        let (wanted, got) = (wanted.get(at), left.next());
        match (wanted, got) {
            (Some(wanted), Some(got)) if wanted.is_same(got) => {}
            _ => return Err(format!("request {at} is {wanted:?}, and the pod got {got:?}")),
        }
    }
    if let Some(more) = left.next() {
        return Err(format!("the pod got {more:?}, to which the client has no response"));
    }
    let count = seen.responses.len();
    let is_last_refused = seen.responses.last().is_some_and(|it| !it.is_of_pod);
    // A response beyond the whole requests refuses the bytes behind them.
    if count > wanted.len() + 1 || count == wanted.len() + 1 && !is_last_refused {
        return Err(format!("{count} responses for {} requests", wanted.len()));
    }
    if reading.stop == ReferenceStop::Refused && !is_last_refused {
        return Err("broken bytes were not refused".to_owned());
    }
    let may_close = reading.forms.contains(&UnusualForm::LengthAndCoding);
    if count < wanted.len() && !is_last_refused && !may_close {
        return Err(format!("{count} responses for {} requests", wanted.len()));
    }
    if may_close && pod_requests.len() > 1 {
        return Err("the connection goes on behind a length and a coding".to_owned());
    }
    Ok(if is_refused { Verdict::Refused } else { Verdict::Served })
}

/// Final responses in the bytes that a client got.
pub(super) fn seen_responses(received: &str) -> Vec<SeenResponse> {
    let starts: Vec<usize> = received.match_indices("HTTP/1.").map(|(at, _)| at).collect();
    let responses = starts.iter().map(|&start| {
        let text = &received[start..];
        let head = text.split("\r\n\r\n").next().unwrap_or_default();
        let status = head.get(9..12).and_then(|code| code.parse().ok()).unwrap_or(0);
        SeenResponse { status, is_of_pod: head.contains(POD_MARK) }
    });
    responses.filter(|it| it.status == 0 || it.status >= 200).collect()
}

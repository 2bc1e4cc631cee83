//! Pure: place of a request in its trace, by W3C Trace Context.

use common::wire::SamplingRate;
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::edge::client_headers::is_traceparent;

/// Header with the trace of a request.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Header with further state of the trace, passed on as it is.
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");
/// Longest state that spans keep, in bytes: what each system should pass on (W3C Trace Context, section 3.3.1.5).
const MAX_STATE_BYTES: usize = 512;

/// Span of the client, as its request names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParentSpan {
    /// Trace that the request belongs to.
    pub trace_id: u128,
    /// Span that the request is a part of.
    pub span_id: u64,
    /// True if the client records its span.
    pub is_sampled: bool,
}

impl ParentSpan {
    /// Span that the headers of a request name; `None`: they name none, or not exactly one.
    pub fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(&TRACEPARENT).iter();
        let (Some(only), None) = (values.next(), values.next()) else { return None };
        let only = only.as_bytes();
        if !is_traceparent(only) {
            return None;
        }
        // `version-trace-parent-flags`; later versions begin with the same fields.
        let field = |from: usize, to: usize| std::str::from_utf8(only.get(from..to)?).ok();
        let flags = u8::from_str_radix(field(53, 55)?, 16).ok()?;
        Some(Self {
            trace_id: u128::from_str_radix(field(3, 35)?, 16).ok()?,
            span_id: u64::from_str_radix(field(36, 52)?, 16).ok()?,
            is_sampled: flags & 1 == 1,
        })
    }
}

/// Place of a sampled request in its trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanContext {
    /// Trace of the request.
    pub trace_id: u128,
    /// Span of the request itself.
    pub span_id: u64,
    /// Span of the client; `None`: the trace begins here.
    pub parent_id: Option<u64>,
}

impl SpanContext {
    /// Decides if a request is sampled, and begins its span. `random` is uniform over u64.
    pub fn sample(
        parent: Option<ParentSpan>,
        rate: SamplingRate,
        mut random: impl FnMut() -> u64,
    ) -> Option<Self> {
        // No number may be zero.
        let mut number = || random().max(1);
        let trace_id = match parent {
            Some(parent) => parent.trace_id,
            None => (u128::from(number()) << 64) | u128::from(number()),
        };
        // The lower half decides, as in OpenTelemetry's `TraceIdRatioBased`.
        let low = u64::try_from(trace_id & u128::from(u64::MAX)).unwrap_or(u64::MAX);
        let is_sampled = rate.samples(parent.map(|it| it.is_sampled), low);
        is_sampled.then(|| Self {
            trace_id,
            span_id: number(),
            parent_id: parent.map(|it| it.span_id),
        })
    }
}

/// Value of `traceparent` for a request that is a part of a recorded span.
pub fn traceparent(trace_id: u128, span_id: u64) -> Option<HeaderValue> {
    HeaderValue::try_from(format!("00-{trace_id:032x}-{span_id:016x}-01")).ok()
}

/// State of the trace of a request: the members of all fields, as far as whole ones fit. A part of a member would state
/// another value.
pub fn trace_state(headers: &HeaderMap) -> String {
    let fields = headers.get_all(&TRACESTATE).iter().filter_map(|it| it.to_str().ok());
    let members = fields.flat_map(|it| it.split(',')).map(str::trim).filter(|it| !it.is_empty());
    let mut state = String::new();
    for member in members {
        let comma = if state.is_empty() { "" } else { "," };
        if state.len() + comma.len() + member.len() > MAX_STATE_BYTES {
            break;
        }
        state.push_str(comma);
        state.push_str(member);
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIVEN: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn parent(values: &[&str]) -> Option<ParentSpan> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(TRACEPARENT, HeaderValue::from_str(value).expect("valid"));
        }
        ParentSpan::from_headers(&headers)
    }

    #[test]
    fn a_parent_is_read_and_written_without_a_loss() {
        let read = parent(&[GIVEN]).expect("a parent");
        assert!(read.is_sampled);
        let written = traceparent(read.trace_id, read.span_id);
        assert_eq!(written, Some(HeaderValue::from_static(GIVEN)));
        let unsampled = parent(&[&GIVEN.replace("-01", "-02")]).expect("a parent");
        assert!(!unsampled.is_sampled, "only the lowest flag counts");
        let later = parent(&[&format!("cc{}-more", &GIVEN[2..])]);
        assert_eq!(later, Some(read));
        for bad in [&[GIVEN, GIVEN][..], &[], &["00-00-00-00"], &[&GIVEN[1..]]] {
            assert_eq!(parent(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn a_state_has_whole_members_of_all_fields() {
        let state = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(TRACESTATE, HeaderValue::from_str(value).expect("valid"));
            }
            trace_state(&headers)
        };
        assert_eq!(state(&[]), "");
        assert_eq!(state(&["a=1, b=2", "", "c=3,"]), "a=1,b=2,c=3");
        let long = format!("b={}", "x".repeat(MAX_STATE_BYTES - 6));
        assert_eq!(state(&["a=1", &long, "c=3"]), format!("a=1,{long}"), "it is full");
        assert_eq!(state(&["a=1", &format!("{long}x"), "c=3"]), "a=1");
    }

    #[test]
    fn a_trace_goes_on_under_its_parent_or_begins_here() {
        let half = SamplingRate::from_fraction(0.5);
        let sample = |parent, number: u64| SpanContext::sample(parent, half, || number);
        let read = parent(&[GIVEN]).expect("a parent");
        let expected =
            SpanContext { trace_id: read.trace_id, span_id: 7, parent_id: Some(read.span_id) };
        assert_eq!(sample(Some(read), 7), Some(expected));
        assert_eq!(sample(Some(ParentSpan { is_sampled: false, ..read }), 7), None);
        let root = sample(None, 0).expect("a low number");
        assert_eq!((root.trace_id, root.span_id, root.parent_id), ((1 << 64) | 1, 1, None));
        assert_eq!(sample(None, u64::MAX), None);
    }
}

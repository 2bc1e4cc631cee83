//! Pure: spans in the form of OTLP.

use opentelemetry_proto::tonic::{
    common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value::Value},
    resource::v1::Resource,
    trace::v1::{ResourceSpans, ScopeSpans, Span, Status, span::SpanKind, status::StatusCode},
};

use crate::telemetry::trace_context::SpanContext;

/// Longest text of an attribute in bytes. Clients choose some of them, and spans wait in a queue.
const MAX_TEXT_BYTES: usize = 512;

/// Attribute with a text, which is cut off at 512 bytes.
pub fn text_attribute(key: &str, text: &str) -> KeyValue {
    attribute(key, Value::StringValue(text[..floor_boundary(text, MAX_TEXT_BYTES)].to_owned()))
}

/// Attribute with a number.
pub fn number_attribute(key: &str, number: impl Into<i64>) -> KeyValue {
    attribute(key, Value::IntValue(number.into()))
}

fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
        ..KeyValue::default()
    }
}

/// Largest index at or below `most` at which the text can be cut.
fn floor_boundary(text: &str, most: usize) -> usize {
    let mut at = most.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

/// Span that a request has at its start. It ends by [`end_span`].
pub fn server_span(context: SpanContext, name: &str, trace_state: &str, start_ns: u64) -> Span {
    let parent = context.parent_id.map(|id| id.to_be_bytes().to_vec());
    Span {
        trace_id: context.trace_id.to_be_bytes().to_vec(),
        span_id: context.span_id.to_be_bytes().to_vec(),
        parent_span_id: parent.unwrap_or_default(),
        trace_state: trace_state.to_owned(),
        flags: 1,
        name: name.to_owned(),
        kind: SpanKind::Server.into(),
        start_time_unix_nano: start_ns,
        ..Span::default()
    }
}

/// Span inside of a request's own span.
pub fn child_span(parent: &Span, id: u64, name: &str, kind: SpanKind, start_ns: u64) -> Span {
    Span {
        trace_id: parent.trace_id.clone(),
        span_id: id.to_be_bytes().to_vec(),
        parent_span_id: parent.span_id.clone(),
        trace_state: parent.trace_state.clone(),
        flags: 1,
        name: name.to_owned(),
        kind: kind.into(),
        start_time_unix_nano: start_ns,
        ..Span::default()
    }
}

/// Sets the end of a span. A clock that goes back never makes it end before its start.
pub fn end_span(span: &mut Span, end_ns: u64) {
    span.end_time_unix_nano = end_ns.max(span.start_time_unix_nano);
}

/// Marks a span as failed. `kind` is the attribute `error.type`: a status code, or a word.
pub fn fail_span(span: &mut Span, kind: &str, message: &str) {
    let message = message[..floor_boundary(message, MAX_TEXT_BYTES)].to_owned();
    span.status = Some(Status { message, code: StatusCode::Error.into() });
    span.attributes.push(text_attribute("error.type", kind));
}

/// Returns the approximate number of bytes that a span holds: those of its fields, of its texts and of its attributes.
pub fn span_bytes(span: &Span) -> usize {
    let ids = [&span.trace_id, &span.span_id, &span.parent_span_id].map(Vec::len);
    let message = span.status.as_ref().map_or(0, |it| it.message.len());
    let texts = span.trace_state.len() + span.name.len() + message;
    let attributes = span.attributes.iter().map(attribute_bytes);
    size_of::<Span>() + ids.into_iter().sum::<usize>() + texts + attributes.sum::<usize>()
}

fn attribute_bytes(attribute: &KeyValue) -> usize {
    let text = match attribute.value.as_ref().and_then(|it| it.value.as_ref()) {
        Some(Value::StringValue(text)) => text.len(),
        // The activator makes no other kind with bytes of its own.
        Some(_) | None => 0,
    };
    size_of::<KeyValue>() + attribute.key.len() + text
}

/// Message with the spans of one activator.
pub fn resource_spans(resource: Resource, spans: Vec<Span>) -> ResourceSpans {
    let scope_spans = ScopeSpans { scope: Some(scope()), spans, ..ScopeSpans::default() };
    ResourceSpans {
        resource: Some(resource),
        scope_spans: vec![scope_spans],
        ..ResourceSpans::default()
    }
}

/// Scope of all spans and metrics: this program and its version.
pub fn scope() -> InstrumentationScope {
    InstrumentationScope {
        name: "rouse.activator".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    }
}

/// Resource of an activator. The service's name is that of Knative's component, so that its dashboards find it.
pub fn resource(activator: &str) -> Resource {
    let attributes = vec![
        text_attribute("service.name", "activator"),
        text_attribute("service.version", env!("CARGO_PKG_VERSION")),
        text_attribute("service.instance.id", activator),
    ];
    Resource { attributes, ..Resource::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_between_letters() {
        let long = "é".repeat(MAX_TEXT_BYTES);
        let cut = text_attribute("k", &long[..MAX_TEXT_BYTES + 2]);
        let Some(Value::StringValue(text)) = cut.value.and_then(|it| it.value) else {
            panic!("a text")
        };
        assert_eq!(text.len(), MAX_TEXT_BYTES);
        assert_eq!(floor_boundary("aé", 2), 1);
        assert_eq!(floor_boundary("", 2), 0);
    }

    #[test]
    fn a_span_holds_at_least_its_texts() {
        let context = SpanContext { trace_id: 2, span_id: 3, parent_id: None };
        let mut span = server_span(context, "GET", "", 10);
        let bytes = [0, 1, 2].map(|_| {
            span.attributes.push(text_attribute("key", &"v".repeat(100)));
            span_bytes(&span)
        });
        assert!(bytes[0] > size_of::<Span>() + 100 && bytes[0] < 2_000, "{bytes:?}");
        assert_eq!(bytes[2] - bytes[1], size_of::<KeyValue>() + 103);
    }

    #[test]
    fn a_child_is_in_the_trace_of_its_parent_and_ends_after_its_start() {
        let context = SpanContext { trace_id: 2, span_id: 3, parent_id: None };
        let parent = server_span(context, "GET", "a=b", 10);
        assert!(parent.parent_span_id.is_empty());
        let mut child = child_span(&parent, 4, "wait", SpanKind::Internal, 10);
        end_span(&mut child, 9);
        fail_span(&mut child, "timeout", "too late");
        assert_eq!((child.trace_id, child.parent_span_id), (parent.trace_id, parent.span_id));
        assert_eq!((child.end_time_unix_nano, child.trace_state.as_str()), (10, "a=b"));
        assert_eq!(child.status.map(|it| it.code), Some(StatusCode::Error.into()));
    }
}

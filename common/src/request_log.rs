//! Pure: the log line of each finished request, from a template in Go's syntax.
//!
//! Fields and functions are those that Knative documents for `logging.request-log-template`
//! (`config/core/configmaps/observability.yaml` at 98e5ef9), without conditions and loops: a template is a sequence of
//! texts and values. Whatever a client sends, a value is bounded and never breaks the line; through `js` it never
//! breaks a JSON string either. A template that is not supported is refused when it is parsed; filling it cannot fail.

use std::{
    borrow::Cow,
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

mod escape;
mod parse;

/// Knative's default template, in force where request logs are enabled without a template.
pub const DEFAULT_TEMPLATE: &str = concat!(
    r#"{"httpRequest": {"requestMethod": "{{.Request.Method}}", "requestUrl": "{{js .Request.RequestURI}}", "#,
    r#""requestSize": "{{.Request.ContentLength}}", "status": {{.Response.Code}}, "#,
    r#""responseSize": "{{.Response.Size}}", "userAgent": "{{js .Request.UserAgent}}", "#,
    r#""remoteIp": "{{js .Request.RemoteAddr}}", "serverIp": "{{.Revision.PodIP}}", "#,
    r#""referer": "{{js .Request.Referer}}", "latency": "{{.Response.Latency}}s", "#,
    r#""protocol": "{{.Request.Proto}}"}, "traceId": "{{.TraceID}}"}"#,
);

/// Longest template in bytes.
pub const MAX_TEMPLATE_BYTES: usize = 4096;
/// Most values in one template.
pub const MAX_VALUES: usize = 32;
/// Most functions for one value: each can make it six times as long.
const MAX_FUNCTIONS: usize = 2;
/// Longest value in bytes before its functions; the rest is replaced by three dots.
pub const MAX_VALUE_BYTES: usize = 2048;

/// List of supported fields and functions, for error messages.
const SUPPORTED: &str = "a template may have .Request (Method, RequestURI, URL, URL.Path, URL.RawQuery, Host, Proto, \
     ProtoMajor, ProtoMinor, RemoteAddr, ContentLength, UserAgent, Referer), \
     index .Request.Header \"NAME\", .Request.Header.Get \"NAME\", .Response (Code, Size, Latency), .Revision (Name, \
     Namespace, Service, Configuration, PodName, PodIP), .TraceID, texts in quotes, and the functions js, html, \
     urlquery and print";

/// Error of a template that is not supported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("template: requestLog:{line}:{column}: {what}; {SUPPORTED}")]
pub struct LogTemplateError {
    /// Line of the error, from 1.
    pub line: usize,
    /// Column of the error in characters, from 1.
    pub column: usize,
    /// Description of the unsupported part.
    pub what: String,
}

/// Parsed template. Cheap to clone.
#[derive(Clone)]
pub struct LogTemplate {
    source: Arc<str>,
    parts: Arc<[TemplatePart]>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum TemplatePart {
    Text(Box<str>),
    Value(TemplateValue),
}

/// Value of a template with the functions to apply, first one first.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TemplateValue {
    source: ValueSource,
    functions: Vec<TemplateFunction>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ValueSource {
    Literal(Box<str>),
    Request(RequestField),
    Response(ResponseField),
    Revision(RevisionField),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum RequestField {
    Method,
    RequestTarget,
    Path,
    Query,
    Host,
    Protocol,
    ProtocolMajor,
    ProtocolMinor,
    RemoteAddress,
    ContentLength,
    /// First value of the header with this name.
    Header(Box<str>),
    /// All values of the header, in brackets, as Go prints a list.
    Headers(Box<str>),
    TraceId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResponseField {
    Code,
    Size,
    Latency,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RevisionField {
    Name,
    Namespace,
    Service,
    Configuration,
    PodName,
    PodIp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TemplateFunction {
    Js,
    Html,
    UrlQuery,
    Print,
}

/// Request as the client sent it.
#[derive(Clone, Copy)]
pub struct LoggedRequest<'a> {
    /// Method of the request, such as `GET`.
    pub method: &'a str,
    /// Request target: path and query, or the whole URL if the client sent it in absolute form.
    pub target: &'a str,
    /// Path as sent, still percent-encoded.
    pub path: &'a str,
    /// Query without its question mark.
    pub query: &'a str,
    /// Host of the request, with its port if the client named one.
    pub host: &'a str,
    /// Version of HTTP: 1.1 is `(1, 1)`.
    pub version: (u8, u8),
    /// Address and port of the client.
    pub remote: SocketAddr,
    /// Bytes of the body; -1 while they are unknown.
    pub length: i64,
    /// Returns all values of a header by its name.
    pub headers: &'a dyn Fn(&str) -> Vec<String>,
}

impl fmt::Debug for LoggedRequest<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Request").field(&self.method).field(&self.target).finish()
    }
}

/// Response as the client received it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoggedResponse {
    /// Status code of the final response.
    pub code: u16,
    /// Bytes of the body that were passed on.
    pub size: u64,
    /// Seconds from the arrival of the request to the end of the response.
    pub latency: f64,
}

/// Revision and pod that answered; texts are empty if they are unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoggedRevision<'a> {
    /// Name of the Revision.
    pub name: &'a str,
    /// Namespace of the Revision.
    pub namespace: &'a str,
    /// Name of the owning Service.
    pub service: &'a str,
    /// Name of the owning Configuration.
    pub configuration: &'a str,
    /// Name of the pod.
    pub pod_name: &'a str,
    /// IP address of the pod.
    pub pod_ip: Option<IpAddr>,
}

/// Request values that a template needs, kept until the response has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CapturedRequest(Box<[Box<str>]>);

impl CapturedRequest {
    /// Returns the number of bytes that the values hold.
    pub fn held_bytes(&self) -> usize {
        self.0.iter().map(|value| size_of::<Box<str>>() + value.len()).sum()
    }
}

impl LogTemplate {
    /// Parses the text of a template and checks all of its parts.
    pub fn parse(source: &str) -> Result<Self, LogTemplateError> {
        let parts = parse::parse(source)?;
        Ok(Self { source: source.into(), parts: parts.into() })
    }

    /// Returns the text of the template as written.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns names of client-controlled values without an escaping function. In JSON they need `js`.
    pub fn unescaped_values(&self) -> Vec<String> {
        let bare = |part: &TemplatePart| match part {
            TemplatePart::Value(TemplateValue { source: ValueSource::Request(it), functions }) => {
                let bare = functions.iter().all(|it| *it == TemplateFunction::Print);
                bare.then(|| it.client_controlled_name()).flatten()
            }
            TemplatePart::Text(_) | TemplatePart::Value(_) => None,
        };
        self.parts.iter().filter_map(bare).collect()
    }

    /// Captures the request values that the line needs, before the request is forwarded.
    pub fn capture(&self, request: &LoggedRequest<'_>) -> CapturedRequest {
        let values = self.parts.iter().filter_map(|part| match part {
            TemplatePart::Value(TemplateValue { source: ValueSource::Request(it), .. }) => Some(it),
            TemplatePart::Text(_) | TemplatePart::Value(_) => None,
        });
        CapturedRequest(
            values.map(|it| escape::truncate_value(it.value_in(request)).into()).collect(),
        )
    }

    /// Returns the line of a request, with its line end. `captured` comes from [`capture`](Self::capture) of this
    /// template.
    pub fn render_line(
        &self,
        captured: &CapturedRequest,
        response: &LoggedResponse,
        revision: &LoggedRevision<'_>,
    ) -> String {
        // The captured values are in the order of the parts, so one iterator serves them all.
        let mut captured = captured.0.iter();
        let mut line = String::with_capacity(self.source.len() + 256);
        for part in &*self.parts {
            match part {
                TemplatePart::Text(text) => line.push_str(text),
                TemplatePart::Value(TemplateValue { source, functions }) => {
                    let value: Cow<'_, str> = match source {
                        ValueSource::Literal(text) => (&**text).into(),
                        ValueSource::Request(_) => captured.next().map_or("", |it| &**it).into(),
                        ValueSource::Response(it) => it.value_in(response).into(),
                        ValueSource::Revision(it) => it.value_in(revision),
                    };
                    // Escaped at the end too: functions such as `print` leave control characters in place.
                    let value = functions.iter().fold(value, |it, function| function.apply(it));
                    escape::push_line_value(&mut line, &value);
                }
            }
        }
        if !line.ends_with('\n') {
            line.push('\n');
        }
        line
    }
}

impl RequestField {
    fn value_in<'a>(&self, request: &LoggedRequest<'a>) -> Cow<'a, str> {
        let (major, minor) = request.version;
        match self {
            Self::Method => request.method.into(),
            Self::RequestTarget => request.target.into(),
            Self::Path => escape::decode_percent(request.path),
            Self::Query => request.query.into(),
            Self::Host => request.host.into(),
            Self::Protocol => format!("HTTP/{major}.{minor}").into(),
            Self::ProtocolMajor => major.to_string().into(),
            Self::ProtocolMinor => minor.to_string().into(),
            Self::RemoteAddress => request.remote.to_string().into(),
            Self::ContentLength => request.length.to_string().into(),
            Self::Header(name) => {
                (request.headers)(name).into_iter().next().unwrap_or_default().into()
            }
            Self::Headers(name) => format!("[{}]", (request.headers)(name).join(" ")).into(),
            Self::TraceId => trace_id(request.headers).into(),
        }
    }

    /// Returns the name of the value, if the client controls its text.
    fn client_controlled_name(&self) -> Option<String> {
        match self {
            Self::Method
            | Self::Protocol
            | Self::ProtocolMajor
            | Self::ProtocolMinor
            | Self::RemoteAddress
            | Self::ContentLength
            | Self::TraceId => None,
            Self::RequestTarget => Some(".Request.RequestURI".into()),
            Self::Path => Some(".Request.URL.Path".into()),
            Self::Query => Some(".Request.URL.RawQuery".into()),
            Self::Host => Some(".Request.Host".into()),
            Self::Header(name) | Self::Headers(name) => Some(format!("the header {name}")),
        }
    }
}

impl ResponseField {
    fn value_in(self, response: &LoggedResponse) -> String {
        match self {
            Self::Code => response.code.to_string(),
            Self::Size => response.size.to_string(),
            Self::Latency => escape::format_go_float(response.latency),
        }
    }
}

impl RevisionField {
    fn value_in<'a>(self, revision: &LoggedRevision<'a>) -> Cow<'a, str> {
        match self {
            Self::Name => revision.name.into(),
            Self::Namespace => revision.namespace.into(),
            Self::Service => revision.service.into(),
            Self::Configuration => revision.configuration.into(),
            Self::PodName => revision.pod_name.into(),
            Self::PodIp => revision.pod_ip.map(|it| it.to_string()).unwrap_or_default().into(),
        }
    }
}

impl TemplateFunction {
    fn apply(self, text: Cow<'_, str>) -> Cow<'_, str> {
        match self {
            Self::Js => escape::escape_js(&text).into(),
            Self::Html => escape::escape_html(&text).into(),
            Self::UrlQuery => escape::escape_url_query(&text).into(),
            Self::Print => text,
        }
    }
}

/// Returns the trace id of a request from W3C's `traceparent`, or else from B3's header; empty: none.
fn trace_id(headers: &dyn Fn(&str) -> Vec<String>) -> String {
    // A client controls these headers: anything but hexadecimal digits of the right length is left out.
    let hexadecimal = |it: &str, lengths: &[usize]| {
        lengths.contains(&it.len()) && it.bytes().all(|it| it.is_ascii_hexdigit())
    };
    let first = |name| headers(name).into_iter().next().unwrap_or_default();
    let parent = first("traceparent");
    // `VERSION-TRACEID-PARENTID-FLAGS`, by W3C Trace Context.
    let id = parent.split('-').nth(1).unwrap_or_default();
    if hexadecimal(id, &[32]) {
        return id.to_owned();
    }
    let b3 = first("x-b3-traceid");
    if hexadecimal(&b3, &[16, 32]) { b3 } else { String::new() }
}

impl PartialEq for LogTemplate {
    fn eq(&self, other: &Self) -> bool {
        self.source == other.source
    }
}

impl Eq for LogTemplate {}

impl fmt::Debug for LogTemplate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Template").field(&self.source).finish()
    }
}

#[cfg(test)]
mod tests;

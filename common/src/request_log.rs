//! Pure: the line that is written of each finished request, from a template in Go's syntax.
//!
//! Fields and functions are those that Knative documents for `logging.request-log-template`
//! (`config/core/configmaps/observability.yaml` at 98e5ef9), without conditions and loops: a template is a row of texts
//! and values. Whatever a client sends, a value has a bound and breaks no line, and one that goes through `js` breaks
//! no string in JSON either. What cannot be carried out is refused when the template is read; filling it cannot fail.

use std::{
    borrow::Cow,
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

mod escape;
mod parse;

/// Knative's line, in force where request logs are asked for without a template.
pub const USUAL: &str = concat!(
    r#"{"httpRequest": {"requestMethod": "{{.Request.Method}}", "requestUrl": "{{js .Request.RequestURI}}", "#,
    r#""requestSize": "{{.Request.ContentLength}}", "status": {{.Response.Code}}, "#,
    r#""responseSize": "{{.Response.Size}}", "userAgent": "{{js .Request.UserAgent}}", "#,
    r#""remoteIp": "{{js .Request.RemoteAddr}}", "serverIp": "{{.Revision.PodIP}}", "#,
    r#""referer": "{{js .Request.Referer}}", "latency": "{{.Response.Latency}}s", "#,
    r#""protocol": "{{.Request.Proto}}"}, "traceId": "{{.TraceID}}"}"#,
);

/// Bytes that a template may have.
pub const LONGEST: usize = 4096;
/// Values that a template may have.
pub const MOST_VALUES: usize = 32;
/// Functions that one value may go through: each can make it six times as long.
const MOST_FUNCTIONS: usize = 2;
/// Bytes of a value before it goes through functions; the rest is left out, and three dots say so.
pub const LONGEST_VALUE: usize = 2048;

/// What is said of a template that cannot be carried out.
const SUPPORTED: &str = "a template may have .Request (Method, RequestURI, URL, URL.Path, URL.RawQuery, Host, Proto, \
     ProtoMajor, ProtoMinor, RemoteAddr, ContentLength, UserAgent, Referer), \
     index .Request.Header \"NAME\", .Request.Header.Get \"NAME\", .Response (Code, Size, Latency), .Revision (Name, \
     Namespace, Service, Configuration, PodName, PodIP), .TraceID, texts in quotes, and the functions js, html, \
     urlquery and print";

/// A template that cannot be carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("template: requestLog:{line}:{column}: {what}; {SUPPORTED}")]
pub struct BadTemplate {
    /// From 1.
    pub line: usize,
    /// In characters, from 1.
    pub column: usize,
    /// What stands there.
    pub what: String,
}

/// A template that can be carried out. Cheap to clone.
#[derive(Clone)]
pub struct Template {
    source: Arc<str>,
    parts: Arc<[Part]>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(Box<str>),
    Value(Value),
}

/// A value and the functions it goes through, first one first.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Value {
    from: Of,
    through: Vec<Function>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Of {
    Literal(Box<str>),
    Request(OfRequest),
    Response(OfResponse),
    Revision(OfRevision),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum OfRequest {
    Method,
    Target,
    Path,
    Query,
    Host,
    Proto,
    Major,
    Minor,
    Remote,
    Length,
    /// Its first value.
    Header(Box<str>),
    /// All its values, in brackets, as Go prints a list.
    Headers(Box<str>),
    Trace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OfResponse {
    Code,
    Size,
    Latency,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OfRevision {
    Name,
    Namespace,
    Service,
    Configuration,
    PodName,
    PodIp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Function {
    Js,
    Html,
    UrlQuery,
    Print,
}

/// A request as its client sent it.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// Its method.
    pub method: &'a str,
    /// Path and query; or all of the URL, where the client named all of it.
    pub target: &'a str,
    /// The path as sent.
    pub path: &'a str,
    /// The query, without its question mark.
    pub query: &'a str,
    /// The host asked for, with its port if it was named.
    pub host: &'a str,
    /// Version of HTTP: 1.1 is `(1, 1)`.
    pub version: (u8, u8),
    /// Where the client is.
    pub remote: SocketAddr,
    /// Bytes of its body; -1 while that is unknown.
    pub length: i64,
    /// All values of a header.
    pub headers: &'a dyn Fn(&str) -> Vec<String>,
}

impl fmt::Debug for Request<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Request").field(&self.method).field(&self.target).finish()
    }
}

/// How a request was answered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Response {
    /// The status code.
    pub code: u16,
    /// Bytes of the body that were passed on.
    pub size: u64,
    /// Seconds from its arrival to the end of the answer.
    pub latency: f64,
}

/// Who answered it; texts are empty where that is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Revision<'a> {
    /// The Revision's name.
    pub name: &'a str,
    /// Its namespace.
    pub namespace: &'a str,
    /// The Service it belongs to.
    pub service: &'a str,
    /// The Configuration it belongs to.
    pub configuration: &'a str,
    /// The pod's name.
    pub pod_name: &'a str,
    /// The pod's address.
    pub pod_ip: Option<IpAddr>,
}

/// What a template needs of a request, kept until that is answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken(Box<[Box<str>]>);

impl Template {
    /// Reads a template.
    pub fn parse(source: &str) -> Result<Self, BadTemplate> {
        let parts = parse::parse(source)?;
        Ok(Self { source: source.into(), parts: parts.into() })
    }

    /// The text as written.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The values that a client chooses freely and that go through no function. In JSON they belong into `js`.
    pub fn unescaped(&self) -> Vec<String> {
        let bare = |part: &Part| match part {
            Part::Value(Value { from: Of::Request(it), through }) => {
                let bare = through.iter().all(|it| *it == Function::Print);
                bare.then(|| it.free()).flatten()
            }
            Part::Text(_) | Part::Value(_) => None,
        };
        self.parts.iter().filter_map(bare).collect()
    }

    /// Takes what the line needs of a request, before that goes its way.
    pub fn take(&self, request: &Request<'_>) -> Taken {
        let asked = self.parts.iter().filter_map(|part| match part {
            Part::Value(Value { from: Of::Request(it), .. }) => Some(it),
            Part::Text(_) | Part::Value(_) => None,
        });
        Taken(asked.map(|it| escape::cut(it.of(request)).into()).collect())
    }

    /// The line of a request, with its line end. `taken` is from [`take`](Self::take) of this template.
    pub fn line(&self, taken: &Taken, response: &Response, revision: &Revision<'_>) -> String {
        let mut taken = taken.0.iter();
        let mut line = String::with_capacity(self.source.len() + 256);
        for part in &*self.parts {
            match part {
                Part::Text(text) => line.push_str(text),
                Part::Value(Value { from, through }) => {
                    let value: Cow<'_, str> = match from {
                        Of::Literal(text) => (&**text).into(),
                        Of::Request(_) => taken.next().map_or("", |it| &**it).into(),
                        Of::Response(it) => it.of(response).into(),
                        Of::Revision(it) => it.of(revision),
                    };
                    let value = through.iter().fold(value, |it, function| function.of(it));
                    escape::push_in_line(&mut line, &value);
                }
            }
        }
        if !line.ends_with('\n') {
            line.push('\n');
        }
        line
    }
}

impl OfRequest {
    fn of<'a>(&self, request: &Request<'a>) -> Cow<'a, str> {
        let (major, minor) = request.version;
        match self {
            Self::Method => request.method.into(),
            Self::Target => request.target.into(),
            Self::Path => escape::percent_decoded(request.path),
            Self::Query => request.query.into(),
            Self::Host => request.host.into(),
            Self::Proto => format!("HTTP/{major}.{minor}").into(),
            Self::Major => major.to_string().into(),
            Self::Minor => minor.to_string().into(),
            Self::Remote => request.remote.to_string().into(),
            Self::Length => request.length.to_string().into(),
            Self::Header(name) => {
                (request.headers)(name).into_iter().next().unwrap_or_default().into()
            }
            Self::Headers(name) => format!("[{}]", (request.headers)(name).join(" ")).into(),
            Self::Trace => trace(request.headers).into(),
        }
    }

    /// Its name, if it is free text of the client's.
    fn free(&self) -> Option<String> {
        match self {
            Self::Method
            | Self::Proto
            | Self::Major
            | Self::Minor
            | Self::Remote
            | Self::Length
            | Self::Trace => None,
            Self::Target => Some(".Request.RequestURI".into()),
            Self::Path => Some(".Request.URL.Path".into()),
            Self::Query => Some(".Request.URL.RawQuery".into()),
            Self::Host => Some(".Request.Host".into()),
            Self::Header(name) | Self::Headers(name) => Some(format!("the header {name}")),
        }
    }
}

impl OfResponse {
    fn of(self, response: &Response) -> String {
        match self {
            Self::Code => response.code.to_string(),
            Self::Size => response.size.to_string(),
            Self::Latency => escape::float(response.latency),
        }
    }
}

impl OfRevision {
    fn of<'a>(self, revision: &Revision<'a>) -> Cow<'a, str> {
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

impl Function {
    fn of(self, text: Cow<'_, str>) -> Cow<'_, str> {
        match self {
            Self::Js => escape::js(&text).into(),
            Self::Html => escape::html(&text).into(),
            Self::UrlQuery => escape::url_query(&text).into(),
            Self::Print => text,
        }
    }
}

/// The trace a request belongs to, by W3C's `traceparent` or else by B3's header; empty: none.
fn trace(headers: &dyn Fn(&str) -> Vec<String>) -> String {
    let hexadecimal = |it: &str, lengths: &[usize]| {
        lengths.contains(&it.len()) && it.bytes().all(|it| it.is_ascii_hexdigit())
    };
    let first = |name| headers(name).into_iter().next().unwrap_or_default();
    let parent = first("traceparent");
    let id = parent.split('-').nth(1).unwrap_or_default();
    if hexadecimal(id, &[32]) {
        return id.to_owned();
    }
    let b3 = first("x-b3-traceid");
    if hexadecimal(&b3, &[16, 32]) { b3 } else { String::new() }
}

impl PartialEq for Template {
    fn eq(&self, other: &Self) -> bool {
        self.source == other.source
    }
}

impl Eq for Template {}

impl fmt::Debug for Template {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Template").field(&self.source).finish()
    }
}

#[cfg(test)]
mod tests;

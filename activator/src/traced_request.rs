//! Pure: queries of the pages about routes: the hosts to list, and the request that a trace asks about.

use std::{fmt, net::IpAddr, num::NonZeroU16};

use common::{
    decimal,
    url_query::{encode_percent, query_pairs},
};

use crate::entrypoint::Entrypoint;

/// Error: a parameter of a page is not as expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{parameter} is {value:?}: it must be {expected}")]
pub struct RequestQueryError {
    /// Name of the parameter.
    pub parameter: String,
    /// Value that was given.
    pub value: String,
    /// Description of a good value.
    pub expected: &'static str,
}

impl RequestQueryError {
    fn new(parameter: &str, value: &str, expected: &'static str) -> Self {
        Self { parameter: parameter.to_owned(), value: value.to_owned(), expected }
    }
}

/// Reads the query of `/debug/routes`: `host=TEXT`, or nothing. Returns the text in lower case.
pub fn parse_host_filter(query: &str) -> Result<String, RequestQueryError> {
    let mut filter = String::new();
    for (name, value) in query_pairs(query) {
        match name.as_str() {
            "host" => filter = value.to_ascii_lowercase(),
            _ => return Err(RequestQueryError::new(&name, &value, "absent: only host is known")),
        }
    }
    Ok(filter)
}

/// Request that a trace asks about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracedRequest {
    /// Host, as in the header `Host`.
    pub host: String,
    /// Path with its query; begins with `/`.
    pub path: String,
    /// Names and values of further headers.
    pub headers: Vec<(String, String)>,
    /// Listener that the request comes in by.
    pub entrypoint: Entrypoint,
    /// True if the connection has TLS.
    pub is_tls: bool,
    /// Address of the client; `None`: it is not known.
    pub client: Option<IpAddr>,
}

impl TracedRequest {
    /// Request from outside without TLS.
    pub fn new(host: impl Into<String>, path: impl Into<String>) -> Self {
        Self {
            host: host.into(),
            path: path.into(),
            headers: Vec::new(),
            entrypoint: Entrypoint::External,
            is_tls: false,
            client: None,
        }
    }

    /// Reads the query of `/debug/trace`: `host=HOST`, and optionally `path=/PATH`, `header=NAME:VALUE` (several times),
    /// `entrypoint=outside`, `inside`, `outside:PORT` or a service's own port, `tls=true`, and `client=IP`.
    pub fn from_query(query: &str) -> Result<Self, RequestQueryError> {
        let mut request = Self::new("", "/");
        for (name, value) in query_pairs(query) {
            request.set_parameter(&name, value)?;
        }
        if request.host.is_empty() {
            let expected = "a host, such as shop.example.com";
            return Err(RequestQueryError::new("host", "", expected));
        }
        if request.is_tls && request.entrypoint != Entrypoint::External {
            let expected = "false at this entrypoint: traces know TLS from outside only";
            return Err(RequestQueryError::new("tls", "true", expected));
        }
        Ok(request)
    }

    /// Sets one parameter of the query. An error names the parameter and the values that it can have.
    fn set_parameter(&mut self, name: &str, value: String) -> Result<(), RequestQueryError> {
        let error = |expected| RequestQueryError::new(name, &value, expected);
        match name {
            "host" => self.host = value,
            "path" => {
                self.path = parse_path(&value).ok_or_else(|| error("a path that begins with /"))?;
            }
            "header" => {
                let header = parse_header(&value).ok_or_else(|| error("NAME:VALUE"))?;
                self.headers.push(header);
            }
            "entrypoint" => {
                let expected =
                    "outside, inside, outside:PORT, or the port of a service at the activators";
                self.entrypoint = parse_entrypoint(&value).ok_or_else(|| error(expected))?;
            }
            "tls" => self.is_tls = value.parse().map_err(|_bad| error("true or false"))?,
            "client" => {
                // As handshakes and requests know it: an IPv4-mapped address is the IPv4 address.
                let client = value.parse::<IpAddr>().map_err(|_bad| error("an IP address"))?;
                self.client = Some(client.to_canonical());
            }
            _ => {
                let known = "absent: host, path, header, entrypoint, tls and client are known";
                return Err(error(known));
            }
        }
        Ok(())
    }
}

impl fmt::Display for TracedRequest {
    /// Writes the query that [`from_query`](Self::from_query) reads.
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, path, headers, entrypoint, is_tls, client } = self;
        write!(out, "host={}&path={}", encode_percent(host), encode_percent(path))?;
        write!(out, "&entrypoint={}&tls={is_tls}", entrypoint_name(*entrypoint))?;
        for (name, value) in headers {
            write!(out, "&header={}", encode_percent(&format!("{name}:{value}")))?;
        }
        client.map_or(Ok(()), |it| write!(out, "&client={}", encode_percent(&it.to_string())))
    }
}

/// Returns the path of a request if it has the form: `/` and visible ASCII.
pub fn parse_path(text: &str) -> Option<String> {
    let is_visible = text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#');
    (text.starts_with('/') && is_visible).then(|| text.to_owned())
}

/// Splits a header into its name and value, without spaces around them. `None`: one of them cannot be in a request.
pub fn parse_header(text: &str) -> Option<(String, String)> {
    let (name, value) = text.split_once(':')?;
    let (name, value) = (name.trim(), value.trim());
    http::HeaderName::try_from(name).ok()?;
    http::HeaderValue::try_from(value).ok()?;
    Some((name.to_owned(), value.to_owned()))
}

/// Prefix of the name of a gateway port.
const GATEWAY_PORT_PREFIX: &str = "outside:";

/// Parses the name of an entrypoint: `outside`, `inside`, the port of a service at the activators, or `outside:PORT` for
/// a gateway port.
pub fn parse_entrypoint(text: &str) -> Option<Entrypoint> {
    let parse_port = |text: &str| decimal::parse_port(text).map(NonZeroU16::get);
    match (text, text.strip_prefix(GATEWAY_PORT_PREFIX)) {
        ("outside", _) => Some(Entrypoint::External),
        ("inside", _) => Some(Entrypoint::Internal),
        (_, Some(port)) => parse_port(port).map(Entrypoint::GatewayPort),
        (port, None) => parse_port(port).map(Entrypoint::Service),
    }
}

/// Returns the name of an entrypoint, as [`parse_entrypoint`] reads it.
pub fn entrypoint_name(entrypoint: Entrypoint) -> String {
    match entrypoint {
        Entrypoint::Service(port) => port.to_string(),
        Entrypoint::Internal => "inside".to_owned(),
        Entrypoint::External => "outside".to_owned(),
        Entrypoint::GatewayPort(port) => format!("{GATEWAY_PORT_PREFIX}{port}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_that_is_written_is_read_again() {
        let plain = TracedRequest::new("shop.example", "/");
        let full = TracedRequest {
            headers: vec![
                ("knative-serving-tag".to_owned(), "blue".to_owned()),
                ("x".to_owned(), "a:b & c=d+%".to_owned()),
            ],
            is_tls: true,
            client: Some("fd00::1".parse().unwrap()),
            ..TracedRequest::new("shop.example:8080", "/a?b=c&d=%20")
        };
        let own_port = TracedRequest { entrypoint: Entrypoint::Service(20_001), ..plain.clone() };
        let gateway_port =
            TracedRequest { entrypoint: Entrypoint::GatewayPort(5432), ..plain.clone() };
        for request in [plain, full, own_port, gateway_port] {
            let query = request.to_string();
            assert_eq!(TracedRequest::from_query(&query), Ok(request), "{query}");
        }
        let inside = TracedRequest::from_query("host=a&entrypoint=inside").unwrap();
        assert_eq!((inside.entrypoint, inside.path.as_str()), (Entrypoint::Internal, "/"));
    }

    #[test]
    fn a_parameter_that_would_have_no_effect_is_refused() {
        for (query, expected) in [
            ("", "host is \"\": it must be a host"),
            ("host=", "host is \"\""),
            ("host=a&path=b", "path is \"b\": it must be a path that begins with /"),
            ("host=a&path=/%0d%0a", "path is "),
            ("host=a&path=/b%23c", "path is "),
            ("host=a&header=b", "header is \"b\": it must be NAME:VALUE"),
            ("host=a&header=%20:b", "header is "),
            ("host=a&header=b:c%0ad", "header is "),
            ("host=a&entrypoint=0", "entrypoint is \"0\""),
            ("host=a&entrypoint=other", "entrypoint is "),
            ("host=a&entrypoint=outside:0", "entrypoint is "),
            ("host=a&entrypoint=%2B20001", "entrypoint is \"+20001\""),
            ("host=a&entrypoint=outside:%2B5432", "entrypoint is "),
            ("host=a&tls=yes", "tls is \"yes\": it must be true or false"),
            ("host=a&tls=true&entrypoint=inside", "tls is \"true\": it must be false at"),
            ("host=a&client=b", "client is \"b\""),
            ("host=a&method=GET", "method is \"GET\": it must be absent"),
        ] {
            let error = TracedRequest::from_query(query).expect_err(query).to_string();
            assert!(error.starts_with(expected), "{query}: {error}");
        }
        assert_eq!(parse_host_filter("host=Shop"), Ok("shop".to_owned()));
        assert_eq!(parse_host_filter(""), Ok(String::new()));
        assert!(parse_host_filter("hosts=a").unwrap_err().to_string().starts_with("hosts is "));
    }
}

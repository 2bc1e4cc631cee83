//! Pure: export of traces and request metrics by activators, as the RouteTable carries its settings.

use std::{fmt, num::NonZeroU16, time::Duration};

use http::Uri;

use crate::decimal::parse_port;

/// Traces and request metrics of activators. Default: neither.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TelemetrySettings {
    /// Export of traces; `None`: no spans are recorded.
    pub traces: Option<TraceSettings>,
    /// Metrics of each request; `None`: they are not recorded.
    pub metrics: Option<RequestMetricsSettings>,
}

/// Export of the spans of sampled requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceSettings {
    /// Collector that gets the spans.
    pub collector: OtlpCollector,
    /// Share of the requests that are sampled.
    pub sampling: SamplingRate,
}

/// Metrics of requests by host and Revision, which `/metrics` shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestMetricsSettings {
    /// Collector that gets them too; `None`: only `/metrics` shows them.
    pub collector: Option<OtlpCollector>,
    /// Time between two exports, not 0.
    pub interval: Duration,
}

impl RequestMetricsSettings {
    /// Default time between two exports: that of OpenTelemetry's periodic reader.
    pub const DEFAULT_INTERVAL: Duration = Duration::from_secs(60);
}

/// Encoding and transport of OTLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtlpProtocol {
    /// Protobuf over gRPC, without TLS.
    Grpc,
    /// Protobuf in the body of a POST of HTTP/1.1, without TLS.
    HttpProtobuf,
}

impl OtlpProtocol {
    /// Port of an endpoint without one: that of OTLP for gRPC, and that of the URL's scheme for HTTP.
    fn default_port(self) -> NonZeroU16 {
        const GRPC: NonZeroU16 = NonZeroU16::new(4317).expect("not 0");
        const HTTP: NonZeroU16 = NonZeroU16::new(80).expect("not 0");
        match self {
            Self::Grpc => GRPC,
            Self::HttpProtobuf => HTTP,
        }
    }
}

/// Collector of OpenTelemetry: protocol and address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtlpCollector {
    /// Protocol that it is sent.
    pub protocol: OtlpProtocol,
    /// Name or address of its host. An IPv6 address is in brackets.
    pub host: String,
    /// Port of its host.
    pub port: NonZeroU16,
    /// Path of its URL. Empty: the default path of the signal. Without effect for gRPC.
    pub path: String,
}

/// Reason for which an endpoint cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EndpointFault {
    /// The text is no URL with a host, or has a user, a query or another scheme.
    #[error("must be a URL such as http://collector.observability:4317")]
    NotUrl,
    /// The URL needs TLS. Like in Knative, so does one without a scheme.
    #[error("only http:// is supported, and an endpoint without a scheme means https")]
    NeedsTls,
}

impl OtlpCollector {
    /// Parses the URL of a collector.
    pub fn parse(protocol: OtlpProtocol, text: &str) -> Result<Self, EndpointFault> {
        let Some((scheme, _)) = text.split_once("://") else {
            // Checked as if it had the scheme that it means, so that a typing error is refused as one.
            let checked = parse_http_url(protocol, &format!("http://{text}"));
            return checked.and(Err(EndpointFault::NeedsTls));
        };
        match scheme.to_ascii_lowercase().as_str() {
            "http" => parse_http_url(protocol, text),
            "https" => Err(EndpointFault::NeedsTls),
            _ => Err(EndpointFault::NotUrl),
        }
    }

    /// Host and port, as in the header `Host`.
    pub fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

impl fmt::Display for OtlpCollector {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "http://{}:{}{}", self.host, self.port, self.path)
    }
}

fn parse_http_url(protocol: OtlpProtocol, text: &str) -> Result<OtlpCollector, EndpointFault> {
    let url: Uri = text.parse().map_err(|_invalid| EndpointFault::NotUrl)?;
    let authority = url.authority().ok_or(EndpointFault::NotUrl)?;
    let is_plain = url.scheme_str() == Some("http")
        && url.query().is_none()
        && !authority.as_str().contains('@')
        && !authority.host().is_empty();
    if !is_plain {
        return Err(EndpointFault::NotUrl);
    }
    // `Uri` accepts ports that are no numbers of 16 bits, and reports none then.
    let port_text = authority.as_str().strip_prefix(authority.host()).unwrap_or_default();
    let port = match port_text.strip_prefix(':') {
        Some(number) => parse_port(number).ok_or(EndpointFault::NotUrl)?,
        None => protocol.default_port(),
    };
    let path = if url.path() == "/" && !text.ends_with('/') { "" } else { url.path() };
    Ok(OtlpCollector { protocol, host: authority.host().to_owned(), port, path: path.to_owned() })
}

/// Share of the requests that are sampled, as OpenTelemetry's `TraceIdRatioBased` decides.
///
/// A trace without a parent is sampled by the number of its trace id, so all components with one rate decide alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplingRate {
    /// Number of 63 bits below which a trace id is sampled; 0: none, 2⁶³: all.
    threshold: u64,
}

impl SamplingRate {
    /// All requests are sampled, also those whose client says otherwise.
    pub const ALWAYS: Self = Self { threshold: 1 << 63 };

    /// Rate from a fraction; values outside of 0 to 1 are taken as the nearest of them.
    pub fn from_fraction(fraction: f64) -> Self {
        if fraction >= 1.0 {
            return Self::ALWAYS;
        }
        // As in OpenTelemetry for Go. The cast saturates, so a negative fraction becomes 0.
        let threshold = (fraction * (1u64 << 63) as f64) as u64;
        Self { threshold }
    }

    /// Rate from its threshold; `None`: it is above 2⁶³.
    pub fn from_threshold(threshold: u64) -> Option<Self> {
        (threshold <= Self::ALWAYS.threshold).then_some(Self { threshold })
    }

    /// Number of 63 bits below which a trace id is sampled.
    pub fn threshold(self) -> u64 {
        self.threshold
    }

    /// Returns true if no request is sampled, also none whose client asks for it.
    pub fn is_never(self) -> bool {
        self.threshold == 0
    }

    /// Returns true if a request is sampled. `parent` is the flag of its client; `None`: its trace begins here.
    /// `trace_id` is the lower half of the trace id.
    ///
    /// As in Knative, the rates 0 and 1 hold for all requests, and the flag counts at the rates between them.
    pub fn samples(self, parent: Option<bool>, trace_id: u64) -> bool {
        if self.is_never() || self == Self::ALWAYS {
            return !self.is_never();
        }
        parent.unwrap_or(trace_id >> 1 < self.threshold)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<String, EndpointFault> {
        OtlpCollector::parse(OtlpProtocol::Grpc, text).map(|it| it.to_string())
    }

    #[test]
    fn an_endpoint_is_a_url_of_http() {
        assert_eq!(parse("http://c.obs:4317"), Ok("http://c.obs:4317".into()));
        assert_eq!(parse("http://c.obs"), Ok("http://c.obs:4317".into()));
        assert_eq!(parse("HTTP://[::1]:1/v1/traces"), Ok("http://[::1]:1/v1/traces".into()));
        let http = OtlpCollector::parse(OtlpProtocol::HttpProtobuf, "http://c/").expect("a URL");
        assert_eq!((http.authority().as_str(), http.path.as_str()), ("c:80", "/"));
        for text in ["https://c:1", "c:4317", "10.0.0.1:4317", "c"] {
            assert_eq!(parse(text), Err(EndpointFault::NeedsTls), "{text}");
        }
        for text in [
            "",
            "http://",
            "http://:1",
            "ftp://c",
            "http://c:0",
            "http://c:70000",
            "http://c:x",
            "http://c:+4317",
            "http://me@c:1",
            "http://c:1/?a=b",
            "a b",
        ] {
            assert_eq!(parse(text), Err(EndpointFault::NotUrl), "{text}");
        }
    }

    #[test]
    fn the_parent_decides_but_for_the_rates_zero_and_one() {
        let half = SamplingRate::from_fraction(0.5);
        let (low, high) = (1, u64::MAX);
        assert!(half.samples(None, low) && !half.samples(None, high));
        assert!(half.samples(Some(true), high) && !half.samples(Some(false), low));
        for id in [low, high] {
            let [never, always] = [0.0, 1.0].map(SamplingRate::from_fraction);
            assert!(always.samples(Some(false), id) && always.samples(None, id));
            assert!(!never.samples(Some(true), id) && !never.samples(None, id));
        }
        assert_eq!(SamplingRate::from_fraction(-1.0), SamplingRate::from_fraction(0.0));
        assert_eq!(SamplingRate::from_fraction(7.0), SamplingRate::ALWAYS);
    }

    #[test]
    fn a_tenth_of_evenly_spread_trace_ids_is_sampled_at_the_rate_0_1() {
        let rate = SamplingRate::from_fraction(0.1);
        let step = u64::MAX / 1000;
        let sampled = (0..1000).filter(|at| rate.samples(None, at * step)).count();
        assert!((99..=101).contains(&sampled), "{sampled}");
        let again = SamplingRate::from_threshold(rate.threshold());
        assert_eq!(again, Some(rate));
        assert_eq!(SamplingRate::from_threshold(u64::MAX), None);
    }
}

//! Pure: requests to the platform itself, not to the app.
//!
//! The activator itself responds to them, from inside the cluster only, and they never wake a service. Responses are
//! Knative's (`pkg/activator/handler`, `pkg/queue/health`, `networking/pkg/probe`). A probe of `queue` would reach a
//! pod's sidecar in Knative, which this activator replaces. From outside none of this is a probe: the headers are
//! dropped, and the request is the app's.

use http::{HeaderName, HeaderValue, StatusCode, header, request};

/// Header of a probe to the platform (`networking/pkg/http/header/header.go`).
pub const K_NETWORK_PROBE: HeaderName = HeaderName::from_static("k-network-probe");
/// Header with the version of a route, sent with a probe of Knative.
pub const K_NETWORK_HASH: HeaderName = HeaderName::from_static("k-network-hash");
/// Header of a kubelet's probe that a mesh has rewritten.
pub const K_KUBELET_PROBE: HeaderName = HeaderName::from_static("k-kubelet-probe");

/// Probe of the platform, by its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlatformProbe {
    /// Health of this process. The User-Agent or a header identifies the kubelet.
    Health,
    /// Presence of an activator on the path.
    Activator,
    /// Readiness of a pod of the service.
    Queue,
    /// Version of a route in force: the response repeats the `K-Network-Hash` of the request.
    Route(Option<HeaderValue>),
    /// Target that is not known.
    Unknown(String),
}

/// State of the activator and the service on which the response depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeHealth {
    /// True if the activator is being stopped.
    pub is_shutting_down: bool,
    /// True if the probed service has a ready pod.
    pub has_ready_pod: bool,
}

/// Response to a probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeResponse {
    /// Status code of the response.
    pub status: StatusCode,
    /// Text of the response's body.
    pub text: String,
    /// Value of the response's `K-Network-Hash`.
    pub hash: Option<HeaderValue>,
}

/// Probe that a request contains; `None`: the request is for the app.
pub fn parse_probe(head: &request::Parts) -> Option<PlatformProbe> {
    let headers = &head.headers;
    let agent = headers.get(header::USER_AGENT);
    if agent.is_some_and(|agent| agent.as_bytes().starts_with(b"kube-probe/"))
        || headers.contains_key(K_KUBELET_PROBE)
    {
        return Some(PlatformProbe::Health);
    }
    Some(match headers.get(K_NETWORK_PROBE)?.to_str().unwrap_or_default() {
        "activator" => PlatformProbe::Activator,
        "queue" => PlatformProbe::Queue,
        "probe" => {
            let hash = headers.get(K_NETWORK_HASH);
            PlatformProbe::Route(hash.filter(|hash| !hash.is_empty()).cloned())
        }
        other => PlatformProbe::Unknown(other.to_owned()),
    })
}

impl PlatformProbe {
    /// Response to the probe in the given state.
    pub fn respond(self, health: ProbeHealth) -> ProbeResponse {
        let response =
            |status, text: &str| ProbeResponse { status, text: text.to_owned(), hash: None };
        match self {
            Self::Health | Self::Queue if health.is_shutting_down => {
                response(StatusCode::SERVICE_UNAVAILABLE, "shutting down")
            }
            Self::Health => response(StatusCode::OK, ""),
            Self::Activator => response(StatusCode::OK, "activator"),
            Self::Queue if health.has_ready_pod => response(StatusCode::OK, "queue"),
            Self::Queue => response(StatusCode::SERVICE_UNAVAILABLE, ""),
            Self::Route(Some(hash)) => {
                ProbeResponse { hash: Some(hash), ..response(StatusCode::OK, "") }
            }
            Self::Route(None) => {
                let text = "a probe request must contain a non-empty \"K-Network-Hash\" header";
                response(StatusCode::BAD_REQUEST, text)
            }
            Self::Unknown(value) => {
                let text = format!("unexpected probe header value: {value}");
                response(StatusCode::BAD_REQUEST, &text)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn probe_of(name: &str, value: &str) -> Option<PlatformProbe> {
        let request = Request::builder().header(name, value).body(()).expect("valid");
        parse_probe(&request.into_parts().0)
    }

    fn response_to(
        probe: Option<PlatformProbe>,
        is_shutting_down: bool,
        has_ready_pod: bool,
    ) -> (u16, String) {
        let response =
            probe.expect("a probe").respond(ProbeHealth { is_shutting_down, has_ready_pod });
        (response.status.as_u16(), response.text)
    }

    #[test]
    fn each_probe_gets_knatives_response() {
        let activator = || probe_of("k-network-probe", "activator");
        let queue = || probe_of("k-network-probe", "queue");
        assert_eq!(response_to(activator(), false, false), (200, "activator".into()));
        assert_eq!(response_to(activator(), true, false), (200, "activator".into()));
        assert_eq!(response_to(queue(), false, true), (200, "queue".into()));
        assert_eq!(response_to(queue(), false, false), (503, String::new()));
        assert_eq!(response_to(queue(), true, true), (503, "shutting down".into()));
        let other = probe_of("k-network-probe", "other");
        assert_eq!(
            response_to(other, false, false),
            (400, "unexpected probe header value: other".into())
        );
    }

    #[test]
    fn a_kubelet_probe_gets_the_health() {
        for (name, value) in [("user-agent", "kube-probe/1.35"), ("k-kubelet-probe", "x")] {
            assert_eq!(response_to(probe_of(name, value), false, false), (200, String::new()));
            assert_eq!(
                response_to(probe_of(name, value), true, true),
                (503, "shutting down".into())
            );
        }
        assert_eq!(probe_of("user-agent", "curl/8 kube-probe/1"), None);
    }

    #[test]
    fn a_hash_comes_back_and_must_be_there() {
        let hash = HeaderValue::from_static("abc");
        let request = Request::builder()
            .header(K_NETWORK_PROBE, "probe")
            .header(K_NETWORK_HASH, &hash)
            .body(())
            .expect("valid");
        let response = parse_probe(&request.into_parts().0)
            .expect("a probe")
            .respond(ProbeHealth { is_shutting_down: false, has_ready_pod: false });
        assert_eq!((response.status.as_u16(), response.hash), (200, Some(hash)));
        assert_eq!(response_to(probe_of("k-network-probe", "probe"), false, false).0, 400);
    }
}

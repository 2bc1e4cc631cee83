//! Pure: the host of a request, and the service that a name within the cluster means.

use http::{Version, header, request};

use common::wire::NamespacedName;

use crate::request_error::ProxyRequestError;

/// Host that a request names: lower case, without port and final dot.
pub fn request_host(head: &request::Parts) -> Option<String> {
    let authority_or_host = match head.uri.authority() {
        Some(authority) => authority.as_str(),
        None => head.headers.get(header::HOST)?.to_str().ok()?,
    };
    normalize_host(authority_or_host)
}

/// Host of an authority or of a value of `Host`: lower case, without port and final dot.
pub(crate) fn normalize_host(authority_or_host: &str) -> Option<String> {
    // User information and port are no part of the host; an IPv6 address is in brackets and has colons itself.
    let bare = authority_or_host.rsplit_once('@').map_or(authority_or_host, |(_, host)| host);
    let end = if bare.starts_with('[') {
        bare.find(']')? + 1
    } else {
        bare.find(':').unwrap_or(bare.len())
    };
    let host = bare[..end].trim_end_matches('.');
    (!host.is_empty()).then(|| host.to_ascii_lowercase())
}

/// Refuses a request whose host is ambiguous (RFC 9112 §3.2): two recipients that choose differently between two hosts
/// would route the request differently. HTTP/1.0 may leave the host out.
pub fn check_host(head: &request::Parts) -> Result<(), ProxyRequestError> {
    let refused = |text: &str| Err(ProxyRequestError::BadRequest(text.to_owned()));
    let mut hosts = head.headers.get_all(header::HOST).iter();
    match (hosts.next(), hosts.next()) {
        (None, _) if head.version == Version::HTTP_11 => refused("missing required Host header"),
        // HTTP/2 has the host in the target (RFC 9113 §8.3.1).
        (None, _) if head.version == Version::HTTP_2 && head.uri.authority().is_none() => {
            refused("missing required :authority")
        }
        (_, Some(_)) => refused("too many Host headers"),
        (Some(host), None) if !is_valid_host(host.as_bytes()) => refused("malformed Host header"),
        _ if head.uri.authority().is_some_and(|it| !is_valid_host(it.as_str().as_bytes())) => {
            refused("malformed host in the request's target")
        }
        _ => Ok(()),
    }
}

/// Returns true for `uri-host [":" port]` (RFC 3986 §3.2); as there, the host may be empty.
pub(crate) fn is_valid_host(text: &[u8]) -> bool {
    let (host, port) = match text.iter().rposition(|&byte| byte == b':' || byte == b']') {
        Some(at) if text[at] == b':' => (&text[..at], &text[at + 1..]),
        Some(_) | None => (text, &[][..]),
    };
    let is_name = match host {
        [b'[', inner @ .., b']'] => is_ip_literal(inner),
        name => is_reg_name(name),
    };
    is_name && port.iter().all(u8::is_ascii_digit)
}

/// Returns true for the inside of brackets in a host: an IPv6 address, with or without a zone.
fn is_ip_literal(inner: &[u8]) -> bool {
    let text = std::str::from_utf8(inner).unwrap_or_default();
    let (address, zone) =
        text.split_once("%25").map_or((text, None), |(it, zone)| (it, Some(zone)));
    address.parse::<std::net::Ipv6Addr>().is_ok()
        && zone.is_none_or(|zone| !zone.is_empty() && is_reg_name(zone.as_bytes()))
}

fn is_reg_name(mut name: &[u8]) -> bool {
    loop {
        name = match name {
            [] => return true,
            [b'%', high, low, rest @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                rest
            }
            [byte, rest @ ..]
                if byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=".contains(byte) =>
            {
                rest
            }
            _ => return false,
        };
    }
}

/// Name of the service that a host within the cluster means: `name.ns`, `name.ns.svc` or `name.ns.svc.<cluster
/// domain>`, lower case and without port.
///
/// Example: with the cluster domain `cluster.local`, `hello.default.svc` means `default/hello`.
pub fn cluster_local_service(host: &str, cluster_domain: &str) -> Option<NamespacedName> {
    let (name, rest) = host.split_once('.')?;
    let (namespace, rest) =
        rest.split_once('.').map_or((rest, None), |(ns, rest)| (ns, Some(rest)));
    let is_local = match rest {
        None | Some("svc") => true,
        Some(rest) => rest.strip_prefix("svc.").is_some_and(|domain| domain == cluster_domain),
    };
    let is_name = !name.is_empty() && !namespace.is_empty();
    (is_local && is_name).then(|| NamespacedName::new(namespace, name))
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn head(uri: &str, fields: &[(&str, &str)]) -> request::Parts {
        let builder = Request::builder().uri(uri);
        let builder = fields.iter().fold(builder, |it, (k, v)| it.header(*k, *v));
        builder.body(()).expect("valid").into_parts().0
    }

    #[test]
    fn http2_names_its_host_in_the_target() {
        let check = |uri| {
            let mut head = head(uri, &[]);
            head.version = Version::HTTP_2;
            check_host(&head).map_err(|failure| failure.to_string())
        };
        assert_eq!(check("http://a:80/"), Ok(()));
        assert_eq!(check("/"), Err("missing required :authority".to_owned()));
    }

    #[test]
    fn a_name_within_the_cluster_means_a_service() {
        let local = |host| cluster_local_service(host, "cluster.local");
        let hello = Some(NamespacedName::new("default", "hello"));
        for host in ["hello.default", "hello.default.svc", "hello.default.svc.cluster.local"] {
            assert_eq!(local(host), hello, "{host}");
        }
        for host in [
            "",
            "hello",
            ".default",
            "hello.",
            "hello.default.svc.",
            "hello.default.svc.example.com",
            "hello.default.example.com",
            "hello.default.svc.cluster.local.example.com",
        ] {
            assert_eq!(local(host), None, "{host}");
        }
    }

    #[test]
    fn a_host_is_compared_without_port_case_and_final_dot() {
        let host_of = |uri, it| request_host(&head(uri, &[("host", it)]));
        assert_eq!(
            host_of("/", "Hello.Default.Example.COM:8080"),
            Some("hello.default.example.com".into())
        );
        assert_eq!(host_of("/", "a.b."), Some("a.b".into()));
        assert_eq!(host_of("/", "[fd00::1]:80"), Some("[fd00::1]".into()));
        assert_eq!(host_of("http://real:9/x", "other"), Some("real".into()));
        assert_eq!(host_of("/", ""), None);
        assert_eq!(request_host(&head("/", &[])), None);
    }

    #[test]
    fn a_host_is_a_name_or_an_address_with_or_without_a_port() {
        for good in [
            "",
            "a",
            "Hello.default.example.com.",
            "a:80",
            "a:",
            "under_score",
            "10.96.0.7:8080",
            "[fd00::1]",
            "[fd00::1]:80",
            "[fe80::1%25eth0]:80",
            "caf%C3%A9.example",
        ] {
            assert!(is_valid_host(good.as_bytes()), "{good}");
        }
        for bad in [
            "a b",
            "a/b",
            "user@a",
            "a:b",
            "a:80:80",
            "fd00::1",
            "[fd00::1",
            "fd00::1]",
            "[fd00::1]x",
            "[a]",
            "[fe80::1%25]",
            "100%",
            "%zz",
            "a?b",
            "a#b",
            "a\\b",
            "<a>",
            "caf\u{e9}",
            "a\t",
        ] {
            assert!(!is_valid_host(bad.as_bytes()), "{bad}");
        }
    }

    #[test]
    fn one_host_is_named_once() {
        let check = |uri, hosts: &[(&str, &str)]| {
            check_host(&head(uri, hosts)).map_err(|failure| failure.to_string())
        };
        assert_eq!(check("/", &[("host", "a")]), Ok(()));
        assert_eq!(check("http://a:80/", &[("host", "b")]), Ok(()));
        let twice = Err("too many Host headers".to_owned());
        assert_eq!(check("/", &[("host", "a"), ("host", "a")]), twice);
        assert_eq!(check("/", &[("host", "a b")]), Err("malformed Host header".to_owned()));
        let target = Err("malformed host in the request's target".to_owned());
        assert_eq!(check("http://user@a/", &[("host", "a")]), target);
    }
}

//! Pure: certificates of clients: the check of a request against the rule of its host, and the header by which a pod
//! learns the certificate.
//!
//! The header is Envoy's `X-Forwarded-Client-Cert`, with its elements `Hash` and `Subject`.

use std::fmt::Write as _;

use common::{certificates::format_subject, wire::ClientAuth};
use http::{HeaderMap, HeaderName, HeaderValue};
use ring::digest::{SHA256, digest};

use crate::request_error::ProxyRequestError;

const X_FORWARDED_CLIENT_CERT: &str = "x-forwarded-client-cert";
/// Longest subject that is passed on, in bytes. Servers bound the size of a head.
const MAX_SUBJECT_BYTES: usize = 2048;

/// Checks a request from outside against the rule of its host for certificates of clients.
///
/// `shown` is the rule that the client has met in its handshake. A host of the connection may have another one than the
/// host of the request: clients reuse a connection for all names of a certificate. `is_tls` is true if the connection
/// to this gateway has TLS.
pub fn check_client_auth(
    rule: Option<&ClientAuth>,
    shown: Option<&ClientAuth>,
    is_tls: bool,
) -> Result<(), ProxyRequestError> {
    match rule {
        // A proxy before the gateway has ended TLS, so that no certificate can have come here.
        Some(rule) if !is_tls && !rule.is_optional => {
            Err(ProxyRequestError::ClientCertificateRequired)
        }
        _ if is_tls && rule != shown => Err(ProxyRequestError::MisdirectedRequest),
        _ => Ok(()),
    }
}

/// Returns the header for a client with this certificate, in DER: the SHA-256 of the certificate, and its subject. A
/// subject that is too long or malformed is left out.
pub fn describe_certificate(certificate: &[u8]) -> HeaderValue {
    let mut text = "Hash=".to_owned();
    for byte in digest(&SHA256, certificate).as_ref() {
        // A string takes everything.
        let _ = write!(text, "{byte:02x}");
    }
    let subject = format_subject(certificate).filter(|it| it.len() <= MAX_SUBJECT_BYTES);
    // The subject has no quotation mark.
    if let Some(subject) = subject {
        let _ = write!(text, ";Subject=\"{subject}\"");
    }
    HeaderValue::try_from(text).expect("hex digits and a subject are printable ASCII")
}

/// Writes the header of a request from outside, and removes each that came with it. Those of trusted proxies are among
/// them, since a proxy that does not know the header passes on what its client wrote.
pub fn write_client_certificate(headers: &mut HeaderMap, certificate: Option<&HeaderValue>) {
    // Servers that pass headers on as variables cannot tell `_` from `-`.
    let is_spelling = |name: &&HeaderName| {
        let dashed = name.as_str().bytes().map(|byte| if byte == b'_' { b'-' } else { byte });
        dashed.eq(X_FORWARDED_CLIENT_CERT.bytes())
    };
    let claims: Vec<HeaderName> = headers.keys().filter(is_spelling).cloned().collect();
    for name in claims {
        headers.remove(name);
    }
    if let Some(certificate) = certificate {
        headers.insert(HeaderName::from_static(X_FORWARDED_CLIENT_CERT), certificate.clone());
    }
}

#[cfg(test)]
mod tests {
    use common::{fixtures::certificates::TestAuthority, wire::NamespacedName};

    use super::*;

    #[test]
    fn a_request_is_served_by_the_rule_of_its_own_host_only() {
        let rule = |ca: &str, is_optional| ClientAuth {
            ca: Some(NamespacedName::new("default", ca)),
            is_optional,
        };
        let (required, optional, other) = (rule("a", false), rule("a", true), rule("b", false));
        let status = |rule, shown, is_tls| {
            let checked = check_client_auth(rule, shown, is_tls);
            checked.map_or_else(|refusal| refusal.status().as_u16(), |()| 200)
        };
        for (rule, shown, expected) in [
            (None, None, 200),
            (Some(&required), Some(&required), 200),
            (Some(&optional), Some(&optional), 200),
            (Some(&required), None, 421),
            (Some(&optional), None, 421),
            (None, Some(&required), 421),
            (Some(&required), Some(&optional), 421),
            (Some(&optional), Some(&required), 421),
            (Some(&required), Some(&other), 421),
        ] {
            assert_eq!(status(rule, shown, true), expected, "{rule:?} {shown:?}");
        }
        let without_tls =
            [None, Some(&optional), Some(&required)].map(|it| status(it, None, false));
        assert_eq!(without_tls, [200, 200, 403]);
    }

    #[test]
    fn a_certificate_is_described_by_its_hash_and_subject() {
        let der = TestAuthority::new().issue_client("a\"b").material().chain[0].clone();
        let hash: String =
            digest(&SHA256, &der).as_ref().iter().map(|it| format!("{it:02x}")).collect();
        let expected = format!("Hash={hash};Subject=\"CN=a\\22b,O=Clients\"");
        assert_eq!(describe_certificate(&der), expected.as_str());
        let long = TestAuthority::new().issue_client(&"a".repeat(MAX_SUBJECT_BYTES));
        let described = describe_certificate(&long.material().chain[0]);
        assert!(!described.to_str().unwrap().contains("Subject"), "{described:?}");
        let malformed = describe_certificate(b"no certificate");
        assert_eq!(malformed.len(), "Hash=".len() + 64);
    }

    #[test]
    fn a_client_cannot_write_the_header_in_any_spelling() {
        let mut headers = HeaderMap::new();
        for name in
            ["x-forwarded-client-cert", "x_forwarded_client_cert", "x-forwarded_client-cert"]
        {
            let name = HeaderName::from_static(name);
            headers.append(&name, HeaderValue::from_static("Hash=1"));
            headers.append(&name, HeaderValue::from_static("Hash=2"));
        }
        headers.append("x-other", HeaderValue::from_static("stays"));
        write_client_certificate(&mut headers, None);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["x-other"]);
        let certificate = HeaderValue::from_static("Hash=3");
        headers.insert(X_FORWARDED_CLIENT_CERT, HeaderValue::from_static("Hash=1"));
        write_client_certificate(&mut headers, Some(&certificate));
        let all: Vec<_> = headers.get_all(X_FORWARDED_CLIENT_CERT).iter().collect();
        assert_eq!(all, [&certificate]);
    }
}

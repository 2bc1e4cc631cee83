//! Pure: subject of a trace: a connect to an address and port, or a request to a host.

use std::net::{IpAddr, SocketAddr};

use agent::service_facts::parse_target;

/// Subject of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TraceSubject {
    /// Connect to this address and port, for which an agent chooses.
    Connect(SocketAddr),
    /// Request to this host, for which an activator chooses.
    Request(String),
}

/// Parses the subject of a trace. The port distinguishes the two: an address needs one, and a host has none, since
/// gateways ignore the port of a Host header. Errors name what is missing.
pub(super) fn parse_subject(text: &str) -> Result<TraceSubject, String> {
    let target = parse_target(text);
    if let Ok(to) = target {
        return Ok(TraceSubject::Connect(to));
    }
    let address = text.strip_prefix('[').and_then(|it| it.strip_suffix(']')).unwrap_or(text);
    if address.parse::<IpAddr>().is_ok() {
        return Err(format!(
            "{text:?} is an address without a port: name that of the connect, as in 10.96.0.10:53 \
             or [fd00::10]:53"
        ));
    }
    if is_host(text) {
        return Ok(TraceSubject::Request(text.to_owned()));
    }
    Err(format!(
        "{text:?} is neither an IP address and port, such as 10.96.0.10:53 or [fd00::10]:53, nor a \
         host without a port, such as shop.example.com"
    ))
}

/// Returns true for a host name. One that ends in a number would be an IPv4 address (WHATWG URL, section 3.5).
fn is_host(text: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let name = text.strip_suffix('.').unwrap_or(text);
    let last = name.rsplit('.').next().unwrap_or_default();
    let is_number = !last.is_empty() && last.bytes().all(|byte| byte.is_ascii_digit());
    let has_labels = name.split('.').all(|label| !label.is_empty());
    has_labels && !is_number && name.bytes().all(is_letter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_with_a_port_is_a_connect_and_a_name_a_request() {
        for address in ["10.96.0.1:80", "[fd00::10]:53", "[::ffff:10.96.0.1]:80"] {
            let subject = parse_subject(address);
            assert!(matches!(subject, Ok(TraceSubject::Connect(_))), "{address}: {subject:?}");
        }
        for host in
            ["shop.example.com", "Hello.default.", "localhost", "10.96.0.1.nip.io", "a_b.c", "x--y"]
        {
            assert_eq!(parse_subject(host), Ok(TraceSubject::Request(host.to_owned())));
        }
    }

    #[test]
    fn what_could_be_both_is_refused_with_what_is_missing() {
        for address in ["10.96.0.1", "fd00::10", "[fd00::10]"] {
            let error = parse_subject(address).unwrap_err();
            assert!(error.contains("without a port") && error.contains(address), "{error}");
        }
        for neither in [
            "shop.example:80",
            "None:80",
            "10.96.0.1:0",
            "10.96.0.300",
            "10.96.0",
            "https://shop.example/",
            "shop.example/path",
            "a b",
            "",
            ".",
            "a..b",
            "shöp.example",
        ] {
            let error = parse_subject(neither).unwrap_err();
            assert!(error.contains("is neither") && error.contains("10.96.0.10:53"), "{error}");
        }
    }
}

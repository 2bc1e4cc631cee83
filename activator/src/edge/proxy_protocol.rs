//! Pure: the header by which a proxy names its client, in versions 1 and 2 of the PROXY protocol
//! (HAProxy's `doc/proxy-protocol.txt`).
//!
//! [`parse_header`] gets the received bytes and returns the number of bytes to read next, never beyond the header's
//! end. The bytes behind it belong to hyper.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use common::decimal::parse_digits;

/// First bytes of a header of version 2.
const V2_SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// First bytes of a header of version 1.
const V1_PREFIX: &[u8] = b"PROXY ";
/// Length of the shortest header, `PROXY UNKNOWN` with its line end.
const MIN_HEADER_BYTES: usize = 15;
/// Length of the longest header of version 1, by the specification.
const V1_MAX_LINE: usize = 107;
/// Number of bytes before the addresses in version 2.
const V2_FIXED_BYTES: usize = 16;
/// Maximum number of bytes of addresses and further fields in version 2. The specification asks for 536 - 16; client
/// certificates need more.
const V2_MAX_PAYLOAD: usize = 8 << 10;
/// Further field of version 2 about TLS, and the bit in its first byte that is set if the client used TLS.
const TLV_SSL: u8 = 0x20;
const TLV_CLIENT_SSL: u8 = 1;
/// Port to which clients connect for HTTPS. The request comes without TLS, so a proxy has ended it.
const HTTPS_PORT: u16 = 443;

/// Client that a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyHeader {
    /// The header names a client by its address.
    Client {
        /// Address and port of the client's end.
        source: SocketAddr,
        /// True if the client's connection had TLS: by the header, or because the client has connected to port 443.
        is_secure: bool,
    },
    /// The connection is for the proxy itself (a health check), or for a client that it does not name.
    Unknown,
}

/// Next step of a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProxyHeaderStep {
    /// Read this many bytes more. All of them belong to the header.
    Read(usize),
    /// The header is complete.
    Done(ProxyHeader),
}

/// Error of bytes that are no valid header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProxyHeaderError {
    /// The bytes do not begin like a header.
    #[error("does not begin with a PROXY protocol header")]
    Signature,
    /// A line of version 1 has no end, or is invalid.
    #[error("malformed header of version 1")]
    MalformedV1,
    /// A field of version 2 has an undefined value, or does not fit.
    #[error("malformed header of version 2")]
    MalformedV2,
    /// The header is longer than this reader accepts.
    #[error("header of more than 8 KiB")]
    TooLong,
}

/// Parses a header from the first bytes of a connection.
pub fn parse_header(bytes: &[u8]) -> Result<ProxyHeaderStep, ProxyHeaderError> {
    let begins = |with: &[u8]| bytes.iter().zip(with).all(|(it, with)| it == with);
    if begins(&V2_SIGNATURE) && !bytes.is_empty() {
        return parse_v2(bytes);
    }
    if !begins(V1_PREFIX) {
        return Err(ProxyHeaderError::Signature);
    }
    match bytes.strip_suffix(b"\r\n") {
        Some(line) if bytes.len() >= MIN_HEADER_BYTES => parse_v1(line).map(ProxyHeaderStep::Done),
        _ if bytes.len() < MIN_HEADER_BYTES => {
            Ok(ProxyHeaderStep::Read(MIN_HEADER_BYTES - bytes.len()))
        }
        _ if bytes.len() >= V1_MAX_LINE || bytes.contains(&b'\n') => {
            Err(ProxyHeaderError::MalformedV1)
        }
        // The line end alone has two bytes, so two more bytes cannot go beyond it.
        _ if bytes.ends_with(b"\r") => Ok(ProxyHeaderStep::Read(1)),
        _ => Ok(ProxyHeaderStep::Read(2.min(V1_MAX_LINE - bytes.len()))),
    }
}

/// Parses the words of version 1: `PROXY TCP4 192.0.2.1 198.51.100.1 56324 443`.
fn parse_v1(line: &[u8]) -> Result<ProxyHeader, ProxyHeaderError> {
    let line = std::str::from_utf8(line).map_err(|_not_text| ProxyHeaderError::MalformedV1)?;
    let mut words = line.split(' ').skip(1);
    let is_ipv6 = match words.next() {
        Some("UNKNOWN") => return Ok(ProxyHeader::Unknown),
        Some("TCP4") => false,
        Some("TCP6") => true,
        _ => return Err(ProxyHeaderError::MalformedV1),
    };
    let mut address = || {
        let word = words.next()?;
        let address = match is_ipv6 {
            true => IpAddr::V6(word.parse().ok()?),
            false => IpAddr::V4(word.parse().ok()?),
        };
        Some(address)
    };
    // The order of the words is both addresses, then both ports, each the client's first.
    let addresses = address().zip(address());
    let mut port = || words.next().and_then(parse_digits::<u16>);
    let ports = port().zip(port());
    match (addresses, ports, words.next()) {
        (Some((source, _)), Some((from, to)), None) => {
            Ok(client_header(source, from, to == HTTPS_PORT))
        }
        _ => Err(ProxyHeaderError::MalformedV1),
    }
}

fn parse_v2(bytes: &[u8]) -> Result<ProxyHeaderStep, ProxyHeaderError> {
    let Some((fixed, rest)) = bytes.split_first_chunk::<V2_FIXED_BYTES>() else {
        // The first read ends where the shortest header of version 1 ends, because the version is not known before.
        let end = if bytes.len() < MIN_HEADER_BYTES { MIN_HEADER_BYTES } else { V2_FIXED_BYTES };
        return Ok(ProxyHeaderStep::Read(end - bytes.len()));
    };
    let length = usize::from(u16::from_be_bytes([fixed[14], fixed[15]]));
    if length > V2_MAX_PAYLOAD {
        return Err(ProxyHeaderError::TooLong);
    }
    // Version, and the command: 0 (LOCAL) if the proxy connects for itself, 1 (PROXY) for a client.
    let is_local = match fixed[12] {
        0x20 => true,
        0x21 => false,
        _ => return Err(ProxyHeaderError::MalformedV2),
    };
    match length.checked_sub(rest.len()) {
        Some(0) => {}
        Some(more) => return Ok(ProxyHeaderStep::Read(more)),
        None => return Err(ProxyHeaderError::MalformedV2),
    }
    if is_local {
        return Ok(ProxyHeaderStep::Done(ProxyHeader::Unknown));
    }
    parse_v2_addresses(fixed[13], rest)
        .ok_or(ProxyHeaderError::MalformedV2)
        .map(ProxyHeaderStep::Done)
}

/// Client's addresses in a header of version 2, by family and transport.
fn parse_v2_addresses(family: u8, rest: &[u8]) -> Option<ProxyHeader> {
    let port = |bytes: [u8; 2]| u16::from_be_bytes(bytes);
    match family {
        0x11 => {
            let (addresses, more) = rest.split_first_chunk::<12>()?;
            let [a, b, c, d, _, _, _, _, from @ .., to_high, to_low] = *addresses;
            let is_secure = parse_v2_tls(more)? || port([to_high, to_low]) == HTTPS_PORT;
            Some(client_header(Ipv4Addr::new(a, b, c, d).into(), port(from), is_secure))
        }
        0x21 => {
            let (addresses, more) = rest.split_first_chunk::<36>()?;
            let (source, _) = addresses.split_first_chunk::<16>()?;
            let (_, &[from_high, from_low, to_high, to_low]) = addresses.split_last_chunk::<4>()?;
            let is_secure = parse_v2_tls(more)? || port([to_high, to_low]) == HTTPS_PORT;
            Some(client_header(
                Ipv6Addr::from(*source).into(),
                port([from_high, from_low]),
                is_secure,
            ))
        }
        // Unspecified, UDP and UNIX sockets: a client without an address that can be used here.
        0x00 | 0x12 | 0x22 | 0x31 | 0x32 => Some(ProxyHeader::Unknown),
        _ => None,
    }
}

/// Returns true if the fields behind the addresses state that the client used TLS. `None`: one does not fit.
fn parse_v2_tls(mut rest: &[u8]) -> Option<bool> {
    let mut is_secure = false;
    while !rest.is_empty() {
        let (&[kind, high, low], more) = rest.split_first_chunk::<3>()?;
        let (value, more) = more.split_at_checked(usize::from(u16::from_be_bytes([high, low])))?;
        is_secure |= kind == TLV_SSL && value.first().is_some_and(|it| it & TLV_CLIENT_SSL != 0);
        rest = more;
    }
    Some(is_secure)
}

fn client_header(address: IpAddr, port: u16, is_secure: bool) -> ProxyHeader {
    ProxyHeader::Client { source: SocketAddr::new(address.to_canonical(), port), is_secure }
}

/// Checks invariants of the reader on any bytes, for tests and the fuzzer.
///
/// # Panics
///
/// When an invariant does not hold.
pub fn check(bytes: &[u8]) {
    let mut end = 0;
    while let Ok(ProxyHeaderStep::Read(more)) = parse_header(&bytes[..end]) {
        assert!(more > 0, "a step makes progress");
        assert!(end + more <= V2_FIXED_BYTES + V2_MAX_PAYLOAD, "a header is bounded");
        if end + more > bytes.len() {
            return;
        }
        end += more;
    }
}

#[cfg(test)]
mod tests;

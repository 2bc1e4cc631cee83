use proptest::prelude::*;

use super::*;

/// Reads a header as the shell does: exactly the requested bytes. Returns the header and the bytes behind it. The error
/// `None`: the header is incomplete.
fn read_stepwise(bytes: &[u8]) -> Result<(ProxyHeader, &[u8]), Option<ProxyHeaderError>> {
    let mut end = 0;
    loop {
        match parse_header(&bytes[..end]).map_err(Some)? {
            ProxyHeaderStep::Done(header) => return Ok((header, &bytes[end..])),
            ProxyHeaderStep::Read(more) if end + more <= bytes.len() => end += more,
            ProxyHeaderStep::Read(_) => return Err(None),
        }
    }
}

fn client_from(source: &str, is_secure: bool) -> ProxyHeader {
    ProxyHeader::Client { source: source.parse().expect("an address"), is_secure }
}

/// Encodes a header of version 2.
fn v2_header(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
    let length = u16::try_from(rest.len()).expect("short").to_be_bytes();
    [&V2_SIGNATURE[..], &[0x20 | command, family], &length, rest].concat()
}

fn v2_addresses(source: SocketAddr, destination_port: u16) -> Vec<u8> {
    let address = match source.ip() {
        IpAddr::V4(it) => [it.octets(); 2].concat(),
        IpAddr::V6(it) => [it.octets(); 2].concat(),
    };
    [&address[..], &source.port().to_be_bytes(), &destination_port.to_be_bytes()].concat()
}

#[test]
fn a_line_of_version_1_names_the_client() {
    for (line, header) in [
        ("PROXY TCP4 192.0.2.1 198.51.100.1 56324 80\r\n", client_from("192.0.2.1:56324", false)),
        ("PROXY TCP4 192.0.2.1 198.51.100.1 56324 443\r\n", client_from("192.0.2.1:56324", true)),
        ("PROXY TCP6 2001:db8::1 2001:db8::2 7 8443\r\n", client_from("[2001:db8::1]:7", false)),
        ("PROXY TCP6 ::ffff:192.0.2.1 ::1 7 80\r\n", client_from("192.0.2.1:7", false)),
        ("PROXY UNKNOWN\r\n", ProxyHeader::Unknown),
        ("PROXY UNKNOWN ffff::1 ffff::2 65535 65535\r\n", ProxyHeader::Unknown),
    ] {
        let bytes = format!("{line}GET / HTTP/1.1\r\n");
        assert_eq!(
            read_stepwise(bytes.as_bytes()),
            Ok((header, &b"GET / HTTP/1.1\r\n"[..])),
            "{line}"
        );
    }
}

#[test]
fn version_2_names_the_client_and_whether_it_used_tls() {
    let source: SocketAddr = "192.0.2.1:56324".parse().unwrap();
    let six: SocketAddr = "[2001:db8::1]:7".parse().unwrap();
    let tls = [&[TLV_SSL, 0, 5, TLV_CLIENT_SSL, 0, 0, 0, 0][..], &[0x04, 0, 1, 0]].concat();
    let plain = [TLV_SSL, 0, 5, 0, 0, 0, 0, 0];
    for (bytes, header) in [
        (v2_header(1, 0x11, &v2_addresses(source, 80)), client_from("192.0.2.1:56324", false)),
        (v2_header(1, 0x11, &v2_addresses(source, 443)), client_from("192.0.2.1:56324", true)),
        (
            v2_header(1, 0x11, &[v2_addresses(source, 80), tls].concat()),
            client_from("192.0.2.1:56324", true),
        ),
        (
            v2_header(1, 0x11, &[&v2_addresses(source, 80)[..], &plain].concat()),
            client_from("192.0.2.1:56324", false),
        ),
        (v2_header(1, 0x21, &v2_addresses(six, 80)), client_from("[2001:db8::1]:7", false)),
        (v2_header(0, 0x00, &[]), ProxyHeader::Unknown),
        (v2_header(0, 0x11, &v2_addresses(source, 443)), ProxyHeader::Unknown),
        (v2_header(1, 0x00, &[1, 2, 3]), ProxyHeader::Unknown),
        (v2_header(1, 0x31, &[0; 216]), ProxyHeader::Unknown),
    ] {
        let more = [&bytes[..], b"PRI * HTTP/2.0"].concat();
        assert_eq!(
            read_stepwise(&more),
            Ok((header, &b"PRI * HTTP/2.0"[..])),
            "{}",
            bytes.escape_ascii()
        );
    }
}

#[test]
fn an_invalid_header_differs_from_an_incomplete_one() {
    let source: SocketAddr = "192.0.2.1:56324".parse().unwrap();
    let long = [&V2_SIGNATURE[..], &[0x21, 0x11, 0xff, 0xff]].concat();
    let lines = [
        "GET / HTTP/1.1\r\nhost: a\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "PROXY TCP4 192.0.2.1 198.51.100.1 56324 80 1\r\n",
        "PROXY TCP4 192.0.2.1 198.51.100.1 +5632 80\r\n",
        "PROXY TCP4 192.0.2.1 198.51.100.1 65536 80\r\n",
        "PROXY TCP4 2001:db8::1 2001:db8::2 7 80\r\n",
        "PROXY TCP6 192.0.2.1 198.51.100.1 56324 80\r\n",
        "PROXY TCP4 192.0.2.1  198.51.100.1 56324 80\r\n",
        "PROXY UDP4 192.0.2.1 198.51.100.1 56324 80\r\n",
        "PROXY TCP4 192.0.2.1 198.51.100.1 56324 80\n\nGET",
        "PROXY  TCP4 192.0.2.1 198.51.100.1 56324 80\r\n",
    ];
    for line in lines {
        assert!(matches!(read_stepwise(line.as_bytes()), Err(Some(_))), "{line:?}");
    }
    let endless = format!("PROXY TCP4 {}", "1".repeat(200));
    assert_eq!(read_stepwise(endless.as_bytes()), Err(Some(ProxyHeaderError::MalformedV1)));
    assert_eq!(read_stepwise(&long), Err(Some(ProxyHeaderError::TooLong)));
    for bad in [
        v2_header(2, 0x11, &v2_addresses(source, 80)),
        v2_header(1, 0x13, &v2_addresses(source, 80)),
        v2_header(1, 0x11, &v2_addresses(source, 80)[..11]),
        v2_header(1, 0x11, &[&v2_addresses(source, 80)[..], &[TLV_SSL, 0, 9, 1]].concat()),
        v2_header(1, 0x11, &[&v2_addresses(source, 80)[..], &[TLV_SSL, 0]].concat()),
    ] {
        assert_eq!(
            read_stepwise(&bad),
            Err(Some(ProxyHeaderError::MalformedV2)),
            "{}",
            bad.escape_ascii()
        );
    }
    let whole = v2_header(1, 0x11, &v2_addresses(source, 80));
    for end in 0..whole.len() {
        assert_eq!(read_stepwise(&whole[..end]), Err(None), "{end} bytes of it");
    }
}

#[test]
fn nothing_in_the_fuzzers_corpus_fails() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/proxy_protocol");
    let files = std::fs::read_dir(folder).expect("it has a folder");
    let all = files.map(|file| std::fs::read(file.expect("readable").path()).expect("readable"));
    assert!(all.map(|bytes| check(&bytes)).count() > 0);
}

proptest! {
    /// Whatever bytes come, a step makes progress within bounds.
    #[test]
    fn any_bytes_are_taken_or_refused(
        version in 0..3u8,
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let begin: &[u8] = [&b""[..], b"PROXY ", &V2_SIGNATURE][usize::from(version)];
        check(&[begin, &bytes].concat());
    }

    /// Headers that a proxy writes are read as they were meant, and no byte behind them is consumed.
    #[test]
    fn a_header_is_read_to_its_end_and_no_further(
        source: SocketAddr,
        destination_port: u16,
        is_version_2: bool,
        behind in proptest::collection::vec(any::<u8>(), 0..40),
    ) {
        let ip = source.ip();
        let port = source.port();
        let bytes = if is_version_2 {
            let family = if source.is_ipv4() { 0x11 } else { 0x21 };
            v2_header(1, family, &v2_addresses(source, destination_port))
        } else {
            let family = if source.is_ipv4() { "4" } else { "6" };
            format!("PROXY TCP{family} {ip} {ip} {port} {destination_port}\r\n").into()
        };
        let expected = ProxyHeader::Client {
            source: SocketAddr::new(ip.to_canonical(), port),
            is_secure: destination_port == HTTPS_PORT,
        };
        let all = [&bytes[..], &behind].concat();
        prop_assert_eq!(read_stepwise(&all), Ok((expected, &behind[..])));
    }
}

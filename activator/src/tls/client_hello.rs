//! Pure: the host that a client names in its ClientHello (RFC 8446 §4.1.2, RFC 6066 §3), read without a handshake.
//!
//! The bytes belong to the server behind the activator, if the host passes TLS through. Otherwise rustls reads them again
//! and refuses what is invalid, so that nothing is refused here.

/// Most bytes in which a ClientHello must end. Those of usual clients have 0.5 to 2 KiB.
pub const MAX_CLIENT_HELLO_BYTES: usize = 16 << 10;

/// Type of a record with messages of the handshake.
const HANDSHAKE_RECORD: u8 = 22;
/// Length of the head of a record.
const RECORD_HEAD_BYTES: usize = 5;
/// Type of the message.
const CLIENT_HELLO: u8 = 1;
/// Length of the head of a message.
const MESSAGE_HEAD_BYTES: usize = 4;
/// Number of the extension with the host, and the type of a DNS name in it.
const SERVER_NAME_EXTENSION: u16 = 0;
const DNS_NAME: u8 = 0;

/// Result of the first bytes of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientHelloStep {
    /// More bytes are needed.
    Incomplete,
    /// The message is complete. The host is in lower case and without final dot; `None`: the client names none.
    Complete(Option<String>),
    /// The bytes are no ClientHello of at most [`MAX_CLIENT_HELLO_BYTES`].
    Invalid,
}

/// Reads the first bytes of a connection.
pub fn read_client_hello(bytes: &[u8]) -> ClientHelloStep {
    let cut = &bytes[..bytes.len().min(MAX_CLIENT_HELLO_BYTES)];
    match read_message(cut) {
        MessageStep::Incomplete if bytes.len() >= MAX_CLIENT_HELLO_BYTES => {
            ClientHelloStep::Invalid
        }
        MessageStep::Incomplete => ClientHelloStep::Incomplete,
        MessageStep::Invalid => ClientHelloStep::Invalid,
        MessageStep::Complete(body) => match parse_body(&body) {
            Some(host) => ClientHelloStep::Complete(host),
            None => ClientHelloStep::Invalid,
        },
    }
}

/// First message of the handshake, without its head.
enum MessageStep {
    Incomplete,
    Complete(Vec<u8>),
    Invalid,
}

/// Joins the first message, which may lie in several records.
fn read_message(mut bytes: &[u8]) -> MessageStep {
    let mut message = Vec::new();
    loop {
        match message_length(&message) {
            Some(Err(())) => return MessageStep::Invalid,
            Some(Ok(length)) if message.len() >= MESSAGE_HEAD_BYTES + length => {
                message.truncate(MESSAGE_HEAD_BYTES + length);
                return MessageStep::Complete(message.split_off(MESSAGE_HEAD_BYTES));
            }
            Some(Ok(_)) | None => {}
        }
        let Some(&kind) = bytes.first() else { return MessageStep::Incomplete };
        if kind != HANDSHAKE_RECORD || bytes.get(1).is_some_and(|major| *major != 3) {
            return MessageStep::Invalid;
        }
        let Some((&[_, _, _, high, low], rest)) = bytes.split_first_chunk::<RECORD_HEAD_BYTES>()
        else {
            return MessageStep::Incomplete;
        };
        let length = usize::from(u16::from_be_bytes([high, low]));
        // An empty record brings nothing, and RFC 8446 allows none here.
        if length == 0 {
            return MessageStep::Invalid;
        }
        let (fragment, rest) = rest.split_at(length.min(rest.len()));
        message.extend_from_slice(fragment);
        bytes = rest;
    }
}

/// Returns the length that the head of a message states. `None`: the head is incomplete. An error: it is no ClientHello, or
/// too long.
fn message_length(message: &[u8]) -> Option<Result<usize, ()>> {
    if message.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
        return Some(Err(()));
    }
    let (&[_, a, b, c], _) = message.split_first_chunk::<MESSAGE_HEAD_BYTES>()?;
    let length = usize::try_from(u32::from_be_bytes([0, a, b, c])).unwrap_or(usize::MAX);
    Some(if length <= MAX_CLIENT_HELLO_BYTES { Ok(length) } else { Err(()) })
}

/// Returns the host of a message. `None`: a field does not fit.
fn parse_body(body: &[u8]) -> Option<Option<String>> {
    // Version and random bytes.
    let (_, rest) = body.split_at_checked(2 + 32)?;
    let (_session, rest) = split_vector8(rest)?;
    let (_ciphers, rest) = split_vector16(rest)?;
    let (_compression, rest) = split_vector8(rest)?;
    // Clients before extensions end here.
    if rest.is_empty() {
        return Some(None);
    }
    let (mut extensions, _) = split_vector16(rest)?;
    while !extensions.is_empty() {
        let (&number, rest) = extensions.split_first_chunk::<2>()?;
        let (content, rest) = split_vector16(rest)?;
        if u16::from_be_bytes(number) == SERVER_NAME_EXTENSION {
            return parse_server_name(content);
        }
        extensions = rest;
    }
    Some(None)
}

fn parse_server_name(content: &[u8]) -> Option<Option<String>> {
    let (mut names, _) = split_vector16(content)?;
    while let Some((&kind, rest)) = names.split_first() {
        let (name, rest) = split_vector16(rest)?;
        if kind == DNS_NAME {
            let name = std::str::from_utf8(name).ok()?;
            return Some(Some(name.trim_end_matches('.').to_ascii_lowercase()));
        }
        names = rest;
    }
    Some(None)
}

/// Splits a field behind its length of one byte.
fn split_vector8(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&length, rest) = bytes.split_first()?;
    rest.split_at_checked(usize::from(length))
}

/// Splits a field behind its length of two bytes.
fn split_vector16(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (&length, rest) = bytes.split_first_chunk::<2>()?;
    rest.split_at_checked(usize::from(u16::from_be_bytes(length)))
}

/// Checks invariants of the reader on any bytes, for tests and the fuzzer.
///
/// # Panics
///
/// When an invariant does not hold.
pub fn check(bytes: &[u8]) {
    let whole = read_client_hello(bytes);
    let mut decided = None;
    for end in 0..bytes.len().min(2 << 10) {
        let step = read_client_hello(&bytes[..end]);
        // More bytes never change a result, however they come.
        if let Some(before) = &decided {
            assert_eq!(&step, before, "after {end} bytes");
        } else if step != ClientHelloStep::Incomplete {
            decided = Some(step);
        }
    }
    if let Some(before) = decided {
        assert_eq!(whole, before, "at the end");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use rustls::{ClientConfig, ClientConnection, RootCertStore, pki_types::ServerName};

    use super::*;

    /// ClientHello of rustls for this host.
    fn client_hello(host: &str) -> Vec<u8> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider);
        let config = config.with_safe_default_protocol_versions().unwrap();
        let config = config.with_root_certificates(RootCertStore::empty()).with_no_client_auth();
        let name = ServerName::try_from(host.to_owned()).unwrap();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        bytes
    }

    fn complete(host: &str) -> ClientHelloStep {
        ClientHelloStep::Complete(Some(host.to_owned()))
    }

    #[test]
    fn the_host_is_read_at_the_last_byte_and_not_before() {
        let bytes = client_hello("DB.Example");
        for end in 0..bytes.len() {
            assert_eq!(read_client_hello(&bytes[..end]), ClientHelloStep::Incomplete, "{end}");
        }
        assert_eq!(read_client_hello(&bytes), complete("db.example"));
        // Early data may follow.
        let more = [&bytes[..], &[23, 3, 3, 0, 1, 0]].concat();
        assert_eq!(read_client_hello(&more), complete("db.example"));
        check(&more);
        let without = client_hello("192.0.2.1");
        assert_eq!(read_client_hello(&without), ClientHelloStep::Complete(None));
    }

    #[test]
    fn other_protocols_and_endless_messages_are_no_client_hello() {
        for bytes in [&b"GET / HTTP/1.1\r\n"[..], &[22, 2], &[22, 3, 1, 0, 0], &[22, 3, 1, 0, 1, 2]]
        {
            assert_eq!(read_client_hello(bytes), ClientHelloStep::Invalid, "{bytes:?}");
        }
        let endless =
            [&[22, 3, 1, 0x40, 0, 1, 0, 0x40, 0][..], &[0; MAX_CLIENT_HELLO_BYTES]].concat();
        assert_eq!(read_client_hello(&endless), ClientHelloStep::Invalid);
    }

    #[test]
    fn nothing_in_the_fuzzers_corpus_fails() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/client_hello");
        let files = std::fs::read_dir(folder).unwrap();
        let all = files.map(|file| std::fs::read(file.unwrap().path()).unwrap());
        assert!(all.map(|bytes| check(&bytes)).count() > 0);
    }

    proptest! {
        /// Records may cut the message anywhere.
        #[test]
        fn the_cuts_of_records_change_nothing(cuts in proptest::collection::vec(1_usize..400, 0..8)) {
            let bytes = client_hello("db.example");
            let mut message = &bytes[RECORD_HEAD_BYTES..];
            let mut cut_bytes = Vec::new();
            for length in cuts.into_iter().chain([usize::MAX]) {
                let (fragment, rest) = message.split_at(length.min(message.len()));
                if !fragment.is_empty() {
                    let length = u16::try_from(fragment.len()).unwrap().to_be_bytes();
                    cut_bytes.extend([22, 3, 1, length[0], length[1]]);
                    cut_bytes.extend_from_slice(fragment);
                }
                message = rest;
            }
            prop_assert_eq!(read_client_hello(&cut_bytes), complete("db.example"));
            check(&cut_bytes);
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            check(&bytes);
            check(&[&[22, 3, 1, 1, 0, 1, 0, 0, 0xfc][..], &bytes].concat());
        }
    }
}

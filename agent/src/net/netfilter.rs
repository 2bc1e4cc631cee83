//! Shell: detection of rules that rewrite the addresses of connections in the calling thread's network namespace.

use std::{fs, io, iter, time::Duration};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use tracing::debug;

use crate::{incompatible, net::netlink::wait_for_response};

/// Names of iptables' tables in a namespace, for each family.
const TABLE_NAMES_FILES: [&str; 2] =
    ["/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"];
/// Timeout of a response of netfilter.
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(500);

// From include/uapi/linux/netfilter/{nfnetlink,nf_tables}.h and include/uapi/linux/netlink.h.
/// Subsystem of nf_tables in the high byte of a message's type (`NFNL_SUBSYS_NFTABLES`).
const NF_TABLES: u16 = 10 << 8;
/// Message about one chain (`NFT_MSG_NEWCHAIN`), in a dump as well.
const NEW_CHAIN: u16 = NF_TABLES | 3;
/// Request for the chains (`NFT_MSG_GETCHAIN`).
const GET_CHAIN: u16 = NF_TABLES | 4;
/// Message with an error number, 0 for an acknowledgement (`NLMSG_ERROR`).
const ERROR: u16 = 2;
/// Message at the end of a dump (`NLMSG_DONE`).
const DONE: u16 = 3;
/// Attribute with the type of a chain (`NFTA_CHAIN_TYPE`).
const CHAIN_TYPE: u16 = 7;
/// Flags of a dump: `NLM_F_REQUEST | NLM_F_DUMP`.
const REQUEST_DUMP: u16 = 0x301;
/// Length of `struct nlmsghdr` in bytes.
const HEADER: usize = 16;
/// Length of `struct nfgenmsg` in bytes.
const NFGENMSG: usize = 4;

/// Returns true if the namespace has a table or chain of type nat.
///
/// A kernel without netfilter rewrites nothing, and it refuses the question like one that does not permit it. So every
/// failure counts as no redirection, and only the log at level debug shows it.
pub(crate) fn has_redirection() -> bool {
    find_redirection().unwrap_or_else(|error| {
        debug!(%error, "cannot find redirections: assumed that there are none");
        false
    })
}

/// Returns true if the namespace has a table or chain of type nat; an error if none is found and the kernel does not
/// tell all, as without netfilter.
pub(crate) fn find_redirection() -> io::Result<bool> {
    let mut failure = None;
    let tables = TABLE_NAMES_FILES.into_iter().map(has_nat_table);
    for found in tables.chain(iter::once_with(has_nat_chain)) {
        match found {
            Ok(true) => return Ok(true),
            Ok(false) => {}
            Err(error) => failure = Some(error),
        }
    }
    failure.map_or(Ok(false), Err)
}

fn has_nat_table(path: &str) -> io::Result<bool> {
    match fs::read_to_string(path) {
        Ok(names) => Ok(incompatible::has_nat_table(&names)),
        // Without the module of iptables there is no such file.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns true if the network namespace of this thread has a chain of type nat.
fn has_nat_chain() -> io::Result<bool> {
    let mut socket = Socket::new(NETLINK_NETFILTER)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    // Written by hand, as `netlink-packet-core` has no nf_tables messages: struct nlmsghdr first.
    let mut request = Vec::with_capacity(HEADER + NFGENMSG);
    request.extend(((HEADER + NFGENMSG) as u32).to_ne_bytes());
    request.extend(GET_CHAIN.to_ne_bytes());
    request.extend(REQUEST_DUMP.to_ne_bytes());
    // Sequence number and port, 4 bytes each; then struct nfgenmsg, all 0 for any family.
    request.extend([0; 8 + NFGENMSG]);
    socket.send(&request, 0)?;
    let mut buffer = Vec::with_capacity(64 * 1024);
    loop {
        wait_for_response(&socket, RESPONSE_TIMEOUT)?;
        buffer.clear();
        socket.recv(&mut buffer, 0)?;
        match read_datagram(&buffer) {
            ChainDumpState::More => {}
            ChainDumpState::End => return Ok(false),
            ChainDumpState::Failed(errno) => return Err(io::Error::from_raw_os_error(errno)),
            ChainDumpState::Malformed => return Err(io::ErrorKind::InvalidData.into()),
            ChainDumpState::Nat => return Ok(true),
        }
    }
}

/// Result of one datagram of responses.
#[derive(Debug, PartialEq, Eq)]
enum ChainDumpState {
    /// No chain of type nat yet: further datagrams follow.
    More,
    /// End of the dump without such a chain.
    End,
    /// Netfilter ended the dump with this error.
    Failed(i32),
    /// A message has an impossible length.
    Malformed,
    /// A chain of type nat exists.
    Nat,
}

/// Reads one datagram of the dump, up to the first chain of type nat or the end of the dump.
fn read_datagram(mut bytes: &[u8]) -> ChainDumpState {
    while let (Some(length), Some(kind)) = (u32_at(bytes, 0), u16_at(bytes, 4)) {
        let length = length as usize;
        // A length below the header's ends the loop, so that a malformed datagram cannot run it forever.
        let Some(message) = bytes.get(..length).filter(|it| it.len() >= HEADER) else {
            return ChainDumpState::Malformed;
        };
        match kind {
            NEW_CHAIN if is_nat(message.get(HEADER + NFGENMSG..).unwrap_or_default()) => {
                return ChainDumpState::Nat;
            }
            // Both begin with an error number, which is negative, or 0 for success.
            ERROR | DONE => {
                return match u32_at(message, HEADER).map_or(0, u32::cast_signed) {
                    0 => ChainDumpState::End,
                    error => ChainDumpState::Failed(error.saturating_neg()),
                };
            }
            _ => {}
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    ChainDumpState::More
}

/// Returns true if a chain's attributes give its type as nat.
fn is_nat(mut attributes: &[u8]) -> bool {
    while let (Some(length), Some(kind)) = (u16_at(attributes, 0), u16_at(attributes, 2)) {
        let length = usize::from(length).max(4);
        if kind == CHAIN_TYPE {
            return attributes.get(4..length).is_some_and(|text| text.starts_with(b"nat\0"));
        }
        attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    false
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Attribute with the name of a chain (`NFTA_CHAIN_NAME`).
    const CHAIN_NAME: u16 = 3;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend((4 + value.len() as u16).to_ne_bytes());
        out.extend(kind.to_ne_bytes());
        out.extend(value);
        out.resize(out.len().next_multiple_of(4), 0);
        out
    }

    fn message(kind: u16, attributes: &[Vec<u8>]) -> Vec<u8> {
        let body = attributes.concat();
        let mut out = Vec::new();
        out.extend(((HEADER + NFGENMSG + body.len()) as u32).to_ne_bytes());
        out.extend(kind.to_ne_bytes());
        out.extend([0; 10 + NFGENMSG]);
        out.extend(body);
        out
    }

    #[test]
    fn a_chain_of_type_nat_is_found_among_others() {
        let chain = |name: &[u8], chain_type: &[u8]| {
            message(NEW_CHAIN, &[attribute(CHAIN_NAME, name), attribute(CHAIN_TYPE, chain_type)])
        };
        let filter = chain(b"input\0", b"filter\0");
        let nat = chain(b"out\0", b"nat\0");
        let plain = message(NEW_CHAIN, &[attribute(CHAIN_NAME, b"nat\0")]);
        let done = message(DONE, &[]);
        assert_eq!(read_datagram(&[filter.clone(), nat].concat()), ChainDumpState::Nat);
        assert_eq!(read_datagram(&[filter.clone(), plain.clone()].concat()), ChainDumpState::More);
        assert_eq!(read_datagram(&[filter, plain, done].concat()), ChainDumpState::End);
        assert_eq!(read_datagram(&message(ERROR, &[])), ChainDumpState::End, "an acknowledgement");
    }

    #[test]
    fn a_refusal_and_a_malformed_datagram_are_errors() {
        let mut refusal = message(ERROR, &[]);
        refusal[HEADER..HEADER + 4].copy_from_slice(&(-libc::EPERM).to_ne_bytes());
        assert_eq!(read_datagram(&refusal), ChainDumpState::Failed(libc::EPERM));
        let mut short = message(NEW_CHAIN, &[]);
        short[..4].copy_from_slice(&15_u32.to_ne_bytes());
        assert_eq!(read_datagram(&short), ChainDumpState::Malformed, "shorter than a header");
        assert_eq!(read_datagram(&message(NEW_CHAIN, &[])[..17]), ChainDumpState::Malformed);
    }

    #[test]
    fn a_message_may_be_longer_than_16_bits_count() {
        let long = attribute(CHAIN_NAME, &vec![b'x'; 40_000]);
        let nat = message(NEW_CHAIN, &[long.clone(), long, attribute(CHAIN_TYPE, b"nat\0")]);
        assert_eq!(read_datagram(&nat), ChainDumpState::Nat);
    }
}

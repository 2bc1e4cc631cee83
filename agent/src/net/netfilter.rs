//! Shell: detection of rules that rewrite the addresses of connections in the calling thread's network namespace.

use std::{fs, io, os::fd::AsFd as _};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::incompatible;

/// Names of iptables' tables in a namespace, for each family.
const TABLE_NAMES_FILES: [&str; 2] =
    ["/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"];
/// Timeout of a response of netfilter, in ms.
const RESPONSE_TIMEOUT_MS: u16 = 500;

// From include/uapi/linux/netfilter/{nfnetlink,nf_tables}.h.
const NEW_CHAIN: u16 = 10 << 8 | 3;
const GET_CHAIN: u16 = 10 << 8 | 4;
/// Attribute with the type of a chain (`NFTA_CHAIN_TYPE`).
const CHAIN_TYPE: u16 = 7;
/// Flags of a dump: `NLM_F_REQUEST | NLM_F_DUMP`.
const REQUEST_DUMP: u16 = 0x301;
/// Length of `struct nlmsghdr` in bytes.
const HEADER: usize = 16;
/// Length of `struct nfgenmsg` in bytes.
const NFGENMSG: usize = 4;

/// Returns true if the namespace has a table or chain of type nat. A kernel without netfilter rewrites nothing.
pub(crate) fn has_redirection() -> bool {
    let legacy =
        |path: &str| fs::read_to_string(path).is_ok_and(|it| incompatible::has_nat_table(&it));
    TABLE_NAMES_FILES.iter().any(|path| legacy(path)) || has_nat_chain().unwrap_or(false)
}

fn has_nat_chain() -> io::Result<bool> {
    let mut socket = Socket::new(NETLINK_NETFILTER)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    // Written by hand, as `netlink-packet-core` has no nf_tables messages: struct nlmsghdr first.
    let mut request = Vec::with_capacity(HEADER + NFGENMSG);
    request.extend(((HEADER + NFGENMSG) as u32).to_ne_bytes());
    request.extend(GET_CHAIN.to_ne_bytes());
    request.extend(REQUEST_DUMP.to_ne_bytes());
    // Sequence number and port; then struct nfgenmsg for any family.
    request.extend([0; 8 + NFGENMSG]);
    socket.send(&request, 0)?;
    let mut buffer = Vec::with_capacity(64 * 1024);
    loop {
        let mut ready = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        if poll(&mut ready, PollTimeout::from(RESPONSE_TIMEOUT_MS))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        buffer.clear();
        socket.recv(&mut buffer, 0)?;
        match read_datagram(&buffer) {
            ChainDumpState::More => {}
            ChainDumpState::End => return Ok(false),
            ChainDumpState::Nat => return Ok(true),
        }
    }
}

/// Result of one datagram of responses.
#[derive(Debug, PartialEq, Eq)]
enum ChainDumpState {
    /// No chain of type nat yet: further datagrams follow.
    More,
    /// End of the dump without such a chain, or an error.
    End,
    /// A chain of type nat exists.
    Nat,
}

fn read_datagram(mut bytes: &[u8]) -> ChainDumpState {
    const ERROR: u16 = 2;
    const DONE: u16 = 3;
    while let Some(kind) = u16_at(bytes, 4) {
        // A length below the header's ends the loop, so that a malformed datagram cannot run it forever.
        let length = u16_at(bytes, 0).map_or(0, usize::from);
        let Some(message) = bytes.get(..length).filter(|it| it.len() >= HEADER) else { break };
        match kind {
            NEW_CHAIN if is_nat(message.get(HEADER + NFGENMSG..).unwrap_or_default()) => {
                return ChainDumpState::Nat;
            }
            ERROR | DONE => return ChainDumpState::End,
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

#[cfg(test)]
mod tests {
    use super::*;

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
        let filter = message(NEW_CHAIN, &[attribute(3, b"input\0"), attribute(7, b"filter\0")]);
        let nat = message(NEW_CHAIN, &[attribute(3, b"out\0"), attribute(7, b"nat\0")]);
        let plain = message(NEW_CHAIN, &[attribute(3, b"nat\0")]);
        let done = message(3, &[]);
        assert_eq!(read_datagram(&[filter.clone(), nat].concat()), ChainDumpState::Nat);
        assert_eq!(read_datagram(&[filter.clone(), plain.clone()].concat()), ChainDumpState::More);
        assert_eq!(read_datagram(&[filter, plain, done].concat()), ChainDumpState::End);
        assert_eq!(read_datagram(&message(2, &[])), ChainDumpState::End, "no netfilter here");
        assert_eq!(read_datagram(&[9, 0, 0, 0, 1, 2]), ChainDumpState::More, "cut short");
    }
}

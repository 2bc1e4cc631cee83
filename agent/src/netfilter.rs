//! Shell: detection of rules that rewrite the addresses of connections in the calling thread's network namespace.

use std::{fs, io, os::fd::AsFd as _};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::oddities;

/// Names of iptables' tables in a namespace, for each family.
const TABLES: [&str; 2] =
    ["/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"];
/// Timeout of an answer of netfilter, in ms.
const PATIENCE_MS: u16 = 500;

// From include/uapi/linux/netfilter/{nfnetlink,nf_tables}.h.
const NEW_CHAIN: u16 = 10 << 8 | 3;
const GET_CHAIN: u16 = 10 << 8 | 4;
const CHAIN_TYPE: u16 = 7;
const REQUEST_DUMP: u16 = 0x301;
const HEADER: usize = 16;
const FAMILY: usize = 4;

/// Returns true if the namespace has a table or chain of type nat. A kernel without netfilter rewrites nothing.
pub(crate) fn redirects() -> bool {
    let legacy = |path: &str| fs::read_to_string(path).is_ok_and(|it| oddities::redirects(&it));
    TABLES.iter().any(|path| legacy(path)) || chains().unwrap_or(false)
}

fn chains() -> io::Result<bool> {
    let mut socket = Socket::new(NETLINK_NETFILTER)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    // Written by hand, as the library has no nf_tables messages: struct nlmsghdr first.
    let mut question = Vec::with_capacity(HEADER + FAMILY);
    question.extend(((HEADER + FAMILY) as u32).to_ne_bytes());
    question.extend(GET_CHAIN.to_ne_bytes());
    question.extend(REQUEST_DUMP.to_ne_bytes());
    // Sequence number and port; then struct nfgenmsg for any family.
    question.extend([0; 8 + FAMILY]);
    socket.send(&question, 0)?;
    let mut buffer = Vec::with_capacity(64 * 1024);
    loop {
        let mut ready = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        if poll(&mut ready, PollTimeout::from(PATIENCE_MS))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        buffer.clear();
        socket.recv(&mut buffer, 0)?;
        match read(&buffer) {
            Read::More => {}
            Read::End => return Ok(false),
            Read::Nat => return Ok(true),
        }
    }
}

/// Result of one datagram of answers.
#[derive(Debug, PartialEq, Eq)]
enum Read {
    /// No chain of type nat yet: further datagrams follow.
    More,
    /// End of the dump without such a chain, or an error.
    End,
    /// A chain of type nat exists.
    Nat,
}

fn read(mut bytes: &[u8]) -> Read {
    const ERROR: u16 = 2;
    const DONE: u16 = 3;
    while let Some(kind) = half(bytes, 4) {
        // A length below the header's ends the loop, so that a malformed datagram cannot run it forever.
        let length = half(bytes, 0).map_or(0, usize::from);
        let Some(message) = bytes.get(..length).filter(|it| it.len() >= HEADER) else { break };
        match kind {
            NEW_CHAIN if is_nat(message.get(HEADER + FAMILY..).unwrap_or_default()) => {
                return Read::Nat;
            }
            ERROR | DONE => return Read::End,
            _ => {}
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Read::More
}

/// Returns true if a chain's attributes give its type as nat.
fn is_nat(mut attributes: &[u8]) -> bool {
    while let (Some(length), Some(kind)) = (half(attributes, 0), half(attributes, 2)) {
        let length = usize::from(length).max(4);
        if kind == CHAIN_TYPE {
            return attributes.get(4..length).is_some_and(|text| text.starts_with(b"nat\0"));
        }
        attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    false
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
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
        out.extend(((HEADER + FAMILY + body.len()) as u32).to_ne_bytes());
        out.extend(kind.to_ne_bytes());
        out.extend([0; 10 + FAMILY]);
        out.extend(body);
        out
    }

    #[test]
    fn a_chain_of_type_nat_is_found_among_others() {
        let filter = message(NEW_CHAIN, &[attribute(3, b"input\0"), attribute(7, b"filter\0")]);
        let nat = message(NEW_CHAIN, &[attribute(3, b"out\0"), attribute(7, b"nat\0")]);
        let plain = message(NEW_CHAIN, &[attribute(3, b"nat\0")]);
        let done = message(3, &[]);
        assert_eq!(read(&[filter.clone(), nat].concat()), Read::Nat);
        assert_eq!(read(&[filter.clone(), plain.clone()].concat()), Read::More);
        assert_eq!(read(&[filter, plain, done].concat()), Read::End);
        assert_eq!(read(&message(2, &[])), Read::End, "no netfilter here");
        assert_eq!(read(&[9, 0, 0, 0, 1, 2]), Read::More, "cut short");
    }
}

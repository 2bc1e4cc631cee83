//! Shell: the eBPF programs' storage of each connection (5.7) and its cgroup (5.8), read by sock_diag.
//!
//! `netlink-packet-sock-diag` knows neither the attributes of the request nor those of the response. They are defined
//! here (`linux/inet_diag.h`, `linux/sock_diag.h`). The kernel copies a value while it holds the lock inside it.

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
};

use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable, NLA_TYPE_MASK, NetlinkDeserializable, NetlinkHeader,
    NetlinkPayload, NetlinkSerializable, Nla as _, NlaBuffer, NlasIterator,
};
use netlink_packet_sock_diag::{
    SockDiagMessage,
    constants::IPPROTO_TCP,
    inet::{ExtensionFlags, InetResponse, StateFlags},
};

use super::{DiagConnection, SockDiag, connection, requests_for_both_families};

/// `INET_DIAG_REQ_SK_BPF_STORAGES`: requests storage; inside it, for each map, [`REQUEST_MAP_FD`].
const REQUEST_STORAGES: u16 = 2;
/// `SK_DIAG_BPF_STORAGE_REQ_MAP_FD`: descriptor of the map.
const REQUEST_MAP_FD: u16 = 1;
/// `INET_DIAG_SK_BPF_STORAGES`: stored values; inside it, for each map, [`STORAGE`].
const STORAGES: u16 = 20;
/// `INET_DIAG_CGROUP_ID`: number of the socket's cgroup of v2, in the byte order of the machine.
const CGROUP_ID: u16 = 21;
/// `SK_DIAG_BPF_STORAGE`: one map; inside it, [`STORAGE_VALUE`].
const STORAGE: u16 = 1;
/// `SK_DIAG_BPF_STORAGE_MAP_VALUE`: bytes of the value.
const STORAGE_VALUE: u16 = 3;

impl SockDiag {
    /// Returns the value in the socket storage `map` of each connection that can still send and has one. The
    /// connections have no activity. Needs CAP_BPF, or CAP_SYS_ADMIN.
    pub fn stored_values(&self, map: BorrowedFd<'_>) -> io::Result<Vec<(DiagConnection, Vec<u8>)>> {
        let mut values = Vec::new();
        let states = StateFlags::ESTABLISHED | StateFlags::CLOSE_WAIT;
        self.dump_stored(map, &states, |connection, value| {
            values.extend(value.map(|value| (connection, value)));
        })?;
        Ok(values)
    }

    /// Returns each connection that has not closed yet, with its value in the socket storage `map`, if any.
    pub fn all_with_stored_values(
        &self,
        map: BorrowedFd<'_>,
    ) -> io::Result<Vec<(DiagConnection, Option<Vec<u8>>)>> {
        let mut sockets = Vec::new();
        // A closed connection in TIME_WAIT has only its addresses left.
        let none = StateFlags::LISTEN | StateFlags::SYN_SENT | StateFlags::TIME_WAIT;
        let states = StateFlags::all() - none;
        self.dump_stored(map, &states, |connection, value| sockets.push((connection, value)))?;
        Ok(sockets)
    }

    fn dump_stored(
        &self,
        map: BorrowedFd<'_>,
        states: &StateFlags,
        mut each: impl FnMut(DiagConnection, Option<Vec<u8>>),
    ) -> io::Result<()> {
        let attribute = storage_request(map);
        for request in requests_for_both_families(states, &ExtensionFlags::empty()) {
            let attribute = attribute.clone();
            let message =
                SocketStorageMessage { inner: SockDiagMessage::InetRequest(request), attribute };
            self.netlink.dump(message, |response| {
                if let SockDiagMessage::InetResponse(socket) = response.inner {
                    each(connection(&socket, IPPROTO_TCP), stored_value(&socket));
                }
            })?;
        }
        Ok(())
    }
}

/// Request with an attribute, or response.
#[derive(Clone, Debug)]
struct SocketStorageMessage {
    inner: SockDiagMessage,
    attribute: Vec<u8>,
}

/// Returns the attribute that requests the values of `map`.
fn storage_request(map: BorrowedFd<'_>) -> Vec<u8> {
    let map = map.as_raw_fd().to_ne_bytes().to_vec();
    emit_attribute(&DefaultNla::new(
        REQUEST_STORAGES,
        emit_attribute(&DefaultNla::new(REQUEST_MAP_FD, map)),
    ))
}

fn emit_attribute(attribute: &DefaultNla) -> Vec<u8> {
    let mut bytes = vec![0; attribute.buffer_len()];
    attribute.emit(&mut bytes);
    bytes
}

/// Returns the value in a response, if there is one.
fn stored_value(socket: &InetResponse) -> Option<Vec<u8>> {
    let stored = socket.nlas.iter().find(|it| is_kind(it.kind(), STORAGES))?;
    let mut bytes = vec![0; stored.value_len()];
    stored.emit_value(&mut bytes);
    let map = find_attribute(&bytes, STORAGE)?;
    find_attribute(map.value(), STORAGE_VALUE).map(|it| it.value().to_vec())
}

/// Returns the number of the socket's cgroup of v2 in a response, if there is one.
pub(super) fn cgroup_id(socket: &InetResponse) -> Option<u64> {
    let stored = socket.nlas.iter().find(|it| is_kind(it.kind(), CGROUP_ID))?;
    let mut bytes = vec![0; stored.value_len()];
    stored.emit_value(&mut bytes);
    bytes.try_into().ok().map(u64::from_ne_bytes)
}

/// Returns the first attribute of this kind.
fn find_attribute(bytes: &[u8], kind: u16) -> Option<NlaBuffer<&[u8]>> {
    NlasIterator::new(bytes).map_while(Result::ok).find(|it| is_kind(it.kind(), kind))
}

/// Compares kinds without the flag of nested attributes, which the netlink crates leave in some kinds.
fn is_kind(attribute_type: u16, kind: u16) -> bool {
    attribute_type & NLA_TYPE_MASK == kind
}

impl NetlinkSerializable for SocketStorageMessage {
    fn message_type(&self) -> u16 {
        self.inner.message_type()
    }

    fn buffer_len(&self) -> usize {
        Emitable::buffer_len(&self.inner) + self.attribute.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        // The attribute follows without padding, as the request's length is a multiple of four.
        let (request, attribute) = buffer.split_at_mut(Emitable::buffer_len(&self.inner));
        self.inner.emit(request);
        attribute.copy_from_slice(&self.attribute);
    }
}

impl NetlinkDeserializable for SocketStorageMessage {
    type Error = DecodeError;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        let inner = SockDiagMessage::deserialize(header, payload)?;
        Ok(Self { inner, attribute: Vec::new() })
    }
}

impl From<SocketStorageMessage> for NetlinkPayload<SocketStorageMessage> {
    fn from(message: SocketStorageMessage) -> Self {
        Self::InnerMessage(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_stand_as_the_kernel_has_them() {
        let input = std::io::stdin();
        let request = storage_request(std::os::fd::AsFd::as_fd(&input));
        // Length and kind of each, padded to four bytes; then descriptor 0.
        let [eight, twelve] = [8_u16, 12].map(u16::to_ne_bytes);
        let [ask, map] = [REQUEST_STORAGES, REQUEST_MAP_FD].map(u16::to_ne_bytes);
        assert_eq!(request, [&twelve[..], &ask, &eight, &map, &[0; 4]].concat());
        let value = emit_attribute(&DefaultNla::new(STORAGE_VALUE, vec![1, 2, 3]));
        let both = [emit_attribute(&DefaultNla::new(2, vec![0; 4])), value].concat();
        assert_eq!(find_attribute(&both, STORAGE_VALUE).expect("it is there").value(), [1, 2, 3]);
        assert!(find_attribute(&both, STORAGE).is_none());
        assert!(find_attribute(&[9, 0, 3], STORAGE_VALUE).is_none(), "cut off");
    }
}

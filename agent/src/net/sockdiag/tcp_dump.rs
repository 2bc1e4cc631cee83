//! Pure: request that lists the TCP sockets of both address families in one walk over the kernel's tables, and its
//! responses.
//!
//! The kernel walks over the connections of all namespaces, whatever a request asks for. `SOCK_DIAG_BY_FAMILY` names one
//! family, so both families would cost two walks. The request `TCPDIAG_GETSOCK` is older and names none, which the
//! kernel takes for both (`inet_diag_dump_compat`). `netlink-packet-sock-diag` lacks it, so it is defined here
//! (`linux/inet_diag.h`). Responses are those of the newer request, but for their type.

use netlink_packet_core::{
    DecodeError, NetlinkDeserializable, NetlinkHeader, NetlinkPayload, NetlinkSerializable,
    Parseable as _,
};
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetResponse, StateFlags};

/// `TCPDIAG_GETSOCK`: type of the request and of its responses.
const TCPDIAG_GETSOCK: u16 = 18;
/// Size of `struct inet_diag_req` in bytes: four bytes, a socket's identity of 48 bytes, two words.
const REQUEST_BYTES: usize = 60;
/// Offset of the byte `idiag_ext`, the wanted extensions.
const EXTENSIONS_AT: usize = 3;
/// Offset of the word `idiag_states`, the wanted states.
const STATES_AT: usize = 52;

/// Request for a list of TCP sockets, or one response to it.
#[derive(Clone, Debug)]
pub(super) enum TcpDumpMessage {
    /// Request for the sockets in these states, with these extensions.
    Request(StateFlags, ExtensionFlags),
    /// One socket of the list.
    Response(Box<InetResponse>),
}

impl NetlinkSerializable for TcpDumpMessage {
    fn message_type(&self) -> u16 {
        TCPDIAG_GETSOCK
    }

    fn buffer_len(&self) -> usize {
        REQUEST_BYTES
    }

    fn serialize(&self, buffer: &mut [u8]) {
        // Zero is no filter: any family, any address, any port.
        buffer.fill(0);
        // Only requests are sent. A response in this place would be one without states, which lists nothing.
        if let Self::Request(states, extensions) = self {
            buffer[EXTENSIONS_AT] = extensions.bits();
            buffer[STATES_AT..][..4].copy_from_slice(&states.bits().to_ne_bytes());
        }
    }
}

impl NetlinkDeserializable for TcpDumpMessage {
    type Error = DecodeError;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        let message_type = header.message_type;
        if message_type != TCPDIAG_GETSOCK {
            return Err(DecodeError::from(format!("unknown message type {message_type}")));
        }
        InetResponse::parse(payload).map(|socket| Self::Response(Box::new(socket)))
    }
}

impl From<TcpDumpMessage> for NetlinkPayload<TcpDumpMessage> {
    fn from(message: TcpDumpMessage) -> Self {
        Self::InnerMessage(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_stands_as_the_kernel_has_it() {
        let states = StateFlags::ESTABLISHED | StateFlags::CLOSE_WAIT;
        let request = TcpDumpMessage::Request(states, ExtensionFlags::INFO);
        let mut bytes = vec![0xFF; request.buffer_len()];
        request.serialize(&mut bytes);
        let states = (1_u32 << 1 | 1 << 8).to_ne_bytes();
        // Family and lengths, extensions, identity, states, tables.
        let expected = [&[0_u8; 3][..], &[1 << 1], &[0; 48], &states, &[0; 4]].concat();
        assert_eq!(bytes, expected);
        assert_eq!(request.message_type(), TCPDIAG_GETSOCK);
    }

    #[test]
    fn a_message_of_another_type_is_no_response() {
        let mut header = NetlinkHeader::default();
        let socket = [&[2, 1][..], &[0; 70]].concat();
        header.message_type = TCPDIAG_GETSOCK;
        match TcpDumpMessage::deserialize(&header, &socket).expect("a socket") {
            TcpDumpMessage::Response(it) => assert_eq!((it.header.family, it.header.state), (2, 1)),
            other => panic!("{other:?}"),
        }
        assert!(TcpDumpMessage::deserialize(&header, &socket[..20]).is_err(), "cut off");
        header.message_type = 20;
        assert!(TcpDumpMessage::deserialize(&header, &socket).is_err());
    }
}

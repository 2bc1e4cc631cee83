//! Shell: DNS server for the names of services inside the node.
//!
//! It is the only `nameserver` of clients' `/etc/resolv.conf`, with Kubernetes' search domains: so `hello`,
//! `hello.default` and `hello.default.svc` all resolve to the service.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use common::local_node::LocalNodeSpec;
use hickory_server::{
    Server,
    net::{NetError, runtime::Time},
    proto::{
        op::{Header, HeaderCounts, Metadata, OpCode, ResponseCode},
        rr::{Name as DnsName, RData, Record, RecordType, rdata::SOA},
    },
    server::{Request, RequestHandler, ResponseHandler, ResponseInfo},
    zone_handler::MessageResponseBuilder,
};
use tokio::{
    net::{TcpListener, UdpSocket},
    sync::watch,
};
use tokio_util::sync::CancellationToken;
use tracing::warn;

pub mod names;

use names::{DOMAIN, DnsLookup, lookup_name};

/// Time to live of an answer, in seconds: CoreDNS' default for Kubernetes names.
const TTL: u32 = 5;
/// Idle time after which a TCP client is disconnected.
const TCP_IDLE: Duration = Duration::from_secs(10);
/// Answers that may wait to be read by one TCP client.
const TCP_RESPONSE_BUFFER: usize = 32;

/// Failure of the DNS server.
#[derive(Debug, thiserror::Error)]
pub enum DnsError {
    /// The address is in use or does not exist on the node.
    #[error("cannot listen for DNS on {address}")]
    Listen {
        /// Address and port to listen on.
        address: SocketAddr,
        /// Error of the socket call.
        #[source]
        source: io::Error,
    },
    /// The server ended with an error.
    #[error("DNS server on {address} failed")]
    Serve {
        /// Address and port it listened on.
        address: SocketAddr,
        /// Error of `hickory-server`.
        #[source]
        source: NetError,
    },
}

/// Serves the names in `node_spec` on `address`, over UDP and TCP, until `shutdown`.
pub async fn serve(
    address: SocketAddr,
    node_spec: watch::Receiver<LocalNodeSpec>,
    shutdown: CancellationToken,
) -> Result<(), DnsError> {
    let listen = |source| DnsError::Listen { address, source };
    let udp = UdpSocket::bind(address).await.map_err(listen)?;
    let tcp = TcpListener::bind(udp.local_addr().map_err(listen)?).await.map_err(listen)?;
    let mut server = Server::new(DnsHandler { node_spec });
    server.register_socket(udp);
    server.register_listener(tcp, TCP_IDLE, TCP_RESPONSE_BUFFER);
    shutdown.cancelled().await;
    server.shutdown_gracefully().await.map_err(|source| DnsError::Serve { address, source })
}

/// Returns the text of `/etc/resolv.conf` for processes of `namespace` inside the node.
pub fn resolv_conf(nameserver: IpAddr, namespace: &str) -> String {
    format!(
        "nameserver {nameserver}\n\
         search {namespace}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}\n\
         options ndots:5\n"
    )
}

/// Request handler; reads the names of the newest node spec for each question.
struct DnsHandler {
    node_spec: watch::Receiver<LocalNodeSpec>,
}

#[async_trait::async_trait]
impl RequestHandler for DnsHandler {
    async fn handle_request<R: ResponseHandler, T: Time>(
        &self,
        request: &Request,
        mut respond: R,
    ) -> ResponseInfo {
        let mut metadata = Metadata::response_from_request(&request.metadata);
        metadata.authoritative = true;
        let (code, records) = self.resolve_query(request);
        metadata.response_code = code;
        // Every answer without records carries the SOA: without one, resolvers may not cache it (RFC 2308, section 5).
        let authority: Vec<Record> = records.is_empty().then(soa_record).into_iter().collect();
        let none: &[Record] = &[];
        let response = MessageResponseBuilder::from_message_request(request).build(
            metadata,
            records.iter(),
            none,
            authority.iter(),
            none,
        );
        match respond.send_response(response).await {
            Ok(info) => info,
            // A client that has gone is no error of the server; the handler must return some header.
            Err(error) => {
                warn!(%error, from = %request.src(), "dns answer not sent");
                Header { metadata, counts: HeaderCounts::default() }.into()
            }
        }
    }
}

impl DnsHandler {
    /// Returns the response code and the records for a request.
    fn resolve_query(&self, request: &Request) -> (ResponseCode, Vec<Record>) {
        if request.metadata.op_code != OpCode::Query {
            return (ResponseCode::NotImp, Vec::new());
        }
        let Ok(info) = request.request_info() else {
            return (ResponseCode::FormErr, Vec::new());
        };
        let node_spec = self.node_spec.borrow();
        let question = DnsName::from(info.query.name());
        match lookup_name(&node_spec.dns_names, &question.to_ascii()) {
            DnsLookup::Addresses(addresses) => {
                (ResponseCode::NoError, records(&question, info.query.query_type(), addresses))
            }
            // NXDOMAIN would state that no name below exists either (RFC 8020), so an inner name is an empty answer.
            DnsLookup::EmptyNonTerminal => (ResponseCode::NoError, Vec::new()),
            DnsLookup::NxDomain => (ResponseCode::NXDomain, Vec::new()),
        }
    }
}

/// Returns records for the addresses of the family that was asked for.
fn records(name: &DnsName, kind: RecordType, addresses: &[IpAddr]) -> Vec<Record> {
    let is_wanted = |address: &&IpAddr| match kind {
        RecordType::A => address.is_ipv4(),
        RecordType::AAAA => address.is_ipv6(),
        RecordType::ANY => true,
        _ => false,
    };
    let record = |address: &IpAddr| Record::from_rdata(name.clone(), TTL, RData::from(*address));
    addresses.iter().filter(is_wanted).map(record).collect()
}

/// Returns the SOA record of negative answers: resolvers cache them for [`TTL`], as long as other answers.
fn soa_record() -> Record {
    let name = |text: String| DnsName::from_ascii(text).expect("a constant, valid name");
    let (host, mail) = (name(format!("ns.dns.{DOMAIN}.")), name(format!("hostmaster.{DOMAIN}.")));
    let soa = SOA::new(host, mail, 1, 7200, 1800, 86400, TTL);
    Record::from_rdata(name(format!("{DOMAIN}.")), TTL, RData::SOA(soa))
}

#[cfg(test)]
mod tests {
    use common::wire::NamespacedName;
    use hickory_server::proto::{
        op::{Message, Query},
        serialize::binary::{BinDecodable as _, BinEncodable as _},
    };
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// Starts a server on a free port of loopback that knows `hello.default`.
    async fn server() -> (SocketAddr, watch::Sender<LocalNodeSpec>, CancellationToken) {
        let hello = (NamespacedName::new("default", "hello"), vec![IpAddr::from([10, 96, 0, 5])]);
        let node_spec = LocalNodeSpec { dns_names: [hello].into(), ..LocalNodeSpec::default() };
        let (send, receive) = watch::channel(node_spec);
        let address = free_address().await;
        let stop = CancellationToken::new();
        tokio::spawn(serve(address, receive, stop.clone()));
        (address, send, stop)
    }

    /// Returns a port that is free for both UDP and TCP.
    async fn free_address() -> SocketAddr {
        loop {
            let tcp = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            let address = tcp.local_addr().expect("bound");
            if UdpSocket::bind(address).await.is_ok() {
                return address;
            }
        }
    }

    fn question(name: &str, kind: RecordType) -> Vec<u8> {
        let mut message = Message::query();
        message.add_query(Query::query(DnsName::from_ascii(name).expect("a name"), kind));
        message.to_bytes().expect("a message")
    }

    async fn query_udp(server: SocketAddr, name: &str, kind: RecordType) -> Message {
        let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
        socket.connect(server).await.expect("an address");
        let (question, mut buffer) = (question(name, kind), [0; 1500]);
        let asking = async {
            loop {
                let _ = socket.send(&question).await;
                let wait = Duration::from_millis(200);
                if let Ok(Ok(length)) = tokio::time::timeout(wait, socket.recv(&mut buffer)).await {
                    return Message::from_bytes(&buffer[..length]).expect("a message");
                }
                // Refused at once while the server is not listening yet.
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), asking).await.expect("an answer in time")
    }

    fn addresses(message: &Message) -> Vec<IpAddr> {
        message.answers.iter().filter_map(|record| record.data.ip_addr()).collect()
    }

    #[tokio::test]
    async fn answers_follow_the_names() {
        let (server, node_spec, _stop) = server().await;
        let hello = "hello.default.svc.cluster.local.";
        let answer = query_udp(server, hello, RecordType::A).await;
        assert_eq!(addresses(&answer), [IpAddr::from([10, 96, 0, 5])]);
        let other_family = query_udp(server, hello, RecordType::AAAA).await;
        assert_eq!(other_family.metadata.response_code, ResponseCode::NoError);
        assert_eq!(addresses(&other_family), [] as [IpAddr; 0]);

        node_spec.send_modify(|node_spec| node_spec.dns_names.clear());
        let response = query_udp(server, hello, RecordType::A).await;
        assert_eq!(response.metadata.response_code, ResponseCode::NXDomain);
    }

    #[tokio::test]
    async fn tcp_answers_and_garbage_is_ignored() {
        let (server, _node_spec, _stop) = server().await;
        query_udp(server, "hello.default.svc.cluster.local.", RecordType::A).await;
        let junk = UdpSocket::bind("127.0.0.1:0").await.expect("a socket");
        junk.send_to(&[0xff; 40], server).await.expect("sent");

        let mut stream = tokio::net::TcpStream::connect(server).await.expect("connected");
        let question = question("hello.default.svc.cluster.local.", RecordType::A);
        let length = u16::try_from(question.len()).expect("short").to_be_bytes();
        stream.write_all(&[&length[..], &question].concat()).await.expect("sent");
        let length = stream.read_u16().await.expect("an answer");
        let mut answer = vec![0; usize::from(length)];
        stream.read_exact(&mut answer).await.expect("an answer");
        let answer = Message::from_bytes(&answer).expect("a message");
        assert_eq!(addresses(&answer), [IpAddr::from([10, 96, 0, 5])]);
    }
}

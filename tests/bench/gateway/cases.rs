//! Pure: the cases of the bench, the subjects that each compares, and the requests of each.

use std::net::{Ipv4Addr, SocketAddr};

/// One case of the bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum GatewayCase {
    /// Small responses over HTTP/1.1, one connection.
    H1C1,
    /// Small responses over HTTP/1.1, 64 connections.
    H1C64,
    /// Small responses over HTTP/1.1, 512 connections.
    H1C512,
    /// Small responses over HTTP/2 without TLS, 64 requests in flight.
    H2cC64,
    /// Small responses over HTTP/1.1 and TLS, 64 connections.
    TlsH1C64,
    /// Small responses over HTTP/2 and TLS, 64 requests in flight.
    TlsH2C64,
    /// Unary calls of gRPC without TLS, 64 in flight.
    GrpcC64,
    /// Responses of 1 MiB over HTTP/1.1.
    Bulk,
    /// Latency at half of each subject's own highest rate.
    P99C64,
    /// Memory of idle connections.
    MemoryIdle10k,
    /// Memory of requests that wait for a pod.
    MemoryWaiting10k,
    /// Time until all waiting requests have their responses, once pods become ready.
    Release10k,
    /// Change of one host of 10,000, for which the whole RouteTable is sent.
    RouteUpdate10k,
    /// Latency of normal requests beside 10,000 slow clients.
    Slow10k,
}

/// Receiver of the requests: a proxy, or the pod itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum GatewaySubject {
    /// The pod, without a proxy.
    Direct,
    /// The activator of the measured program.
    Rouse,
    /// The activator of an earlier program.
    Old,
    /// nginx as a reverse proxy.
    Nginx,
    /// HAProxy in its HTTP mode.
    Haproxy,
    /// Envoy with one worker.
    Envoy,
    /// `httputil.ReverseProxy` of Go.
    Go,
}

/// Port of every proxy, and of the pod, for one protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GatewayPort {
    /// HTTP/1.1 without TLS.
    H1,
    /// HTTP/2 without TLS, with prior knowledge.
    H2c,
    /// Both over TLS, chosen by ALPN.
    Tls,
    /// gRPC without TLS.
    Grpc,
}

/// Program that sends requests as fast as it gets responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadClient {
    /// wrk, which speaks HTTP/1.1.
    Wrk { connections: u32 },
    /// h2load, which speaks HTTP/2, with this number of streams on each connection.
    H2load { connections: u32, streams: u32 },
}

/// Requests of a case that measures the highest rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ThroughputLoad {
    pub(crate) client: LoadClient,
    pub(crate) port: GatewayPort,
    pub(crate) path: &'static str,
}

/// Connections with 64 requests in flight over HTTP/2. One connection would bind a proxy to one order of responses.
const H2_CLIENT: LoadClient = LoadClient::H2load { connections: 8, streams: 8 };

impl GatewayCase {
    pub(crate) const ALL: [Self; 14] = [
        Self::H1C1,
        Self::H1C64,
        Self::H1C512,
        Self::H2cC64,
        Self::TlsH1C64,
        Self::TlsH2C64,
        Self::GrpcC64,
        Self::Bulk,
        Self::P99C64,
        Self::MemoryIdle10k,
        Self::MemoryWaiting10k,
        Self::Release10k,
        Self::RouteUpdate10k,
        Self::Slow10k,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::H1C1 => "h1_c1",
            Self::H1C64 => "h1_c64",
            Self::H1C512 => "h1_c512",
            Self::H2cC64 => "h2c_c64",
            Self::TlsH1C64 => "tls_h1_c64",
            Self::TlsH2C64 => "tls_h2_c64",
            Self::GrpcC64 => "grpc_c64",
            Self::Bulk => "bulk",
            Self::P99C64 => "p99_c64",
            Self::MemoryIdle10k => "memory_idle_10k",
            Self::MemoryWaiting10k => "memory_waiting_10k",
            Self::Release10k => "release_10k",
            Self::RouteUpdate10k => "route_update_10k",
            Self::Slow10k => "slow_10k",
        }
    }

    /// Parses the name of a case. The error names all cases.
    pub(crate) fn parse(name: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|case| case.name() == name).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|case| case.name()).collect();
            format!("there is no case `{name}`; there are {}", names.join(", "))
        })
    }

    /// Returns the requests of the case; `None` if it does not measure the highest rate.
    pub(crate) const fn throughput(self) -> Option<ThroughputLoad> {
        let (client, port) = match self {
            Self::H1C1 => (LoadClient::Wrk { connections: 1 }, GatewayPort::H1),
            Self::H1C64 => (LoadClient::Wrk { connections: 64 }, GatewayPort::H1),
            Self::H1C512 => (LoadClient::Wrk { connections: 512 }, GatewayPort::H1),
            Self::H2cC64 => (H2_CLIENT, GatewayPort::H2c),
            Self::TlsH1C64 => (LoadClient::Wrk { connections: 64 }, GatewayPort::Tls),
            Self::TlsH2C64 => (H2_CLIENT, GatewayPort::Tls),
            Self::GrpcC64 => (H2_CLIENT, GatewayPort::Grpc),
            Self::Bulk => (LoadClient::Wrk { connections: 16 }, GatewayPort::H1),
            Self::P99C64
            | Self::MemoryIdle10k
            | Self::MemoryWaiting10k
            | Self::Release10k
            | Self::RouteUpdate10k
            | Self::Slow10k => return None,
        };
        let path = match self {
            Self::Bulk => "/bulk",
            Self::GrpcC64 => "/bench.Echo/Call",
            _ => "/",
        };
        Some(ThroughputLoad { client, port, path })
    }
}

impl GatewaySubject {
    /// All subjects in the order of the first round; `has_old`: with an earlier program.
    pub(crate) fn all(has_old: bool) -> Vec<Self> {
        let all = [
            Self::Direct,
            Self::Rouse,
            Self::Old,
            Self::Nginx,
            Self::Haproxy,
            Self::Envoy,
            Self::Go,
        ];
        all.into_iter().filter(|subject| has_old || *subject != Self::Old).collect()
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Rouse => "rouse",
            Self::Old => "old",
            Self::Nginx => "nginx",
            Self::Haproxy => "haproxy",
            Self::Envoy => "envoy",
            Self::Go => "go",
        }
    }

    /// Returns true if it is an activator, which follows a RouteTable and lets requests wait.
    pub(crate) const fn is_activator(self) -> bool {
        match self {
            Self::Rouse | Self::Old => true,
            Self::Direct | Self::Nginx | Self::Haproxy | Self::Envoy | Self::Go => false,
        }
    }
}

impl GatewayPort {
    /// Port number. Each proxy has an address of its own, so the numbers are the same for all.
    pub(crate) const fn number(self) -> u16 {
        match self {
            Self::H1 => 8080,
            Self::H2c => 8081,
            Self::Grpc => 8082,
            Self::Tls => 8443,
        }
    }

    /// Address of the port of a proxy, or of the pod.
    pub(crate) fn at(self, address: Ipv4Addr) -> SocketAddr {
        (address, self.number()).into()
    }

    /// Host of the requests, by which an activator finds the service.
    pub(crate) const fn host(self) -> &'static str {
        match self {
            Self::H1 | Self::H2c | Self::Tls => AWAKE_HOST,
            Self::Grpc => GRPC_HOST,
        }
    }

    pub(crate) const fn scheme(self) -> &'static str {
        match self {
            Self::H1 | Self::H2c | Self::Grpc => "http",
            Self::Tls => "https",
        }
    }
}

/// Host of the service with small and bulk responses.
pub(crate) const AWAKE_HOST: &str = "awake.bench.test";
/// Host of the service that speaks gRPC.
pub(crate) const GRPC_HOST: &str = "grpc.bench.test";
/// Host of the service without pods, whose requests wait.
pub(crate) const ASLEEP_HOST: &str = "asleep.bench.test";

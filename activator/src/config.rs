//! Pure: settings of the activator, from its command line and its environment.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    num::NonZeroU16,
    path::{Path, PathBuf},
    time::Duration,
};

use clap::Parser;
use common::{
    replicas,
    wire::{self, EdgeSettings, HstsPolicy, TlsCipher, TlsMinVersion, TlsSettings},
};
use ipnet::IpNet;

use crate::{
    budget::{self, ClientBudget, WaitQueueBounds},
    entrypoint::{ClientTransport, Entrypoint},
};

/// Listen backlog of a pod if it is not known: a low one among common defaults (libuv, Python, Java: 50 to 511).
const DEFAULT_LISTEN_BACKLOG: u32 = 128;

/// Port of https in redirects, if no other is set.
const DEFAULT_HTTPS_PORT: NonZeroU16 = NonZeroU16::new(443).expect("not zero");

/// Settings of one activator. Each has a flag and an environment variable.
#[derive(Debug, Parser)]
#[command(
    name = "activator",
    version,
    about = "Holds requests until a pod is ready, then forwards them"
)]
pub struct ActivatorConfig {
    /// Name of this activator, unique among activators: on Kubernetes its pod's (`POD_NAME`).
    #[arg(long, env = "ROUSE_ACTIVATOR_NAME", default_value = "")]
    pub name: String,

    /// Default of the name, if none is given.
    #[arg(long, env = "POD_NAME", default_value = "activator", hide = true)]
    pub pod_name: String,

    /// Name of the node that it runs on.
    #[arg(long, env = "ROUSE_NODE", default_value = "")]
    pub node: String,

    /// Address of the controller, which sends routes: `unix:/path`, `dns:NAME:PORT`, or `http://ip:port` or
    /// `https://ip:port`, several joined by commas.
    #[arg(long, env = "ROUSE_CONTROLLER", default_value = "unix:/run/rouse/rouse/controller.sock")]
    pub controller: String,

    /// Address of the autoscaler, which gets usage reports, in the same form.
    #[arg(long, env = "ROUSE_AUTOSCALER", default_value = "unix:/run/rouse/rouse/autoscaler.sock")]
    pub autoscaler: String,

    /// Folder with `token` (projected, audience `rouse`) and `ca.pem` (the controller's authorities). With it, streams
    /// to `dns:` and `https:` replicas use mutual TLS. None: no TLS.
    #[arg(long, env = "ROUSE_IDENTITY")]
    pub identity: Option<PathBuf>,

    /// Addresses on which every service's own port is opened. On Kubernetes they are the pod's, at most one for each
    /// family (`POD_IPS`, else `POD_IP`); otherwise the local node's.
    #[arg(long, env = "ROUSE_ACTIVATOR_LISTEN", value_delimiter = ',')]
    pub listen: Vec<IpAddr>,

    /// Default of the addresses, if none are given.
    #[arg(long, env = "POD_IPS", value_delimiter = ',', hide = true)]
    pub pod_ips: Vec<IpAddr>,

    /// Default of the addresses, if neither they nor `POD_IPS` are given.
    #[arg(long, env = "POD_IP", hide = true)]
    pub pod_ip: Option<IpAddr>,

    /// Pinned map of listeners, made by the agent: one listener then serves the ports of all services. Without it, and
    /// while it cannot be used, a socket is opened for each port.
    #[arg(long, env = "ROUSE_ACTIVATOR_PORTS_MAP")]
    pub ports_map: Option<PathBuf>,

    /// Address of the gateway for requests from outside, routed by Host; none: no gateway.
    #[arg(long, env = "ROUSE_ACTIVATOR_OUTSIDE")]
    pub outside: Option<SocketAddr>,

    /// Port of the gateway for requests from outside, on each of the addresses to listen on; none: no such port.
    #[arg(long, env = "ROUSE_ACTIVATOR_OUTSIDE_PORT")]
    pub outside_port: Option<NonZeroU16>,

    /// Address of the TLS gateway for requests from outside, routed by Host; none: no such gateway.
    #[arg(long, env = "ROUSE_ACTIVATOR_OUTSIDE_TLS")]
    pub outside_tls: Option<SocketAddr>,

    /// Port of the TLS gateway for requests from outside, on each of the addresses to listen on; none: no such port.
    #[arg(long, env = "ROUSE_ACTIVATOR_OUTSIDE_TLS_PORT")]
    pub outside_tls_port: Option<NonZeroU16>,

    /// File in PEM with the certificate of the TLS gateway and the chain behind it; needs `--tls-key`. It is read again
    /// when it changes. Certificates that the RouteTable names go before it.
    #[arg(long, env = "ROUSE_ACTIVATOR_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,

    /// File in PEM with the key of that certificate, without a passphrase; needs `--tls-cert`.
    #[arg(long, env = "ROUSE_ACTIVATOR_TLS_KEY")]
    pub tls_key: Option<PathBuf>,

    /// Folder of further certificates: NAME.crt with NAME.key, or subfolders with tls.crt and tls.key, or with
    /// fullchain.pem and privkey.pem. Each client gets the one for the name that it asks for.
    #[arg(long, env = "ROUSE_ACTIVATOR_TLS_FOLDER")]
    pub tls_folder: Option<PathBuf>,

    /// Port of https in redirects; 443 is left out of them. `rouse.dev.https-port` in `config-network` goes before it.
    #[arg(long, env = "ROUSE_ACTIVATOR_HTTPS_PORT", default_value_t = DEFAULT_HTTPS_PORT)]
    pub https_port: NonZeroU16,

    /// Lowest version of TLS that the gateway accepts, 1.2 or 1.3. The higher one counts of this and of
    /// `rouse.dev.tls-min-version` in `config-network`.
    #[arg(
        long,
        env = "ROUSE_ACTIVATOR_TLS_MIN_VERSION",
        default_value = "1.2",
        value_parser = TlsMinVersion::parse
    )]
    pub tls_min_version: TlsMinVersion,

    /// Ciphers that the TLS gateway accepts, by their IANA names, joined by commas; none: all that it supports.
    /// `rouse.dev.tls-ciphers` in `config-network` goes before it.
    #[arg(
        long,
        env = "ROUSE_ACTIVATOR_TLS_CIPHERS",
        value_delimiter = ',',
        value_parser = TlsCipher::parse
    )]
    pub tls_ciphers: Vec<TlsCipher>,

    /// The TLS gateway presents its default certificate to no client: one that names no host, or a host without a
    /// certificate, is refused by the alert `unrecognized_name`. `rouse.dev.tls-strict-sni` in `config-network` has the
    /// same effect.
    #[arg(long, env = "ROUSE_ACTIVATOR_TLS_STRICT_SNI")]
    pub tls_strict_sni: bool,

    /// Strict-Transport-Security of responses over TLS, where the pod sends none. `rouse.dev.hsts` in `config-network`
    /// and on a DomainMapping goes before it; none: no such header.
    #[arg(long, env = "ROUSE_ACTIVATOR_HSTS", value_parser = HstsPolicy::parse)]
    pub hsts: Option<HstsPolicy>,

    /// Milliseconds for the handshake of a connection with TLS, 100 to 60000; beyond it, the connection is closed.
    #[arg(long, env = "ROUSE_ACTIVATOR_TLS_HANDSHAKE_MS", default_value_t = 10_000)]
    pub tls_handshake_timeout_ms: u64,

    /// Port of the gateway for workloads of the cluster, on each of the addresses to listen on. It routes by Host, also
    /// by names within the cluster; none: no such port.
    #[arg(long, env = "ROUSE_ACTIVATOR_INSIDE_PORT")]
    pub inside_port: Option<NonZeroU16>,

    /// Port for streams of other activators, on each of the addresses to listen on, and the port of theirs. Together
    /// they keep the hard limits of services. Agents report ready pods there. All have the same one; none: this
    /// activator is the only one, and gets no such reports.
    #[arg(long, env = "ROUSE_ACTIVATOR_PEER_PORT")]
    pub peer_port: Option<NonZeroU16>,

    /// Networks of trusted proxies before the gateway, ADDRESS/LENGTH, joined by commas: their X-Forwarded-* and
    /// Forwarded headers are used. Those of `config-network` are added. Empty: no proxy is trusted.
    #[arg(long, env = "ROUSE_ACTIVATOR_TRUSTED_PROXIES", value_delimiter = ',', value_parser = parse_network)]
    pub trusted_proxies: Vec<IpNet>,

    /// Each connection from trusted proxies begins with a header of the PROXY protocol, version 1 or 2.
    #[arg(long, env = "ROUSE_ACTIVATOR_PROXY_PROTOCOL")]
    pub proxy_protocol: bool,

    /// Domain of the cluster, the last part of names within it.
    #[arg(long, env = "ROUSE_CLUSTER_DOMAIN", default_value = "cluster.local")]
    pub cluster_domain: String,

    /// Listener of the gateway, bound already: it may be in another network namespace. Takes precedence over `outside`.
    #[arg(skip)]
    pub outside_listener: Option<TcpListener>,

    /// Listener of the TLS gateway, bound already, as `outside_listener`. Takes precedence over `outside_tls`.
    #[arg(skip)]
    pub outside_tls_listener: Option<TcpListener>,

    /// Listeners of gateway ports, bound already, as `outside_listener`. They are open from the start to the end: a
    /// connection to a port that no service has is reset.
    #[arg(skip)]
    pub gateway_port_listeners: Vec<TcpListener>,

    /// Address of /healthz, /readyz and /metrics.
    #[arg(
        long,
        env = "ROUSE_ACTIVATOR_ADMIN",
        default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, 7103))
    )]
    pub admin: SocketAddr,

    /// Requests that may wait for one Revision, or for one port of a scaled Service, 1 to 1000000. Knative's
    /// QueueDepth.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_WAITING", default_value_t = 10_000)]
    pub max_waiting: usize,

    /// Bytes that requests waiting for one Revision, or for one port of a scaled Service, may hold, 65536 or more.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_WAITING_BYTES", default_value_t = 64 << 20)]
    pub max_waiting_bytes: usize,

    /// Bytes of received requests that no pod has taken, of all clients, 1048576 or more: heads that wait, and bodies
    /// ahead of a pod. Beyond it, requests of the connection that holds most get 503.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_BYTES", default_value_t = budget::DEFAULT_REQUEST_BYTES)]
    pub max_bytes: usize,

    /// Bytes of received requests that no pod has taken, of one client: an IPv4 address or an IPv6 /64, but no trusted
    /// proxy. Default: a quarter of all in a pod; all on the local node.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_CLIENT_BYTES")]
    pub max_client_bytes: Option<usize>,

    /// Bytes of responses that wait for clients to read them, of all clients, 1048576 or more. Beyond it, the
    /// connection that holds most is cut off.
    #[arg(
        long = "max-answer-bytes",
        value_name = "MAX_ANSWER_BYTES",
        env = "ROUSE_ACTIVATOR_MAX_ANSWER_BYTES",
        default_value_t = budget::DEFAULT_RESPONSE_BYTES,
    )]
    pub max_response_bytes: usize,

    /// Client connections, 1 or more. Beyond it, the one that has been idle for longest is closed, or else the new one.
    /// Default: half of what the limit of open files leaves, and at most 16384.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_CONNECTIONS")]
    pub max_connections: Option<usize>,

    /// Connections of one client. Default: a quarter of all in a pod; all on the local node.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_CLIENT_CONNECTIONS")]
    pub max_client_connections: Option<usize>,

    /// Milliseconds in which a client has to send more of a body that a pod waits for, until the response has begun;
    /// not for gRPC. Beyond it: 408.
    #[arg(long, env = "ROUSE_ACTIVATOR_BODY_IDLE_MS", default_value_t = 60_000)]
    pub body_idle_ms: u64,

    /// Requests of one HTTP/2 connection that a client may reset before their responses, while these are most of its
    /// requests.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_RESETS", default_value_t = 500)]
    pub max_resets: u64,

    /// Bytes of a request's head, 8192 to 1048576; beyond it: 431.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_HEAD_BYTES", default_value_t = 64 << 10)]
    pub max_head_bytes: usize,

    /// Milliseconds for a head to arrive, and for a persistent connection to be idle. Knative's 60 000.
    #[arg(long, env = "ROUSE_ACTIVATOR_HEAD_TIMEOUT_MS", default_value_t = 60_000)]
    pub head_timeout_ms: u64,

    /// All requests of HTTP/1.1 take the general path, which hyper serves. Without it, plain requests take a faster one
    /// while none are logged, measured or traced. Clients and pods get the same.
    #[arg(long, env = "ROUSE_ACTIVATOR_NO_FAST_PATH")]
    pub no_fast_path: bool,

    /// Listen backlog assumed of a pod, 2 to 65535. At most half of it is dialled before its first response.
    #[arg(long, env = "ROUSE_ACTIVATOR_POD_BACKLOG", default_value_t = DEFAULT_LISTEN_BACKLOG)]
    pub pod_backlog: u32,

    /// Milliseconds for which a connection to a pod is kept idle. It is shorter than any common server's own bound (2 s
    /// in gunicorn, 5 s in Node.js). So a pod does not close the connection just as a request is sent.
    #[arg(long, env = "ROUSE_ACTIVATOR_POD_IDLE_MS", default_value_t = 1_000)]
    pub pod_idle_ms: u64,

    /// Milliseconds for which a stopping activator still accepts connections, at most 600000: routes and EndpointSlices
    /// move clients elsewhere meanwhile. It stops earlier once the table does not list it any more. Default: 45 000 in
    /// a pod, Knative's drain time; none on the local node.
    #[arg(long, env = "ROUSE_ACTIVATOR_LINGER_MS")]
    pub linger_ms: Option<u64>,

    /// Milliseconds for which it still accepts connections once the table does not list it any more, at most 600000.
    /// Kube-proxies and resolvers of other nodes follow EndpointSlices a little later.
    #[arg(long, env = "ROUSE_ACTIVATOR_SETTLE_MS", default_value_t = 5_000)]
    pub settle_ms: u64,

    /// Milliseconds for requests in flight to end after that, at most 600000. Default: 555 000 in a pod, so that both
    /// together are Knative's grace period; 30 000 on the local node.
    #[arg(long, env = "ROUSE_ACTIVATOR_DRAIN_MS")]
    pub drain_ms: Option<u64>,

    /// Milliseconds of these for upgraded connections. Default: 60 000 in a pod, as in Knative's sidecar; none on the
    /// local node.
    #[arg(
        long = "tunnel-drain-ms",
        value_name = "TUNNEL_DRAIN_MS",
        env = "ROUSE_ACTIVATOR_TUNNEL_DRAIN_MS"
    )]
    pub upgraded_drain_ms: Option<u64>,
}

/// Gateway to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatewayAddress {
    /// Address to listen on.
    pub address: SocketAddr,
    /// Entrypoint of its connections.
    pub entrypoint: Entrypoint,
    /// Transport of its connections.
    pub transport: ClientTransport,
}

/// Addresses of the local node's gateway, the default of the addresses to listen on.
const LOCAL_GATEWAY_ADDRESSES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 244, 0, 1)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, 1)),
];

/// Parses a network given on the command line, ADDRESS/LENGTH.
fn parse_network(text: &str) -> Result<IpNet, &'static str> {
    wire::parse_network(text).ok_or("must be ADDRESS/LENGTH")
}

/// Error of a setting that is out of its range.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("setting {name} is {value}: {rule}")]
pub struct ActivatorConfigError {
    name: &'static str,
    value: String,
    rule: &'static str,
}

impl ActivatorConfig {
    /// Default settings, for tests and for `rouse up`, which sets the rest itself. Reads no command line.
    pub fn defaults() -> Self {
        Self::parse_from(["activator"])
    }

    /// Checks every setting against its range.
    pub fn validate(&self) -> Result<(), ActivatorConfigError> {
        let within = |name, value: usize, low: usize, high: usize, rule| {
            let error = || ActivatorConfigError { name, value: value.to_string(), rule };
            (low..=high).contains(&value).then_some(()).ok_or_else(error)
        };
        if self.name().is_empty() {
            return Err(ActivatorConfigError {
                name: "--name",
                value: "empty".to_owned(),
                rule: "give each activator a name of its own",
            });
        }
        for (name, value) in [
            ("--linger-ms", self.linger()),
            ("--settle-ms", self.propagation_delay()),
            ("--drain-ms", self.drain()),
            ("--tunnel-drain-ms", self.upgraded_drain()),
        ] {
            let value = usize::try_from(value.as_millis()).unwrap_or(usize::MAX);
            within(name, value, 0, 600_000, "must be at most 600000")?;
        }
        for (name, value) in
            [("--controller", &self.controller), ("--autoscaler", &self.autoscaler)]
        {
            let bad = |rule| Err(ActivatorConfigError { name, value: value.clone(), rule });
            match value.parse::<replicas::EndpointSetting>() {
                Err(_) => return bad(replicas::ENDPOINT_RULE),
                Ok(it) if it.needs_identity() && self.identity.is_none() => {
                    return bad("needs --identity");
                }
                Ok(_) => {}
            }
        }
        within("--max-waiting", self.max_waiting, 1, 1_000_000, "must be 1 to 1000000")?;
        let bytes = self.max_waiting_bytes;
        within("--max-waiting-bytes", bytes, 65_536, usize::MAX, "must be 65536 or more")?;
        for (name, bytes) in
            [("--max-bytes", self.max_bytes), ("--max-answer-bytes", self.max_response_bytes)]
        {
            within(name, bytes, 1 << 20, usize::MAX, "must be 1048576 or more")?;
        }
        for (name, value) in [
            ("--max-client-bytes", self.max_client_bytes),
            ("--max-connections", self.max_connections),
            ("--max-client-connections", self.max_client_connections),
        ] {
            // Unset ones are checked as 1, since their defaults depend on other settings and are always valid.
            within(name, value.unwrap_or(1), 1, usize::MAX, "must be 1 or more")?;
        }
        within("--max-head-bytes", self.max_head_bytes, 8_192, 1 << 20, "must be 8192 to 1048576")?;
        self.validate_tls()?;
        let backlog = usize::try_from(self.pod_backlog).unwrap_or(usize::MAX);
        within("--pod-backlog", backlog, 2, 65_535, "must be 2 to 65535")
    }

    /// Checks the settings of TLS.
    fn validate_tls(&self) -> Result<(), ActivatorConfigError> {
        let alone = |name, path: &Path, rule| {
            Err(ActivatorConfigError { name, value: path.display().to_string(), rule })
        };
        match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), None) => alone("--tls-cert", certificate, "needs --tls-key")?,
            (None, Some(key)) => alone("--tls-key", key, "needs --tls-cert")?,
            (Some(_), Some(_)) | (None, None) => {}
        }
        // No handshake could succeed with these settings.
        if self.tls_settings().check().is_err() {
            return Err(ActivatorConfigError {
                name: "--tls-ciphers",
                value: self.tls_ciphers.iter().map(|it| it.name()).collect::<Vec<_>>().join(","),
                rule: "must have a cipher of TLS 1.3, the only version of --tls-min-version",
            });
        }
        let value = self.tls_handshake_timeout_ms;
        if !(100..=60_000).contains(&value) {
            return Err(ActivatorConfigError {
                name: "--tls-handshake-timeout-ms",
                value: value.to_string(),
                rule: "must be 100 to 60000",
            });
        }
        Ok(())
    }

    /// Name of this activator, given or by default.
    pub fn name(&self) -> &str {
        if self.name.is_empty() { &self.pod_name } else { &self.name }
    }

    /// Addresses to listen on, given or by default.
    pub fn listen_addresses(&self) -> Vec<IpAddr> {
        let pod = if self.pod_ips.is_empty() { self.pod_ip.as_slice() } else { &self.pod_ips };
        match (self.listen.as_slice(), pod) {
            ([], []) => LOCAL_GATEWAY_ADDRESSES.to_vec(),
            ([], pod) => pod.to_vec(),
            (listen, _) => listen.to_vec(),
        }
    }

    /// Gateways to open, besides the listeners that are bound already.
    pub fn gateway_addresses(&self) -> Vec<GatewayAddress> {
        use ClientTransport::{Plain, Tls};
        use Entrypoint::{External, Internal};
        let at = |address: Option<SocketAddr>, entrypoint, transport| {
            let address = address.into_iter();
            address.map(move |address| GatewayAddress { address, entrypoint, transport })
        };
        // A port without an address is opened at each address of the services' own ports.
        let on = |port: Option<NonZeroU16>, entrypoint, transport| {
            let each = self.listen_addresses().into_iter();
            each.filter_map(move |ip| {
                let address = SocketAddr::new(ip, port?.get());
                Some(GatewayAddress { address, entrypoint, transport })
            })
        };
        at(self.outside, External, Plain)
            .chain(at(self.outside_tls, External, Tls))
            .chain(on(self.outside_port, External, Plain))
            .chain(on(self.outside_tls_port, External, Tls))
            .chain(on(self.inside_port, Internal, Plain))
            .collect()
    }

    /// Addresses on which gateway ports are opened: those of the gateways for requests from outside. Empty: there is no
    /// such gateway.
    pub fn gateway_ips(&self) -> BTreeSet<IpAddr> {
        let given = [self.outside, self.outside_tls].into_iter().flatten().map(|it| it.ip());
        let has_port = self.outside_port.or(self.outside_tls_port).is_some();
        let own = if has_port { self.listen_addresses() } else { Vec::new() };
        given.chain(own).collect()
    }

    /// Policy for requests from outside, as given on the command line.
    pub fn edge_settings(&self) -> EdgeSettings {
        let trusted_proxies = self.trusted_proxies.clone();
        EdgeSettings {
            trusted_proxies,
            requires_proxy_protocol: self.proxy_protocol,
            https_port: Some(self.https_port),
            hsts: self.hsts.clone(),
            tls: self.tls_settings(),
            is_sni_strict: self.tls_strict_sni,
            ..EdgeSettings::default()
        }
    }

    /// Versions and ciphers of the TLS gateway, as given on the command line.
    fn tls_settings(&self) -> TlsSettings {
        TlsSettings { min_version: self.tls_min_version, ciphers: self.tls_ciphers.clone() }
    }

    /// Bounds of clients, for a process that may open `files` files.
    pub fn budget(&self, files: u64) -> ClientBudget {
        let max_connections =
            self.max_connections.unwrap_or_else(|| ClientBudget::max_connections_for_files(files));
        ClientBudget {
            max_head_bytes: self.max_head_bytes,
            head_timeout: Duration::from_millis(self.head_timeout_ms),
            handshake_timeout: Duration::from_millis(self.tls_handshake_timeout_ms),
            body_idle_timeout: Duration::from_millis(self.body_idle_ms),
            request_bytes: self.max_bytes,
            client_request_bytes: self
                .max_client_bytes
                .unwrap_or_else(|| self.client_share(self.max_bytes)),
            response_bytes: self.max_response_bytes,
            max_connections,
            max_client_connections: self
                .max_client_connections
                .unwrap_or_else(|| self.client_share(max_connections)),
            max_resets: self.max_resets,
            wait_queue: WaitQueueBounds {
                max_requests: self.max_waiting,
                max_bytes: self.max_waiting_bytes,
            },
        }
    }

    /// Share of one client in a bound of all clients. The local node has few clients, and no others to protect.
    fn client_share(&self, all: usize) -> usize {
        if self.is_in_pod() { all.div_ceil(4) } else { all }
    }

    fn is_in_pod(&self) -> bool {
        !self.pod_ips.is_empty() || self.pod_ip.is_some()
    }

    /// Duration that was given, or else the default for a pod or for the local node.
    fn duration_or_default(
        &self,
        configured: Option<u64>,
        in_pod_ms: u64,
        else_ms: u64,
    ) -> Duration {
        let otherwise = if self.is_in_pod() { in_pod_ms } else { else_ms };
        Duration::from_millis(configured.unwrap_or(otherwise))
    }

    /// Time for which connections are accepted after the signal to stop.
    pub fn linger(&self) -> Duration {
        self.duration_or_default(self.linger_ms, 45_000, 0)
    }

    /// Time for which connections are accepted once the table does not list this activator any more.
    pub fn propagation_delay(&self) -> Duration {
        Duration::from_millis(self.settle_ms)
    }

    /// Time for upgraded connections to end after that.
    pub fn upgraded_drain(&self) -> Duration {
        self.duration_or_default(self.upgraded_drain_ms, 60_000, 0)
    }

    /// Time for requests in flight to end after that.
    pub fn drain(&self) -> Duration {
        self.duration_or_default(self.drain_ms, 555_000, 30_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        assert_eq!(ActivatorConfig::defaults().validate(), Ok(()));
    }

    #[test]
    fn a_pod_listens_on_its_own_addresses_and_is_called_by_its_own_name() {
        let config = |args: &[&str]| ActivatorConfig::parse_from([&["activator"], args].concat());
        let pod = config(&["--pod-ips", "10.1.0.7,fd00::7", "--pod-name", "activator-x"]);
        let both: Vec<IpAddr> =
            vec!["10.1.0.7".parse().expect("v4"), "fd00::7".parse().expect("v6")];
        assert_eq!((pod.listen_addresses(), pod.name()), (both.clone(), "activator-x"));
        let one = config(&["--pod-ip", "10.1.0.7"]);
        assert_eq!(one.listen_addresses(), both[..1]);
        let given = config(&["--pod-ip", "10.1.0.7", "--listen", "fd00::7", "--name", "a"]);
        assert_eq!((given.listen_addresses(), given.name()), (both[1..].to_vec(), "a"));
        assert_eq!(config(&[]).listen_addresses(), LOCAL_GATEWAY_ADDRESSES);
        let stop =
            |config: ActivatorConfig| [config.linger(), config.drain(), config.upgraded_drain()];
        let seconds = |all: [u64; 3]| all.map(Duration::from_secs);
        assert_eq!(stop(one), seconds([45, 555, 60]));
        assert_eq!(stop(config(&[])), seconds([0, 30, 0]));
        assert_eq!(
            stop(config(&["--pod-ip", "10.1.0.7", "--linger-ms", "1000"]))[0],
            seconds([1, 0, 0])[0]
        );
        let gate =
            config(&["--pod-ip", "10.1.0.7", "--outside-port", "8080", "--inside-port", "8081"]);
        let at = |port, entrypoint| GatewayAddress {
            address: SocketAddr::new(both[0], port),
            entrypoint,
            transport: ClientTransport::Plain,
        };
        assert_eq!(
            gate.gateway_addresses(),
            [at(8080, Entrypoint::External), at(8081, Entrypoint::Internal)]
        );
    }

    #[test]
    fn gateways_of_tls_are_from_outside() {
        let args = ["--pod-ips", "10.1.0.7,fd00::7", "--outside-tls-port", "8443"];
        let given = ["--outside-tls", "127.0.0.1:8444"];
        let config = ActivatorConfig::parse_from([&["activator"][..], &args, &given].concat());
        let all = config.gateway_addresses();
        let is_tls_from_outside = |it: &GatewayAddress| {
            (it.entrypoint, it.transport) == (Entrypoint::External, ClientTransport::Tls)
        };
        assert!(all.iter().all(is_tls_from_outside), "{all:?}");
        let addresses: Vec<_> = all.iter().map(|it| it.address.to_string()).collect();
        assert_eq!(addresses, ["127.0.0.1:8444", "10.1.0.7:8443", "[fd00::7]:8443"]);
    }

    #[test]
    fn settings_of_tls_have_ranges() {
        let refusal = |args: &[&str]| {
            let config = ActivatorConfig::parse_from([&["activator"], args].concat());
            config.validate().map_err(|error| error.to_string())
        };
        for good in [
            &["--tls-cert", "a.crt", "--tls-key", "a.key", "--tls-folder", "b"][..],
            &["--tls-handshake-timeout-ms", "100"],
            &["--tls-min-version", "1.3", "--tls-ciphers", "TLS_AES_128_GCM_SHA256"],
            &["--tls-handshake-timeout-ms", "60000"],
        ] {
            assert_eq!(refusal(good), Ok(()), "{good:?}");
        }
        for (bad, text) in [
            (["--tls-cert", "a.crt"], "setting --tls-cert is a.crt: needs --tls-key"),
            (["--tls-key", "a.key"], "setting --tls-key is a.key: needs --tls-cert"),
            (
                ["--tls-handshake-timeout-ms", "99"],
                "setting --tls-handshake-timeout-ms is 99: must be 100 to 60000",
            ),
            (
                ["--tls-min-version=1.3", "--tls-ciphers=TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"],
                "setting --tls-ciphers is TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256: must have a cipher of TLS 1.3, the only version of --tls-min-version",
            ),
            (
                ["--tls-handshake-timeout-ms", "60001"],
                "setting --tls-handshake-timeout-ms is 60001: must be 100 to 60000",
            ),
        ] {
            assert_eq!(refusal(&bad), Err(text.to_owned()));
        }
        let parse = |args: &[&str]| {
            ActivatorConfig::try_parse_from([&["activator"], args].concat())
                .map(|config| config.edge_settings().https_port.map(NonZeroU16::get))
        };
        assert_eq!(parse(&[]).expect("the default"), Some(443));
        assert_eq!(parse(&["--https-port", "8443"]).expect("a port"), Some(8443));
        assert!(parse(&["--https-port", "0"]).is_err(), "no port");
        assert!(parse(&["--outside-tls-port", "0"]).is_err(), "no port");
        assert!(parse(&["--tls-min-version", "1.1"]).is_err(), "no version");
        assert!(parse(&["--tls-ciphers", "TLS_AES_128_GCM_SHA256,RC4"]).is_err(), "no cipher");
        assert!(parse(&["--hsts", "includeSubDomains"]).is_err(), "no policy");
        let config = ActivatorConfig::parse_from(["activator", "--hsts", "max-age=1; preload"]);
        assert!(!config.edge_settings().is_sni_strict);
        let hsts = config.edge_settings().hsts;
        assert_eq!(hsts.as_ref().map(HstsPolicy::as_str), Some("max-age=1; preload"));
        let config = ActivatorConfig::parse_from(["activator", "--tls-strict-sni"]);
        assert!(config.edge_settings().is_sni_strict);
    }

    #[test]
    fn one_client_gets_a_quarter_in_a_pod_and_all_on_a_node_of_its_own() {
        let shares = |args: &[&str]| {
            let config = ActivatorConfig::parse_from([&["activator"], args].concat());
            let budget = config.budget(1 << 20);
            (budget.client_request_bytes, budget.max_client_connections)
        };
        let (bytes, connections) = (budget::DEFAULT_REQUEST_BYTES, budget::DEFAULT_MAX_CONNECTIONS);
        assert_eq!(shares(&["--pod-ip", "10.1.0.7"]), (bytes / 4, connections / 4));
        assert_eq!(shares(&[]), (bytes, connections));
        let given = ["--max-client-bytes", "5", "--max-client-connections", "6"];
        assert_eq!(shares(&given), (5, 6));
    }

    /// docs/operations.md states these numbers.
    #[test]
    fn as_many_requests_wait_as_is_documented() {
        let bounds = ActivatorConfig::defaults().budget(1024).wait_queue;
        assert_eq!(bounds, WaitQueueBounds { max_requests: 10_000, max_bytes: 64 << 20 });
    }

    #[test]
    fn a_bad_value_is_refused_with_its_name_and_range() {
        let config = ActivatorConfig { max_waiting: 0, ..ActivatorConfig::defaults() };
        let refused = config.validate().expect_err("out of range");
        assert_eq!(refused.to_string(), "setting --max-waiting is 0: must be 1 to 1000000");
    }
}

//! Pure: what the activator is told at its start.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    num::NonZeroU16,
    path::PathBuf,
    time::Duration,
};

use clap::Parser;
use common::{
    replicas,
    wire::{self, Edge},
};
use ipnet::IpNet;

use crate::{
    budget::{self, Budget, LineBounds},
    gateway::Door,
};

/// Settings of one activator. Each has a flag and an environment variable.
#[derive(Debug, Parser)]
#[command(
    name = "activator",
    version,
    about = "Holds requests until a pod is ready, then forwards them"
)]
pub struct Config {
    /// Name of this activator, unique among activators: on Kubernetes its pod's (`POD_NAME`).
    #[arg(long, env = "ROUSE_ACTIVATOR_NAME", default_value = "")]
    pub name: String,

    /// Stands in for the name where none is given.
    #[arg(long, env = "POD_NAME", default_value = "activator", hide = true)]
    pub pod_name: String,

    /// Node it runs on.
    #[arg(long, env = "ROUSE_NODE", default_value = "")]
    pub node: String,

    /// Where the controller serves routes: `unix:/path`, `dns:NAME:PORT`, or `http://ip:port` or `https://ip:port`,
    /// several joined by commas.
    #[arg(long, env = "ROUSE_CONTROLLER", default_value = "unix:/run/rouse/rouse/controller.sock")]
    pub controller: String,

    /// Where the autoscaler takes usage, likewise.
    #[arg(long, env = "ROUSE_AUTOSCALER", default_value = "unix:/run/rouse/rouse/autoscaler.sock")]
    pub autoscaler: String,

    /// Folder with `token` (projected, audience `rouse`) and `ca.pem` (the controller's authorities): with it, streams to
    /// `dns:` and `https:` replicas go over mutual TLS. None: no TLS.
    #[arg(long, env = "ROUSE_IDENTITY")]
    pub identity: Option<PathBuf>,

    /// Addresses on which every service's own port is opened: on Kubernetes the pod's, at most one a family (`POD_IPS`,
    /// else `POD_IP`); otherwise the local node's.
    #[arg(long, env = "ROUSE_ACTIVATOR_LISTEN", value_delimiter = ',')]
    pub listen: Vec<IpAddr>,

    /// Stand in for the addresses where none are given.
    #[arg(long, env = "POD_IPS", value_delimiter = ',', hide = true)]
    pub pod_ips: Vec<IpAddr>,

    /// Stands in for the addresses where none are given.
    #[arg(long, env = "POD_IP", hide = true)]
    pub pod_ip: Option<IpAddr>,

    /// The agent's pinned map of listeners: one listener then serves the ports of all services. Without it, and while it
    /// cannot be used, a socket is opened for each port.
    #[arg(long, env = "ROUSE_ACTIVATOR_PORTS_MAP")]
    pub ports_map: Option<PathBuf>,

    /// Address of the gateway for requests from outside, routed by Host; none: no gateway.
    #[arg(long, env = "ROUSE_ACTIVATOR_OUTSIDE")]
    pub outside: Option<SocketAddr>,

    /// Port of the gateway for requests from outside, on each of the addresses to listen on; none: no such port.
    #[arg(long, env = "ROUSE_ACTIVATOR_OUTSIDE_PORT")]
    pub outside_port: Option<NonZeroU16>,

    /// Port of the gateway for workloads of the cluster, on each of the addresses to listen on: it knows every service by
    /// Host, also by its names within the cluster; none: no such port.
    #[arg(long, env = "ROUSE_ACTIVATOR_INSIDE_PORT")]
    pub inside_port: Option<NonZeroU16>,

    /// Port at which other activators are met, on each of the addresses to listen on, and theirs: together they keep
    /// the hard limits of services. All have the same one; none: this activator is the only one.
    #[arg(long, env = "ROUSE_ACTIVATOR_PEER_PORT")]
    pub peer_port: Option<NonZeroU16>,

    /// Networks of proxies before the gateway, ADDRESS/LENGTH, divided by commas: their X-Forwarded-* and Forwarded count.
    /// Those of `config-network` besides. Empty: no proxy is trusted.
    #[arg(long, env = "ROUSE_ACTIVATOR_TRUSTED_PROXIES", value_delimiter = ',', value_parser = network)]
    pub trusted_proxies: Vec<IpNet>,

    /// Each connection from these begins with a header of the PROXY protocol, version 1 or 2.
    #[arg(long, env = "ROUSE_ACTIVATOR_PROXY_PROTOCOL")]
    pub proxy_protocol: bool,

    /// The cluster's domain.
    #[arg(long, env = "ROUSE_CLUSTER_DOMAIN", default_value = "cluster.local")]
    pub cluster_domain: String,

    /// The gateway's listener, bound already: it may live in another network namespace. Wins over `outside`.
    #[arg(skip)]
    pub outside_listener: Option<TcpListener>,

    /// Address of /healthz, /readyz and /metrics.
    #[arg(
        long,
        env = "ROUSE_ACTIVATOR_ADMIN",
        default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, 7103))
    )]
    pub admin: SocketAddr,

    /// Requests that may wait for one revision, 1 to 1000000. Knative's QueueDepth.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_WAITING", default_value_t = 10_000)]
    pub max_waiting: usize,

    /// Bytes that requests waiting for one revision may hold, 65536 or more.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_WAITING_BYTES", default_value_t = 64 << 20)]
    pub max_waiting_bytes: usize,

    /// Bytes of requests, as far as they have come and no pod has taken them, of all clients: heads that wait and bodies that
    /// flow ahead of a pod, 1048576 or more; beyond: 503 for those of the connection that holds most.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_BYTES", default_value_t = budget::BYTES)]
    pub max_bytes: usize,

    /// Bytes of requests of one client, counted likewise. A client is an address, of IPv6 a /64, but no trusted proxy.
    /// Without a value: in a pod a quarter of all; on a node of its own all.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_CLIENT_BYTES")]
    pub max_client_bytes: Option<usize>,

    /// Bytes of answers that wait for clients to read them, of all clients, 1048576 or more; beyond, the connection that holds
    /// most is cut off.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_ANSWER_BYTES", default_value_t = budget::ANSWER_BYTES)]
    pub max_answer_bytes: usize,

    /// Client connections, 1 or more; beyond, the one that has been idle for longest makes room, or the newcomer is closed.
    /// Without a value: half of what the limit of open files leaves, and at most 16384.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_CONNECTIONS")]
    pub max_connections: Option<usize>,

    /// Connections of one client. Without a value: in a pod a quarter of all; on a node of its own all.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_CLIENT_CONNECTIONS")]
    pub max_client_connections: Option<usize>,

    /// Milliseconds in which a client has to send more of a body that a pod waits for, until the pod's answer has begun; not
    /// for gRPC. Beyond: 408.
    #[arg(long, env = "ROUSE_ACTIVATOR_BODY_IDLE_MS", default_value_t = 60_000)]
    pub body_idle_ms: u64,

    /// Requests that a client may reset before their answers over one HTTP/2 connection while most of its requests are such.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_RESETS", default_value_t = 500)]
    pub max_resets: u64,

    /// Bytes a request's head may have, 8192 to 1048576; beyond: 431.
    #[arg(long, env = "ROUSE_ACTIVATOR_MAX_HEAD_BYTES", default_value_t = 64 << 10)]
    pub max_head_bytes: usize,

    /// Milliseconds a client may take for a head, and a kept connection may lie idle. Knative's 60 000.
    #[arg(long, env = "ROUSE_ACTIVATOR_HEAD_TIMEOUT_MS", default_value_t = 60_000)]
    pub head_timeout_ms: u64,

    /// Listen backlog assumed of a pod, 2 to 65535. At most half of it is dialled before its first answer.
    #[arg(long, env = "ROUSE_ACTIVATOR_POD_BACKLOG", default_value_t = crate::pool::BACKLOG)]
    pub pod_backlog: u32,

    /// Milliseconds a connection to a pod is kept idle. Shorter than any common server's own bound (2 s in
    /// gunicorn, 5 s in Node.js), so that a pod does not close just when a request is sent.
    #[arg(long, env = "ROUSE_ACTIVATOR_POD_IDLE_MS", default_value_t = 1_000)]
    pub pod_idle_ms: u64,

    /// Milliseconds that an activator goes on taking connections once it is told to stop, at most 600000: until routes and
    /// EndpointSlices have led everybody elsewhere. It ends sooner when the table names it no more. Without a value: in a
    /// pod 45 000, Knative's drain time; on a node of its own none.
    #[arg(long, env = "ROUSE_ACTIVATOR_LINGER_MS")]
    pub linger_ms: Option<u64>,

    /// Milliseconds it still goes on once the table names it no more, at most 600000: kube-proxies and resolvers of other
    /// nodes follow EndpointSlices a little later.
    #[arg(long, env = "ROUSE_ACTIVATOR_SETTLE_MS", default_value_t = 5_000)]
    pub settle_ms: u64,

    /// Milliseconds that requests in flight get to end after that, at most 600000. Without a value: in a pod 555 000, so
    /// that both together are Knative's grace period; on a node of its own 30 000.
    #[arg(long, env = "ROUSE_ACTIVATOR_DRAIN_MS")]
    pub drain_ms: Option<u64>,

    /// Milliseconds of these that connections which have switched protocols get. Without a value: in a pod 60 000, as
    /// Knative's sidecar gives them; on a node of its own none.
    #[arg(long, env = "ROUSE_ACTIVATOR_TUNNEL_DRAIN_MS")]
    pub tunnel_drain_ms: Option<u64>,
}

/// Where the local node's gateway lives.
const LOCAL: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 244, 0, 1)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0x10, 0x244, 0, 0, 0, 0, 1)),
];

/// A network on the command line.
fn network(text: &str) -> Result<IpNet, &'static str> {
    wire::network(text).ok_or("must be ADDRESS/LENGTH")
}

/// A setting out of its range.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("setting {name} is {value}: {rule}")]
pub struct BadSetting {
    name: &'static str,
    value: String,
    rule: &'static str,
}

impl Config {
    /// The defaults, for tests and for a node that sets the rest itself. Reads no command line.
    pub fn defaults() -> Self {
        Self::parse_from(["activator"])
    }

    /// Checks every range.
    pub fn validate(&self) -> Result<(), BadSetting> {
        let within = |name, value: usize, low: usize, high: usize, rule| {
            let refused = || BadSetting { name, value: value.to_string(), rule };
            (low..=high).contains(&value).then_some(()).ok_or_else(refused)
        };
        if self.name().is_empty() {
            return Err(BadSetting {
                name: "--name",
                value: "empty".to_owned(),
                rule: "give each activator a name of its own",
            });
        }
        for (name, value) in [
            ("--linger-ms", self.linger()),
            ("--settle-ms", self.settle()),
            ("--drain-ms", self.drain()),
            ("--tunnel-drain-ms", self.tunnel_drain()),
        ] {
            let value = usize::try_from(value.as_millis()).unwrap_or(usize::MAX);
            within(name, value, 0, 600_000, "must be at most 600000")?;
        }
        for (name, value) in
            [("--controller", &self.controller), ("--autoscaler", &self.autoscaler)]
        {
            let bad = |rule| Err(BadSetting { name, value: value.clone(), rule });
            match value.parse::<replicas::Setting>() {
                Err(_) => return bad(replicas::RULE),
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
            [("--max-bytes", self.max_bytes), ("--max-answer-bytes", self.max_answer_bytes)]
        {
            within(name, bytes, 1 << 20, usize::MAX, "must be 1048576 or more")?;
        }
        for (name, value) in [
            ("--max-client-bytes", self.max_client_bytes),
            ("--max-connections", self.max_connections),
            ("--max-client-connections", self.max_client_connections),
        ] {
            within(name, value.unwrap_or(1), 1, usize::MAX, "must be 1 or more")?;
        }
        within("--max-head-bytes", self.max_head_bytes, 8_192, 1 << 20, "must be 8192 to 1048576")?;
        let backlog = usize::try_from(self.pod_backlog).unwrap_or(usize::MAX);
        within("--pod-backlog", backlog, 2, 65_535, "must be 2 to 65535")
    }

    /// This activator's name.
    pub fn name(&self) -> &str {
        if self.name.is_empty() { &self.pod_name } else { &self.name }
    }

    /// Where to listen.
    pub fn addresses(&self) -> Vec<IpAddr> {
        let pod = if self.pod_ips.is_empty() { self.pod_ip.as_slice() } else { &self.pod_ips };
        match (self.listen.as_slice(), pod) {
            ([], []) => LOCAL.to_vec(),
            ([], pod) => pod.to_vec(),
            (listen, _) => listen.to_vec(),
        }
    }

    /// Gateways to open: where, and whether for requests from outside.
    pub fn gateways(&self) -> Vec<(SocketAddr, Door)> {
        let on = |port: Option<NonZeroU16>, door| {
            let each = self.addresses().into_iter();
            each.filter_map(move |ip| Some((SocketAddr::new(ip, port?.get()), door)))
        };
        let given = self.outside.map(|address| (address, Door::Outside));
        let ports = on(self.outside_port, Door::Outside).chain(on(self.inside_port, Door::Inside));
        given.into_iter().chain(ports).collect()
    }

    /// What is said of requests from outside.
    pub fn edge(&self) -> Edge {
        let trusted_proxies = self.trusted_proxies.clone();
        Edge { trusted_proxies, proxy_protocol: self.proxy_protocol, ..Edge::default() }
    }

    /// What clients may take, where so many descriptors may be open.
    pub fn budget(&self, files: u64) -> Budget {
        let connections = self.max_connections.unwrap_or_else(|| Budget::connections_for(files));
        Budget {
            head_bytes: self.max_head_bytes,
            head_timeout: Duration::from_millis(self.head_timeout_ms),
            body_idle: Duration::from_millis(self.body_idle_ms),
            bytes: self.max_bytes,
            client_bytes: self.max_client_bytes.unwrap_or_else(|| self.share(self.max_bytes)),
            answer_bytes: self.max_answer_bytes,
            connections,
            client_connections: self
                .max_client_connections
                .unwrap_or_else(|| self.share(connections)),
            resets: self.max_resets,
            line: LineBounds { requests: self.max_waiting, bytes: self.max_waiting_bytes },
        }
    }

    /// What one client gets of what all have. A node of its own has few clients, and no others to protect.
    fn share(&self, all: usize) -> usize {
        if self.is_pod() { all.div_ceil(4) } else { all }
    }

    fn is_pod(&self) -> bool {
        !self.pod_ips.is_empty() || self.pod_ip.is_some()
    }

    /// A given bound, or else what holds in a pod or on a node of its own.
    fn bound(&self, given: Option<u64>, in_pod_ms: u64, else_ms: u64) -> Duration {
        let otherwise = if self.is_pod() { in_pod_ms } else { else_ms };
        Duration::from_millis(given.unwrap_or(otherwise))
    }

    /// How long connections are taken on after the word to stop.
    pub fn linger(&self) -> Duration {
        self.bound(self.linger_ms, 45_000, 0)
    }

    /// How long it still goes on once the table names it no more.
    pub fn settle(&self) -> Duration {
        Duration::from_millis(self.settle_ms)
    }

    /// How long connections that have switched protocols get after that.
    pub fn tunnel_drain(&self) -> Duration {
        self.bound(self.tunnel_drain_ms, 60_000, 0)
    }

    /// How long requests in flight get to end.
    pub fn drain(&self) -> Duration {
        self.bound(self.drain_ms, 555_000, 30_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid() {
        assert_eq!(Config::defaults().validate(), Ok(()));
    }

    #[test]
    fn a_pod_listens_on_its_own_addresses_and_is_called_by_its_own_name() {
        let config = |args: &[&str]| Config::parse_from([&["activator"], args].concat());
        let pod = config(&["--pod-ips", "10.1.0.7,fd00::7", "--pod-name", "activator-x"]);
        let both: Vec<IpAddr> =
            vec!["10.1.0.7".parse().expect("v4"), "fd00::7".parse().expect("v6")];
        assert_eq!((pod.addresses(), pod.name()), (both.clone(), "activator-x"));
        let one = config(&["--pod-ip", "10.1.0.7"]);
        assert_eq!(one.addresses(), both[..1]);
        let given = config(&["--pod-ip", "10.1.0.7", "--listen", "fd00::7", "--name", "a"]);
        assert_eq!((given.addresses(), given.name()), (both[1..].to_vec(), "a"));
        assert_eq!(config(&[]).addresses(), LOCAL);
        let stop = |config: Config| [config.linger(), config.drain(), config.tunnel_drain()];
        let seconds = |all: [u64; 3]| all.map(Duration::from_secs);
        assert_eq!(stop(one), seconds([45, 555, 60]));
        assert_eq!(stop(config(&[])), seconds([0, 30, 0]));
        assert_eq!(
            stop(config(&["--pod-ip", "10.1.0.7", "--linger-ms", "1000"]))[0],
            seconds([1, 0, 0])[0]
        );
        let gate =
            config(&["--pod-ip", "10.1.0.7", "--outside-port", "8080", "--inside-port", "8081"]);
        let at = |port| SocketAddr::new(both[0], port);
        assert_eq!(gate.gateways(), [(at(8080), Door::Outside), (at(8081), Door::Inside)]);
    }

    #[test]
    fn one_client_gets_a_quarter_in_a_pod_and_all_on_a_node_of_its_own() {
        let shares = |args: &[&str]| {
            let config = Config::parse_from([&["activator"], args].concat());
            let it = config.budget(1 << 20);
            (it.client_bytes, it.client_connections)
        };
        let (bytes, connections) = (budget::BYTES, budget::CONNECTIONS);
        assert_eq!(shares(&["--pod-ip", "10.1.0.7"]), (bytes / 4, connections / 4));
        assert_eq!(shares(&[]), (bytes, connections));
        let given = ["--max-client-bytes", "5", "--max-client-connections", "6"];
        assert_eq!(shares(&given), (5, 6));
    }

    /// The numbers stand in docs/operations.md.
    #[test]
    fn as_many_requests_wait_as_is_documented() {
        let bounds = Config::defaults().budget(1024).line;
        assert_eq!(bounds, LineBounds { requests: 10_000, bytes: 64 << 20 });
    }

    #[test]
    fn a_bad_value_is_refused_with_its_name_and_range() {
        let config = Config { max_waiting: 0, ..Config::defaults() };
        let refused = config.validate().expect_err("out of range");
        assert_eq!(refused.to_string(), "setting --max-waiting is 0: must be 1 to 1000000");
    }
}

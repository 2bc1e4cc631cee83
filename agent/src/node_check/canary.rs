//! Shell: DNS and connects to a ClusterIP, from the node's own network and from the networks of pods.
//!
//! The connects go to the cluster's DNS, which each cluster has. The agent's process is in a pod's cgroup, so the eBPF
//! programs see its connects as those of the pods whose networks it enters.

use std::{
    collections::BTreeMap,
    fs, io,
    net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs as _},
    path::{Path, PathBuf},
    time::Duration,
};

use super::rules::{AgentFacts, CanaryPath, CanaryResult};
use crate::{
    kernel::{cgroup_search::subdirectories, sys},
    net::{netfilter, sockdiag::SockDiag},
    pods::namespace::{self, NetworkNamespace},
};

/// Longest time for one connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of pods whose networks are tried. A policy may keep a pod from the cluster's DNS.
const PODS_TRIED: usize = 3;
/// Port of DNS, also over TCP.
const DNS_PORT: u16 = 53;
/// Name of a Service that each cluster has, with a port for the look-up.
const SERVICE_NAME: (&str, u16) = ("kubernetes.default.svc", 443);

/// Adds what DNS and connects show to the facts of an agent. Takes up to some seconds.
pub(super) fn add_network_facts(agent: &mut AgentFacts, pods_cgroup: Option<&Path>) {
    let resolv_conf = fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let address = nameserver(&resolv_conf).map(|ip| SocketAddr::new(ip, DNS_PORT));
    agent.dns_address = address;
    agent.dns_failure = SERVICE_NAME.to_socket_addrs().err().map(|error| error.to_string());
    let Some(address) = address else { return };
    let own = namespace::own_addresses().unwrap_or_default();
    agent.is_dns_local = own.contains(&address.ip()) || is_link_local(address.ip());
    agent.node_canary = Some(connect(address).map_err(|error| error.to_string()));
    let pods = pods_cgroup.map(pod_namespaces).unwrap_or_default();
    agent.pod_canaries = pods.iter().map(|path| connect_from_pod(path, address)).collect();
}

/// Returns the first nameserver of a `resolv.conf`.
fn nameserver(resolv_conf: &str) -> Option<IpAddr> {
    let mut servers = resolv_conf.lines().filter_map(|line| line.trim().strip_prefix("nameserver"));
    servers.find_map(|rest| rest.trim().parse().ok())
}

/// Returns true for addresses that only a server of the node itself can have, such as NodeLocal DNSCache.
fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(four) => four.is_link_local() || four.is_loopback(),
        IpAddr::V6(six) => six.is_unicast_link_local() || six.is_loopback(),
    }
}

/// Connects from the network namespace of the calling thread.
fn connect(address: SocketAddr) -> io::Result<CanaryPath> {
    path_of(&TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)?, address)
}

/// Returns the way of a connection to `address` in the network namespace of the calling thread.
fn path_of(stream: &TcpStream, address: SocketAddr) -> io::Result<CanaryPath> {
    // Connections to different peers may have the same address and port of their own.
    let cookie = sys::socket_cookie(stream)?;
    // getpeername(2) shows the address that was asked for. The list of sockets shows the real one.
    let connections = SockDiag::open()?.connections()?;
    let own = connections.iter().find(|it| it.cookie() == cookie);
    // Its way is not known if the server has closed it already.
    let own = own.ok_or_else(|| io::Error::other("the server closes connections at once"))?;
    Ok(match own.canonical_peer() == address {
        true => CanaryPath::Unchanged,
        false => CanaryPath::Redirected,
    })
}

fn connect_from_pod(namespace: &Path, address: SocketAddr) -> CanaryResult {
    let opened = NetworkNamespace::open(namespace).map_err(|error| error.to_string())?;
    let job = || connect(address);
    opened.run_inside("connect to the cluster's DNS", job).map_err(|error| match error {
        namespace::NamespaceError::Job { source, .. } => source.to_string(),
        error => error.to_string(),
    })
}

/// Returns the paths of the network namespaces of a few pods, without the node's own and meshed ones.
fn pod_namespaces(pods_cgroup: &Path) -> Vec<PathBuf> {
    let Ok(own) = namespace::inode(Path::new("/proc/self/ns/net")) else { return Vec::new() };
    let mut found = BTreeMap::new();
    collect_namespaces(pods_cgroup, own, &mut found);
    found.into_values().collect()
}

/// Collects namespaces by inode, from the first process of each cgroup, until there are enough.
fn collect_namespaces(cgroup: &Path, own: u64, found: &mut BTreeMap<u64, PathBuf>) {
    let processes = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    // Of a process in a PID namespace that the agent does not see, the kernel lists 0.
    if let Some(process) = processes.lines().find(|it| *it != "0") {
        let path = PathBuf::from(format!("/proc/{process}/ns/net"));
        if let Ok(inode) = namespace::inode(&path)
            && inode != own
            && !found.contains_key(&inode)
            && !is_meshed(&path)
        {
            found.insert(inode, path);
        }
    }
    for child in subdirectories(cgroup) {
        if found.len() >= PODS_TRIED {
            return;
        }
        collect_namespaces(&child, own, found);
    }
}

/// Returns true if rules of a namespace redirect connections: no connect from there shows what Rouse's programs do.
fn is_meshed(path: &Path) -> bool {
    let Ok(namespace) = NetworkNamespace::open(path) else { return false };
    let look = || Ok(netfilter::has_redirection());
    namespace.run_inside("look for redirections", look).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use std::{
        net::{Ipv4Addr, SocketAddrV4, TcpListener},
        os::fd::AsRawFd as _,
    };

    use nix::sys::socket::{
        AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect as connect_socket, setsockopt,
        socket, sockopt::ReuseAddr,
    };

    use super::*;

    /// Connects from this port of the loopback address, which other connections may have too.
    fn connect_from(port: u16, to: u16) -> TcpStream {
        let address = |port| SockaddrIn::from(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port));
        let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None);
        let socket = socket.expect("a socket");
        setsockopt(&socket, ReuseAddr, &true).expect("an option");
        bind(socket.as_raw_fd(), &address(port)).expect("the other connection shares it");
        connect_socket(socket.as_raw_fd(), &address(to)).expect("it listens");
        socket.into()
    }

    #[test]
    fn the_first_nameserver_is_the_clusters() {
        let text = "search a.svc.cluster.local svc.cluster.local\nnameserver 10.96.0.10\n\
                    nameserver 10.0.0.1\noptions ndots:5\n";
        assert_eq!(nameserver(text), Some([10, 96, 0, 10].into()));
        assert_eq!(nameserver("nameserver fd00::a"), "fd00::a".parse().ok());
        assert_eq!(nameserver("# nameserver 1.1.1.1\nnameserver\n"), None);
    }

    #[test]
    fn another_connection_of_the_same_port_is_not_the_canarys() {
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a free port"));
        let [first, second] = listeners.each_ref().map(|it| it.local_addr().expect("bound"));
        let one = connect_from(0, first.port());
        let own_port = one.local_addr().expect("bound").port();
        let other = connect_from(own_port, second.port());
        assert_eq!(path_of(&one, first).expect("it is open"), CanaryPath::Unchanged);
        assert_eq!(path_of(&other, second).expect("it is open"), CanaryPath::Unchanged);
    }

    #[test]
    fn a_connect_that_no_program_redirects_is_unchanged_and_a_closed_port_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("bound");
        assert_eq!(connect(address).expect("it listens"), CanaryPath::Unchanged);
        drop(listener);
        let error = connect(address).expect_err("nothing listens");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}

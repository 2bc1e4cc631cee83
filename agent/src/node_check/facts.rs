//! Shell: facts of the machine for a check: kernel, cgroups, capabilities, other proxies, connection tables.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::Path,
    time::Duration,
};

use nix::sys::{
    statfs::{BPF_FS_MAGIC, statfs},
    utsname::uname,
};

use super::rules::{ConnectionTables, HostFacts, KubeProxyFacts};
use crate::kernel::{
    cgroup_search,
    features::{self, VerifierFeatures},
    programs::count_foreign_programs,
};

/// Mount of the bpf file system that the agents use.
const BPF_FILE_SYSTEM: &str = "/sys/fs/bpf";
/// Root of the cgroups, where no cgroup of pods is known.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";
/// Interface on which kube-proxy in mode `ipvs` has the ClusterIPs of all Services.
const IPVS_INTERFACE: &str = "kube-ipvs0";
/// Number of buckets in the connection table of a network namespace, negative if it is the machine's. Since Linux 6.1.
const TABLE_ENTRIES: &str = "/proc/sys/net/ipv4/tcp_ehash_entries";
/// Number of buckets in the tables of namespaces that are created from one, or 0 for the machine's. Since Linux 6.1.
const CHILD_TABLE_ENTRIES: &str = "/proc/sys/net/ipv4/tcp_child_ehash_entries";
/// Address at which kube-proxy serves its mode by default.
const KUBE_PROXY_METRICS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 10_249);
/// Timeout of one step of the request for the mode.
const MODE_TIMEOUT: Duration = Duration::from_millis(500);

/// Collects the facts of this machine. Takes up to a second, and changes nothing.
pub fn collect_host_facts() -> HostFacts {
    let pods_cgroup = cgroup_search::find_pods_cgroup();
    let pods = pods_cgroup.as_deref().unwrap_or_else(|_| Path::new(CGROUP_ROOT));
    // Where the agents serve Services of the cluster, they attach programs to the parent too.
    let own = [pods, pods.parent().unwrap_or(pods)];
    let foreign_programs = count_foreign_programs(pods, &own);
    let release = uname().map(|it| it.release().to_string_lossy().into_owned());
    let bpf_file_system = statfs(BPF_FILE_SYSTEM).map(|it| it.filesystem_type());
    HostFacts {
        kernel_release: release.unwrap_or_else(|error| format!("unknown: {error}")),
        accepts_programs: features::accepts_cgroup_programs(),
        features: VerifierFeatures::detect(),
        pods_cgroup,
        has_bpf_file_system: bpf_file_system.is_ok_and(|it| it == BPF_FS_MAGIC),
        capabilities: effective_capabilities(),
        foreign_programs,
        kube_proxy: KubeProxyFacts {
            is_running: is_kube_proxy_running(),
            mode: kube_proxy_mode().ok(),
            has_ipvs_interface: nix::net::if_::if_nametoindex(IPVS_INTERFACE).is_ok(),
        },
        connection_tables: read_connection_tables().unwrap_or_else(|error| match error.kind() {
            io::ErrorKind::NotFound => ConnectionTables::OnlyShared,
            _ => ConnectionTables::Unknown(error.to_string()),
        }),
        agent: None,
    }
}

/// Returns the effective capabilities of this process, one bit each; none if they cannot be read.
fn effective_capabilities() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    set.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()).unwrap_or_default()
}

/// Reads the settings of the network namespace of the calling thread. Runtimes create pods' namespaces from the node's,
/// which is also the agent's.
fn read_connection_tables() -> io::Result<ConnectionTables> {
    Ok(ConnectionTables::Configurable {
        node_entries: read_number(TABLE_ENTRIES)?.unsigned_abs(),
        child_entries: read_number(CHILD_TABLE_ENTRIES)?.unsigned_abs(),
    })
}

/// Reads a number that is all of a file.
fn read_number(path: &str) -> io::Result<i64> {
    fs::read_to_string(path)?.trim().parse::<i64>().map_err(io::Error::other)
}

fn is_kube_proxy_running() -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut names = processes.filter_map(|it| fs::read_to_string(it.path().join("comm")).ok());
    names.any(|name| name.trim_end() == "kube-proxy")
}

/// Reads the mode of kube-proxy from its metrics port.
fn kube_proxy_mode() -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&KUBE_PROXY_METRICS, MODE_TIMEOUT)?;
    stream.set_read_timeout(Some(MODE_TIMEOUT))?;
    stream.write_all(b"GET /proxyMode HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut response = String::new();
    // Another program may have this port and send without an end.
    stream.take(4_096).read_to_string(&mut response)?;
    let body = response.split_once("\r\n\r\n").map(|(_, body)| body.trim().to_owned());
    body.filter(|body| response.starts_with("HTTP/1.") && is_mode(body))
        .ok_or_else(|| io::Error::other("the response is no mode"))
}

fn is_mode(text: &str) -> bool {
    ["iptables", "ipvs", "nftables", "kernelspace"].contains(&text)
}

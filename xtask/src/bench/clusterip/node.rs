//! Shell: a node of the bench: network namespaces of the node, of a client pod, and of a pod that has the addresses of
//! all endpoints; and the node's cgroups. All of them are the bench's own.

use std::{
    fs::{self, File},
    io::ErrorKind,
    net::{Ipv4Addr, TcpListener, ToSocketAddrs},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use nix::{
    sched::{CloneFlags, setns},
    sys::socket::{self, Backlog, setsockopt, sockopt},
};

use super::objects::{ENDPOINT_NETWORK, ENDPOINT_PORT, SWITCHED_BACKENDS, SWITCHED_PORT};
use crate::{machine, measure::service_connects::SEGMENT_SIZES, sh};

/// Beginning of the names of namespaces and cgroups; the process id of the bench follows.
const PREFIX: &str = "rouse_clusterip-";
/// Address of the node.
pub(super) const NODE_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 1);
/// Directory in which `ip netns` names namespaces.
const NETNS_DIRECTORY: &str = "/run/netns";
/// Settings of the node's namespace, below `/proc/sys/net/ipv4`.
///
/// A connect to a Service that is not served fails by an ICMP error. Its rate is not limited here, because a client
/// without an error would wait for a second, and find the Service served only then.
const NODE_SETTINGS: [(&str, &str); 5] = [
    ("ip_forward", "1"),
    ("conf/all/rp_filter", "0"),
    ("conf/default/rp_filter", "0"),
    ("icmp_ratelimit", "0"),
    ("icmp_msgs_per_sec", "10000000"),
];
/// Number of attempts to remove a cgroup whose last process is ending, and the pause between them.
const REMOVAL_ATTEMPTS: u32 = 500;
const REMOVAL_PAUSE: Duration = Duration::from_millis(10);

/// Namespace of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BenchNetns {
    /// The node itself, where the proxy runs.
    Node,
    /// Pod from which clients connect.
    Client,
    /// Pod that has the addresses of all endpoints.
    Endpoints,
}

/// Cgroup of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BenchCgroup {
    /// All clients whose connects Rouse may redirect.
    Clients,
    /// One of these clients.
    Client,
    /// Pods in which Rouse may count requests; there are none.
    Pods,
    /// Clients that Rouse does not see.
    Outside,
    /// The proxy.
    Proxy,
}

/// A node without a proxy. Dropping it removes its namespaces and cgroups.
#[derive(Debug)]
pub(super) struct BenchNode {
    name: String,
    cgroup: PathBuf,
    listeners: Vec<TcpListener>,
}

impl BenchNetns {
    const ALL: [Self; 3] = [Self::Node, Self::Client, Self::Endpoints];

    const fn suffix(self) -> &'static str {
        match self {
            Self::Node => "n",
            Self::Client => "c",
            Self::Endpoints => "e",
        }
    }
}

impl BenchCgroup {
    const ALL: [Self; 5] = [Self::Clients, Self::Client, Self::Pods, Self::Outside, Self::Proxy];

    const fn path(self) -> &'static str {
        match self {
            Self::Clients => "clients",
            Self::Client => "clients/client",
            Self::Pods => "clients/pods",
            Self::Outside => "outside",
            Self::Proxy => "proxy",
        }
    }
}

impl BenchNode {
    /// Creates a node for `subject`, with servers on all endpoints.
    pub(super) fn create(subject: &str) -> Result<Self> {
        let name = format!("{PREFIX}{}-{subject}", std::process::id());
        let cgroup = cgroup_root()?.join(&name);
        // From here on a failure removes what exists already.
        let mut node = Self { name, cgroup, listeners: Vec::new() };
        for cgroup in BenchCgroup::ALL {
            let path = node.cgroup(cgroup);
            fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        }
        node.create_namespaces()?;
        for (address, size) in SWITCHED_BACKENDS.into_iter().zip(SEGMENT_SIZES) {
            node.serve_endpoints((address, SWITCHED_PORT), Some(u32::from(size)))?;
        }
        node.serve_endpoints((Ipv4Addr::UNSPECIFIED, ENDPOINT_PORT), None)?;
        Ok(node)
    }

    /// Path of a namespace of the node.
    pub(super) fn netns(&self, netns: BenchNetns) -> PathBuf {
        Path::new(NETNS_DIRECTORY).join(self.netns_name(netns))
    }

    fn netns_name(&self, netns: BenchNetns) -> String {
        format!("{}-{}", self.name, netns.suffix())
    }

    /// Directory of a cgroup of the node.
    pub(super) fn cgroup(&self, cgroup: BenchCgroup) -> PathBuf {
        self.cgroup.join(cgroup.path())
    }

    /// Command that runs a program in a namespace and a cgroup of the node. The program ends with the bench.
    pub(super) fn command(
        &self,
        netns: BenchNetns,
        cgroup: BenchCgroup,
        program: &Path,
    ) -> Command {
        // The shell enters the cgroup itself before `exec`: a process keeps the cgroup in which it starts.
        const ENTER: &str = r#"echo $$ > "$0/cgroup.procs" && exec "$@""#;
        let mut command = Command::new("sh");
        command.args(["-c", ENTER]).arg(self.cgroup(cgroup));
        // Mounts of its own: what the program mounts ends with it.
        command.arg("nsenter").arg(format!("--net={}", self.netns(netns).display()));
        command.args(["unshare", "--mount", "setpriv", "--pdeathsig", "KILL"]).arg(program);
        command
    }

    /// Opens a listener in a namespace of the node.
    pub(super) fn listen(
        &self,
        netns: BenchNetns,
        address: impl ToSocketAddrs + Send,
    ) -> Result<TcpListener> {
        self.run_inside(netns, || TcpListener::bind(address).context("cannot listen on the node"))
    }

    /// Runs `work` in a namespace of the node, on a thread of its own.
    pub(super) fn run_inside<T: Send>(
        &self,
        netns: BenchNetns,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<T> {
        let path = self.netns(netns);
        let enter = || {
            let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()));
            setns(file?, CloneFlags::CLONE_NEWNET).context("cannot enter a network namespace")?;
            work()
        };
        let outcome = thread::scope(|scope| scope.spawn(enter).join());
        outcome.map_err(|_panic| anyhow!("a thread in {} panicked", path.display()))?
    }

    /// Accepts all connections to an address of the endpoints, and closes them. Clients are offered segments of this
    /// size.
    fn serve_endpoints(&mut self, address: (Ipv4Addr, u16), size: Option<u32>) -> Result<()> {
        let listener = self.listen(BenchNetns::Endpoints, address)?;
        // A full queue would make connects wait for a second, so it is as long as the kernel permits.
        socket::listen(&listener, Backlog::MAXCONN).context("cannot lengthen a queue")?;
        if let Some(size) = size {
            setsockopt(&listener, sockopt::TcpMaxSeg, &size).context("cannot limit segments")?;
        }
        let accepting = listener.try_clone().context("cannot share a listener")?;
        self.listeners.push(listener);
        thread::spawn(move || accepting.incoming().map_while(Result::ok).for_each(drop));
        Ok(())
    }

    /// Creates the three network namespaces, and the links and routes between them.
    fn create_namespaces(&self) -> Result<()> {
        let [node, client, endpoints] = BenchNetns::ALL.map(|netns| self.netns_name(netns));
        for netns in [&node, &client, &endpoints] {
            ip(&format!("netns add {netns}"))?;
            ip(&format!("-n {netns} link set lo up"))?;
        }
        for (pod, device, network) in [(&client, "client0", 0), (&endpoints, "endpoints0", 1)] {
            ip(&format!("-n {node} link add {device} type veth peer name eth0 netns {pod}"))?;
            ip(&format!("-n {node} address add 10.128.{network}.1/24 dev {device}"))?;
            ip(&format!("-n {pod} address add 10.128.{network}.2/24 dev eth0"))?;
            ip(&format!("-n {node} link set {device} up"))?;
            ip(&format!("-n {pod} link set eth0 up"))?;
            ip(&format!("-n {pod} route add default via 10.128.{network}.1"))?;
        }
        ip(&format!("-n {node} route add {ENDPOINT_NETWORK} via 10.128.1.2"))?;
        // The pod has every address of this network.
        ip(&format!("-n {endpoints} route add local {ENDPOINT_NETWORK} dev lo"))?;
        for (name, value) in NODE_SETTINGS {
            // Older kernels have some settings for the whole machine only, and show them in no other namespace.
            let file = format!("/proc/sys/net/ipv4/{name}");
            let script = format!("[ ! -e {file} ] || echo {value} > {file}");
            let netns = format!("--net={}", self.netns(BenchNetns::Node).display());
            sh::capture(Command::new("nsenter").args([&netns, "sh", "-c", &script]))?;
        }
        Ok(())
    }
}

impl Drop for BenchNode {
    fn drop(&mut self) {
        for listener in &self.listeners {
            // A listener that is shut down ends the thread that accepts.
            let _ = socket::shutdown(listener.as_raw_fd(), socket::Shutdown::Both);
        }
        for netns in BenchNetns::ALL {
            // After a failed start some do not exist.
            if self.netns(netns).exists() {
                let _ = ip(&format!("netns delete {}", self.netns_name(netns)));
            }
        }
        remove_cgroup(&self.cgroup);
    }
}

/// Removes namespaces and cgroups of benches that were killed.
pub(super) fn remove_leftovers() -> Result<()> {
    for netns in entry_names(Path::new(NETNS_DIRECTORY)).iter().filter(|it| is_leftover(it)) {
        ip(&format!("netns delete {netns}"))?;
    }
    let root = cgroup_root()?;
    for cgroup in entry_names(&root).iter().filter(|it| is_leftover(it)) {
        remove_cgroup(&root.join(cgroup));
    }
    Ok(())
}

/// Returns true for a name of a bench whose process has ended.
fn is_leftover(name: &str) -> bool {
    let process = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
    process.is_some_and(|id| !Path::new("/proc").join(id).exists())
}

fn entry_names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

fn cgroup_root() -> Result<PathBuf> {
    machine::cgroup2().context("cgroup v2 is not mounted: `cargo xtask setup` tells what to do")
}

fn ip(args: &str) -> Result<String> {
    sh::capture(Command::new("ip").args(args.split(' ')))
}

/// Removes a cgroup and all below it, once their last processes have ended.
fn remove_cgroup(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroup(&entry.path());
        }
    }
    for _ in 0..REMOVAL_ATTEMPTS {
        match fs::remove_dir(directory) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy => sh::sleep(REMOVAL_PAUSE),
            Ok(()) | Err(_) => return,
        }
    }
    eprintln!("{} stays: it has processes", directory.display());
}

#[cfg(test)]
mod tests {
    use super::{super::objects::POD_NETWORK, *};

    #[test]
    fn only_names_of_ended_benches_are_leftovers() {
        // The highest possible process id is far below this number.
        assert!(is_leftover("rouse_clusterip-4294967295-rouse-n"));
        assert!(!is_leftover(&format!("rouse_clusterip-{}-rouse-n", std::process::id())));
        // The cgroup of a user's local node.
        assert!(!is_leftover("rouse-clusterip-4294967295"));
        assert!(!is_leftover("rouse-agent-door-4294967295"));
    }

    #[test]
    fn all_addresses_of_pods_and_of_the_node_are_in_the_network_of_pods() {
        // kube-proxy would hide the addresses of clients outside of it.
        let (network, bits) = POD_NETWORK.split_once('/').unwrap();
        let mask = u32::MAX << (32 - bits.parse::<u32>().unwrap());
        let masked = |address: Ipv4Addr| u32::from(address) & mask;
        let (endpoints, _) = ENDPOINT_NETWORK.split_once('/').unwrap();
        let addresses = [NODE_ADDRESS, endpoints.parse().unwrap(), SWITCHED_BACKENDS[0]];
        assert_eq!(addresses.map(masked), [u32::from(network.parse::<Ipv4Addr>().unwrap()); 3]);
    }
}

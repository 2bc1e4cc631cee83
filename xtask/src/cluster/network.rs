//! Shell: network namespaces of the cluster and the bridge between them. The host's own namespace stays unchanged.

use std::{
    fs,
    io::Write as _,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail};

use super::{
    addresses::{CONTROL_PLANE, SERVICES, node_addresses, pod_ranges},
    state::ClusterPaths,
};
use crate::sh;

/// Settings below `/proc/sys/net` for every namespace.
const SYSCTLS: [(&str, &str); 10] = [
    ("ipv4/ip_forward", "1"),
    ("ipv6/conf/all/forwarding", "1"),
    ("ipv6/conf/all/accept_dad", "0"),
    ("ipv6/conf/default/accept_dad", "0"),
    ("ipv4/conf/all/rp_filter", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    // Traffic between pods of one node passes the rules for Services at the bridge as well.
    ("bridge/bridge-nf-call-iptables", "1"),
    ("bridge/bridge-nf-call-ip6tables", "1"),
    ("ipv4/ip_unprivileged_port_start", "0"),
    // Pods get small connection tables of their own. To list their connections, the kernel would walk the table of the
    // machine: a tenth of the processors' time, where many pods drain.
    ("ipv4/tcp_child_ehash_entries", "16384"),
];

/// Command in the network namespace `netns`.
pub(crate) fn netns_command(netns: &Path, program: &str) -> Command {
    let mut command = Command::new("nsenter");
    // `ip netns exec` would mount /sys again and hide the cgroups.
    command.arg(format!("--net={}", netns.display())).arg(program);
    command
}

/// Creates the namespace of a node, or of the control plane (`None`), with its devices and addresses.
pub(crate) fn create_namespace(paths: &ClusterPaths, node: Option<u8>) -> Result<()> {
    let netns = paths.netns(node);
    // Written last: a namespace without this file is incomplete, left by a killed `up`, and is created again.
    let laid = netns.with_extension("laid");
    if is_namespace(&netns) && laid.exists() {
        return Ok(());
    }
    let _absent = fs::remove_file(&laid);
    unmount(&netns)?;
    fs::create_dir_all(netns.parent().context("namespaces have a folder")?)?;
    fs::write(&netns, "").with_context(|| format!("cannot make {}", netns.display()))?;
    // `unshare` binds the new namespace to the file, where it outlives the process.
    let argument = format!("--net={}", netns.display());
    sh::capture(Command::new("unshare").arg(argument).arg("true"))?;
    // Some settings exist only with a kernel module loaded, and are then not needed.
    for (name, value) in SYSCTLS {
        let script =
            format!("[ ! -e /proc/sys/net/{name} ] || echo {value} > /proc/sys/net/{name}");
        sh::capture(netns_command(&netns, "sh").args(["-c", &script]))?;
    }
    match node {
        None => run_ip_batch(&netns, &control_plane_commands())?,
        Some(node) => {
            connect_node(paths, node)?;
            run_ip_batch(&netns, &node_commands(node))?;
        }
    }
    fs::write(&laid, "").with_context(|| format!("cannot write {}", laid.display()))
}

/// Returns true if `file` holds a namespace; a plain file is a leftover of a killed `up`.
fn is_namespace(file: &Path) -> bool {
    let filesystem = nix::sys::statfs::statfs(file).map(|stat| stat.filesystem_type());
    filesystem.is_ok_and(|kind| kind == nix::sys::statfs::NSFS_MAGIC)
}

fn control_plane_commands() -> Vec<String> {
    let [v4, v6] = CONTROL_PLANE;
    vec![
        "link set lo up".to_owned(),
        "link add br0 type bridge".to_owned(),
        format!("addr add {v4}/24 dev br0"),
        format!("addr add {v6}/64 dev br0 nodad"),
        "link set br0 up".to_owned(),
    ]
}

/// Creates a pair of devices from the bridge to the node.
fn connect_node(paths: &ClusterPaths, node: u8) -> Result<()> {
    let far = paths.netns(Some(node));
    // The kernel removes the device of a deleted namespace, but a little later than `up` needs the name.
    let device = format!("node{node}");
    let mut delete = netns_command(&paths.netns(None), "ip");
    delete.args(["link", "delete", &device]).stderr(Stdio::null());
    let _absent = delete.status().context("cannot start nsenter")?;
    let lines = [
        format!("link add node{node} type veth peer name eth0 netns {}", far.display()),
        format!("link set node{node} master br0 up"),
    ];
    run_ip_batch(&paths.netns(None), &lines)
}

fn node_commands(node: u8) -> Vec<String> {
    let [v4, v6] = node_addresses(node);
    vec![
        "link set lo up".to_owned(),
        format!("addr add {v4}/24 dev eth0"),
        format!("addr add {v6}/64 dev eth0 nodad"),
        "link set eth0 up".to_owned(),
        // A connect to a Service needs a route before any rule translates its address. Packets that no rule
        // translates end in this bridge without ports. There is no default route, so no other packets leave.
        "link add services type bridge".to_owned(),
        "link set services arp off up".to_owned(),
        format!("route add {} dev services src {v4}", SERVICES[0]),
        format!("route add {} dev services src {v6}", SERVICES[1]),
    ]
}

/// Sets the routes to all nodes' pods in every namespace, and the control plane's route to Services.
pub(crate) fn set_routes(paths: &ClusterPaths, nodes: u8) -> Result<()> {
    for from in std::iter::once(None).chain((1..=nodes).map(Some)) {
        let mut lines = Vec::new();
        // A node's own pods are behind its bridge already.
        for to in (1..=nodes).filter(|&to| Some(to) != from) {
            let pod_routes = pod_ranges(to).into_iter().zip(node_addresses(to));
            lines.extend(pod_routes.map(|(pods, via)| format!("route replace {pods} via {via}")));
        }
        if from.is_none() {
            // For kubectl and tools only: the API server itself connects to endpoints.
            let service_routes = SERVICES.iter().zip(node_addresses(1));
            lines.extend(
                service_routes.map(|(services, via)| format!("route replace {services} via {via}")),
            );
        }
        run_ip_batch(&paths.netns(from), &lines)?;
    }
    Ok(())
}

/// Disconnects the node from all others, or connects it again.
pub(crate) fn set_disconnected(paths: &ClusterPaths, node: u8, is_cut: bool) -> Result<()> {
    let word = if is_cut { "down" } else { "up" };
    run_ip_batch(&paths.netns(None), &[format!("link set node{node} {word}")])
}

/// Runs a batch of `ip` commands in the namespace `netns`.
fn run_ip_batch(netns: &Path, lines: &[String]) -> Result<()> {
    let mut child = netns_command(netns, "ip")
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot start nsenter")?;
    let mut stdin = child.stdin.take().context("the child's input was piped")?;
    for line in lines {
        writeln!(stdin, "{line}")?;
    }
    // The end of its input ends the command.
    drop(stdin);
    if !child.wait()?.success() {
        bail!("cannot set up the network of {}:\n{}", netns.display(), lines.join("\n"));
    }
    Ok(())
}

/// Removes all network namespaces of the cluster.
pub(crate) fn remove(paths: &ClusterPaths) -> Result<()> {
    let folder = paths.run_folder().join("netns");
    for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
        unmount(&entry.path())?;
    }
    Ok(())
}

fn unmount(file: &Path) -> Result<()> {
    // There are several mounts if a killed `up` was run again.
    while is_namespace(file) {
        nix::mount::umount2(file, nix::mount::MntFlags::MNT_DETACH)
            .with_context(|| format!("cannot unmount {}", file.display()))?;
    }
    Ok(())
}

/// Returns true if the control plane's namespace exists.
pub(crate) fn exists(paths: &ClusterPaths) -> bool {
    is_namespace(&paths.netns(None))
}

//! Pure: settings of the agent, from flags and environment.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    num::NonZeroU16,
    path::{Path, PathBuf},
    time::Duration,
};

use common::replicas;
use ipnet::IpNet;

use crate::{
    api_servers::ApiServerUrl,
    map_sizes::{MapSizeOverrides, MapSizes},
    paths::AgentPaths,
};

/// Default folder of pins; each node has a folder below it.
const DEFAULT_PINS: &str = "/sys/fs/bpf/rouse";

/// Extensions of files beside the bootstrap file: of the draft of the next one, and of one that cannot be used.
pub(crate) const BOOTSTRAP_EXTENSIONS: [&str; 2] = ["json.new", "json.ignored"];

/// Services that a node serves in kube-proxy's place, besides Rouse's own. A label on the Service counts more than one
/// on its namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ClusterIpMode {
    /// No Service of the cluster.
    #[default]
    Off,
    /// Those with the label `rouse.dev/clusterip: "true"`, on the Service or on its namespace.
    Labelled,
    /// All but those with the label `rouse.dev/clusterip: "false"`, on the Service or on its namespace.
    All,
}

/// Settings of one agent. Logged once at start.
#[derive(Clone, Debug, PartialEq, Eq, clap::Parser)]
#[command(name = "rouse-agent", about = "Rouse's agent: one on each node", version)]
pub struct AgentConfig {
    /// Name of this node, as in the RouteTable.
    #[arg(long, env = "ROUSE_NODE")]
    pub node: String,

    /// Controller that serves routes and receives pod reports: `unix:/path`, `dns:NAME:PORT`, or `http://ip:port` or
    /// `https://ip:port`, several joined by commas.
    #[arg(long, env = "ROUSE_CONTROLLER")]
    pub controller: String,

    /// Autoscaler that receives usage reports; same forms as --controller.
    #[arg(long, env = "ROUSE_AUTOSCALER")]
    pub autoscaler: String,

    /// Folder with `token` (projected, audience `rouse`) and `ca.pem` (the controller's authorities). With it, streams
    /// to `dns:` and `https:` replicas use mutual TLS. None: no TLS.
    #[arg(long, env = "ROUSE_IDENTITY")]
    pub identity: Option<PathBuf>,

    /// Folder on a bpf filesystem; pins go to `v<ABI>/` or `v<ABI>-<sizes>/` below it. None:
    /// `/sys/fs/bpf/rouse/<node>`, so that several nodes of one machine have separate pins.
    #[arg(long, env = "ROUSE_PINS")]
    pub pins: Option<PathBuf>,

    /// Cgroup (v2) of all processes whose connects may be redirected. None: the cgroup of this node's pods, which the
    /// agent finds by its name and waits for. With --clusterip it is the cgroup above that one, which has the node's
    /// own processes too. That is the root of the hierarchy, unless the kubelet's `cgroupRoot` names another one.
    #[arg(long, env = "ROUSE_CLIENTS_CGROUP")]
    pub clients_cgroup: Option<PathBuf>,

    /// Cgroup (v2) below which the pods' own cgroups are; within or equal to the clients' cgroup. None: found by its
    /// name (`kubepods`, `kubepods.slice`), or, without --clusterip, the clients' cgroup if that is set.
    #[arg(long, env = "ROUSE_PODS_CGROUP")]
    pub pods_cgroup: Option<PathBuf>,

    /// Cgroup (v2) of the kubelet, such as `/sys/fs/cgroup/system.slice/kubelet.service`: its connects are probes and
    /// no requests. It must not hold the pods' cgroup. None: the cgroup of the process `kubelet` (or `k3s-agent`)
    /// nearest to the pods' cgroup. Without such a process, probes are known by Kubernetes' own User-Agent.
    #[arg(long, env = "ROUSE_KUBELET_CGROUP")]
    pub kubelet_cgroup: Option<PathBuf>,

    /// Services that this node serves in kube-proxy's place, besides Rouse's own. Other than `off`, the agent watches
    /// Services, EndpointSlices, namespaces and its Node. The API server's credentials, and without --apiserver its
    /// address, come from the file in `KUBECONFIG`, or from the pod's service account.
    #[arg(long, env = "ROUSE_CLUSTERIP", value_enum, default_value_t)]
    pub clusterip: ClusterIpMode,

    /// Sizes of the kernel's maps that differ from those of --clusterip, in entries, such as
    /// `frontends=65536,list-entries=524288`. Names: frontends, backends, list-entries, connect-records (a power of
    /// two), affinity-clients. The agent makes new maps for other sizes, and takes over from those in force.
    #[arg(long, env = "ROUSE_MAP_SIZES", value_name = "NAME=SIZE,...", default_value_t)]
    pub map_sizes: MapSizeOverrides,

    /// URLs of the API servers themselves, not of their Service: `https://IP:PORT`, several joined by commas. If one
    /// fails, the next is asked. With them, this node also serves the Service `default/kubernetes`.
    #[arg(long = "apiserver", env = "ROUSE_APISERVERS", value_name = "URL", value_delimiter = ',')]
    pub apiservers: Vec<ApiServerUrl>,

    /// Kubeconfig of this node's kubelet. The API server that it names is asked like those of --apiserver. Nothing else
    /// in the file is used.
    #[arg(long, env = "ROUSE_KUBELET_KUBECONFIG", value_name = "FILE")]
    pub kubelet_kubeconfig: Option<PathBuf>,

    /// Folder on the node's disk for the bootstrap file: what the agent needs after a reboot, before an API server, DNS
    /// or a controller answers. None: no such file.
    #[arg(long, env = "ROUSE_STATE")]
    pub state: Option<PathBuf>,
    /// The cluster has no kube-proxy: connects to ClusterIPs that this node does not serve fail at once. The agent adds
    /// routes of type `unreachable` for the ranges of ClusterIPs, and removes them without this flag. Needs --clusterip
    /// all.
    #[arg(long, env = "ROUSE_WITHOUT_KUBE_PROXY")]
    pub without_kube_proxy: bool,

    /// Ranges of ClusterIPs, joined by commas. None: those of the cluster's ServiceCIDR objects (Kubernetes 1.33).
    #[arg(long, env = "ROUSE_SERVICE_CIDR", value_delimiter = ',', value_parser = parse_service_cidr)]
    pub service_cidr: Vec<IpNet>,

    /// Serve port 8022 in each pod. The kubelet calls `/wait-for-drain` before it stops the pod. Agents of nodes with
    /// clients call `/in-use` and `/idle` before they close stale connections. Agents and activators call `/running`
    /// after they have sent something to a frozen pod.
    #[arg(long, env = "ROUSE_WAIT_FOR_DRAIN", default_value_t = true, action = clap::ArgAction::Set)]
    pub wait_for_drain: bool,

    /// Milliseconds that a draining pod waits for upgraded connections, such as WebSockets, once no request is in
    /// flight in it. Then its application gets SIGTERM, and may close them gracefully. Default: Knative's
    /// (`pkg/queue` of knative/serving, HijackTracker).
    #[arg(long, env = "ROUSE_TUNNEL_DRAIN_MS", default_value_t = 60_000)]
    pub tunnel_drain_ms: u64,

    /// Folder in which the platform names a pod's network namespace by its uid before the pod's first process runs.
    /// None: the agent finds a namespace by the processes in it, while the runtime still sets them up.
    #[arg(long, env = "ROUSE_NAMESPACES")]
    pub namespaces: Option<PathBuf>,

    /// Network namespace of an activator on this node, in which one listener may then serve the ports of all services.
    /// None: the activator opens one socket for each port.
    #[arg(long, env = "ROUSE_ACTIVATOR_NETNS")]
    pub activator_netns: Option<PathBuf>,

    /// Port at which activators accept reports of ready pods: their port for each other. Requests that wait there then
    /// go to a pod before the controller has heard of it. None: they wait for the RouteTable.
    #[arg(long, env = "ROUSE_ACTIVATOR_PEER_PORT")]
    pub activator_peer_port: Option<NonZeroU16>,

    /// Address that serves /healthz, /livez, /readyz and /metrics, and pages about services for `rouse services` and
    /// `rouse trace`.
    #[arg(long, env = "ROUSE_ADMIN", default_value = "127.0.0.1:7104")]
    pub admin: SocketAddr,
}

/// Error of [`AgentConfig::validate`]: a setting with its value and the rule that it breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--{name} is {value:?}: {rule}")]
pub struct AgentConfigError {
    name: &'static str,
    value: String,
    rule: &'static str,
}

impl AgentConfig {
    /// Refuses settings that cannot work, with one line that names the rule.
    pub fn validate(&self) -> Result<(), AgentConfigError> {
        if !common::wire::is_dns_subdomain(&self.node) {
            return Err(setting_error(
                "node",
                &self.node,
                "must be a DNS name, as Kubernetes names nodes",
            ));
        }
        // Checked here although the streams parse them again: an error at start names the flag.
        for (name, value) in [("controller", &self.controller), ("autoscaler", &self.autoscaler)] {
            let Ok(setting) = value.parse::<replicas::EndpointSetting>() else {
                return Err(setting_error(name, value, replicas::ENDPOINT_RULE));
            };
            if setting.needs_identity() && self.identity.is_none() {
                return Err(setting_error(name, value, "needs --identity"));
            }
        }
        for (name, path) in [
            ("pins", &self.pins),
            ("clients-cgroup", &self.clients_cgroup),
            ("pods-cgroup", &self.pods_cgroup),
            ("kubelet-cgroup", &self.kubelet_cgroup),
            ("kubelet-kubeconfig", &self.kubelet_kubeconfig),
            ("state", &self.state),
        ] {
            if let Some(path) = path
                && !path.is_absolute()
            {
                return Err(setting_error(
                    name,
                    &path.display().to_string(),
                    "must be an absolute path",
                ));
            }
        }
        // Pods are clients too: their own connects are to be redirected.
        if let (Some(pods), Some(clients)) = (&self.pods_cgroup, &self.clients_cgroup)
            && !pods.starts_with(clients)
        {
            let value = pods.display().to_string();
            return Err(setting_error(
                "pods-cgroup",
                &value,
                "must lie within the clients' cgroup",
            ));
        }
        if self.without_kube_proxy && self.clusterip != ClusterIpMode::All {
            return Err(setting_error("without-kube-proxy", "true", "needs --clusterip all"));
        }
        self.check_kubelet_kubeconfig()?;
        if self.tunnel_drain_ms > 600_000 {
            let value = self.tunnel_drain_ms.to_string();
            return Err(setting_error("tunnel-drain-ms", &value, "must be at most 600000"));
        }
        Ok(())
    }

    /// Refuses the kubelet's kubeconfig in a mode in which no API server is asked.
    fn check_kubelet_kubeconfig(&self) -> Result<(), AgentConfigError> {
        match &self.kubelet_kubeconfig {
            Some(path) if self.clusterip == ClusterIpMode::Off => Err(setting_error(
                "kubelet-kubeconfig",
                &path.display().to_string(),
                "needs --clusterip labelled or all",
            )),
            _ => Ok(()),
        }
    }

    /// Returns the time that a draining pod waits for its upgraded connections.
    pub fn upgraded_drain_time(&self) -> Duration {
        Duration::from_millis(self.tunnel_drain_ms)
    }

    /// Returns the addresses at which the agent reaches API servers without their Service; `None` if it needs the
    /// Service. Servers that are given by name have none here.
    pub fn api_server_addresses(&self) -> Option<BTreeSet<IpAddr>> {
        let addresses = || self.apiservers.iter().filter_map(ApiServerUrl::address).collect();
        (!self.apiservers.is_empty()).then(addresses)
    }

    /// Returns true if connects of kernel threads, and of meshed namespaces, are left to kube-proxy. Without
    /// kube-proxy, they would lead nowhere.
    pub fn leaves_clients_alone(&self) -> bool {
        self.clusterip != ClusterIpMode::Off && !self.without_kube_proxy
    }

    /// Returns the path of the bootstrap file, if there is to be one.
    pub fn bootstrap_file(&self) -> Option<PathBuf> {
        self.state.as_ref().map(|folder| folder.join(format!("{}.json", self.node)))
    }

    /// Returns the path of the bootstrap file and those of its draft and of an ignored file before it.
    pub fn bootstrap_files(&self) -> Vec<PathBuf> {
        let paths = |file: PathBuf| {
            let [draft, ignored] = BOOTSTRAP_EXTENSIONS.map(|it| file.with_extension(it));
            [file, draft, ignored]
        };
        self.bootstrap_file().into_iter().flat_map(paths).collect()
    }

    /// Returns the folder of this agent's pins, by default one for each node.
    pub fn pins(&self) -> PathBuf {
        self.pins.clone().unwrap_or_else(|| Path::new(DEFAULT_PINS).join(&self.node))
    }

    /// Returns the sizes of the kernel's maps: those of the mode, where the setting names no others.
    pub fn map_sizes(&self) -> MapSizes {
        let sizes = match self.clusterip {
            ClusterIpMode::Off | ClusterIpMode::Labelled => MapSizes::default(),
            ClusterIpMode::All => MapSizes::WHOLE_CLUSTER,
        };
        self.map_sizes.apply_to(sizes)
    }

    /// Returns the cgroup of the clients where no setting names one. Processes of the node itself use Services of the
    /// cluster as well. The kubelet pulls images through them, for example, and pods may have the host's network.
    fn default_clients(&self, pods: &Path) -> PathBuf {
        match self.clusterip {
            ClusterIpMode::Off => pods,
            ClusterIpMode::Labelled | ClusterIpMode::All => pods.parent().unwrap_or(pods),
        }
        .to_owned()
    }

    /// Returns all paths. `found_pods_cgroup` is the cgroup of this node's pods as it was found. It counts where no
    /// setting names one.
    pub fn paths(&self, found_pods_cgroup: Option<PathBuf>) -> Option<AgentPaths> {
        // Requests are counted in pods, and not in the node's own processes, which are clients of Services of the cluster.
        let clients_are_pods = self.clusterip == ClusterIpMode::Off;
        let pods = self
            .pods_cgroup
            .clone()
            .or_else(|| self.clients_cgroup.clone().filter(|_| clients_are_pods))
            .or(found_pods_cgroup)?;
        Some(AgentPaths {
            bpffs: self.pins(),
            clients: self.clients_cgroup.clone().unwrap_or_else(|| self.default_clients(&pods)),
            pods,
            kubelet: self.kubelet_cgroup.clone(),
            version: datapath::abi::ABI_VERSION,
            map_sizes: self.map_sizes(),
        })
    }
}

/// Parses a range of ClusterIPs. The agent makes a range unreachable, so one that is too large would cut the node off.
pub fn parse_service_cidr(text: &str) -> Result<IpNet, &'static str> {
    let range = common::wire::parse_network(text).filter(|range| range.prefix_len() >= 8);
    range.ok_or("must be ADDRESS/LENGTH, with a length of at least 8")
}

fn setting_error(name: &'static str, value: &str, rule: &'static str) -> AgentConfigError {
    AgentConfigError { name, value: value.to_owned(), rule }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    fn parse(extra: &[&str]) -> AgentConfig {
        let fixed =
            ["agent", "--node=n1", "--controller=unix:/c", "--autoscaler=http://10.0.0.1:7"];
        AgentConfig::try_parse_from(fixed.iter().chain(extra)).expect("known flags")
    }

    #[test]
    fn defaults_are_those_of_a_kubernetes_node() {
        let config = parse(&[]);
        assert_eq!(config.validate(), Ok(()));
        assert_eq!(config.paths(None), None, "the kubelet's folder is waited for");
        let paths = config.paths(Some("/c/kubepods".into())).expect("found");
        assert_eq!((&paths.clients, &paths.pods), (&paths.pods, &"/c/kubepods".into()));
        assert_eq!(paths.bpffs, Path::new("/sys/fs/bpf/rouse/n1"), "one folder a node");
        assert_eq!(config.admin.port(), 7104);
    }

    #[test]
    fn ranges_of_cluster_ips_are_networks_that_leave_others_reachable() {
        let ranges = parse(&["--service-cidr=10.96.0.0/12,fd00:10:96::/112"]).service_cidr;
        assert_eq!(ranges.len(), 2);
        for bad in ["0.0.0.0/0", "10.96.0.0-10.96.0.9", "::/0", ""] {
            parse_service_cidr(bad).expect_err(bad);
        }
    }

    #[test]
    fn settings_override_the_search() {
        let found_pods_cgroup = Some(PathBuf::from("/c/kubepods"));
        let root = parse(&["--clients-cgroup=/c"]).paths(found_pods_cgroup.clone()).expect("named");
        assert_eq!((root.clients, root.pods), ("/c".into(), "/c".into()));
        let named = parse(&["--clusterip=all", "--clients-cgroup=/c"]);
        assert_eq!(named.paths(None), None, "the pods' cgroup is searched for");
        let named = named.paths(found_pods_cgroup.clone()).expect("found");
        assert_eq!((named.clients, named.pods), ("/c".into(), "/c/kubepods".into()));
        let all = parse(&["--clusterip=all"]).paths(found_pods_cgroup).expect("found");
        assert_eq!((all.clients, all.pods), ("/c".into(), "/c/kubepods".into()));
        let both = parse(&["--clients-cgroup=/c", "--pods-cgroup=/c/p"]).paths(None);
        assert_eq!(both.map(|it| (it.clients, it.pods)), Some(("/c".into(), "/c/p".into())));
    }

    #[test]
    fn the_mode_decides_the_sizes_that_no_setting_names() {
        let sizes = |flags: &[&str]| parse(flags).map_sizes();
        assert_eq!(sizes(&[]), MapSizes::default());
        assert_eq!(sizes(&["--clusterip=labelled"]), MapSizes::default());
        assert_eq!(sizes(&["--clusterip=all"]), MapSizes::WHOLE_CLUSTER);
        let named = sizes(&["--clusterip=all", "--map-sizes=backends=300"]);
        assert_eq!(named, MapSizes { backends: 300, ..MapSizes::WHOLE_CLUSTER });
        let fixed = ["agent", "--node=n", "--controller=unix:/c", "--autoscaler=unix:/a"];
        let refused = AgentConfig::try_parse_from(fixed.iter().chain(&["--map-sizes=slots=1"]));
        let refused = refused.expect_err("no such map").to_string();
        assert!(refused.contains("the name must be one of frontends, backends"), "{refused}");
    }

    #[test]
    fn each_node_has_a_bootstrap_file_of_its_own() {
        assert_eq!(parse(&[]).bootstrap_files(), [] as [PathBuf; 0]);
        let config = AgentConfig { node: "n1.example".into(), ..parse(&["--state=/s"]) };
        let names = ["/s/n1.example.json", "/s/n1.example.json.new", "/s/n1.example.json.ignored"];
        assert_eq!(config.bootstrap_files(), names.map(PathBuf::from));
    }

    #[test]
    fn several_api_servers_are_joined_by_commas() {
        let shown = |all: &str| {
            let config = parse(&[&format!("--apiserver={all}")]);
            config.apiservers.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            shown("https://10.0.0.1:6443,https://[fd00::1]"),
            ["https://10.0.0.1:6443", "https://[fd00::1]:443"]
        );
        let args = ["agent", "--node=n1", "--controller=unix:/c", "--autoscaler=unix:/a"];
        let bad = args.iter().chain(&["--apiserver=https://10.0.0.1,10.0.0.2"]);
        let refused = AgentConfig::try_parse_from(bad).expect_err("no scheme").to_string();
        assert!(refused.contains("\"10.0.0.2\": must be https://HOST"), "{refused}");
    }

    #[test]
    fn a_bad_setting_is_named_with_what_would_do() {
        let cases = [
            (AgentConfig { node: "N 1".into(), ..parse(&[]) }, "--node is \"N 1\""),
            (AgentConfig { controller: "tcp:1".into(), ..parse(&[]) }, "--controller is \"tcp:1\""),
            (
                parse(&["--without-kube-proxy"]),
                "--without-kube-proxy is \"true\": needs --clusterip",
            ),
            (parse(&["--pins=bpf"]), "--pins is \"bpf\""),
            (parse(&["--state=lib"]), "--state is \"lib\""),
            (
                parse(&["--kubelet-kubeconfig=/etc/kubernetes/kubelet.conf"]),
                "--kubelet-kubeconfig is \"/etc/kubernetes/kubelet.conf\": needs --clusterip",
            ),
            (parse(&["--tunnel-drain-ms=600001"]), "--tunnel-drain-ms is \"600001\""),
            (
                parse(&["--pods-cgroup=/elsewhere", "--clients-cgroup=/here"]),
                "--pods-cgroup is \"/elsewhere\"",
            ),
        ];
        for (config, begins) in cases {
            let refused = config.validate().expect_err(begins).to_string();
            assert!(refused.starts_with(begins), "{refused}");
        }
    }
}

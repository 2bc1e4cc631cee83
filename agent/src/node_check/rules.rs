//! Pure: facts of a node → lines of `rouse check`, each fine or with what to do.

use std::{collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf};

use crate::{
    capabilities::{CAPABILITIES, missing_capabilities},
    config::ClusterIpMode,
    incompatible::ForeignProgramOwner,
    kernel::{cgroups::PodsCgroupError, features::VerifierFeatures},
};

mod connection_tables;

pub use self::connection_tables::ConnectionTables;
use self::connection_tables::check_connection_tables;

/// Oldest kernel that the eBPF programs are tested on.
const OLDEST_KERNEL: (u32, u32) = (5, 10);
/// Subject of the connect from the node's own network.
const NODE_CANARY: &str = "canary from the node";

/// One line of a check: a finding, and what must be done because of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckLine {
    /// Subject in one or two words.
    pub subject: String,
    /// State that was found.
    pub finding: String,
    /// Instruction to the operator; `None` if the finding is fine.
    pub to_do: Option<String>,
}

impl CheckLine {
    /// Makes a line about a state that is fine.
    pub fn fine(subject: &str, finding: impl Into<String>) -> Self {
        Self { subject: subject.into(), finding: finding.into(), to_do: None }
    }

    /// Makes a line about a state that needs an action.
    pub fn to_do(subject: &str, finding: impl Into<String>, to_do: impl Into<String>) -> Self {
        let to_do = Some(to_do.into());
        Self { subject: subject.into(), finding: finding.into(), to_do }
    }

    /// Formats the line for [`parse`](Self::parse): fields with tabs between them.
    pub fn to_fields(&self) -> String {
        let fields = [Some(&self.subject), Some(&self.finding), self.to_do.as_ref()];
        // A reason from elsewhere may have several lines.
        let clean = |text: &String| text.split_whitespace().collect::<Vec<_>>().join(" ");
        fields.into_iter().flatten().map(clean).collect::<Vec<_>>().join("\t")
    }

    /// Parses a line of [`to_fields`](Self::to_fields); `None` if it is none.
    pub fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split('\t').map(str::to_owned);
        let line = Self { subject: fields.next()?, finding: fields.next()?, to_do: fields.next() };
        fields.next().is_none().then_some(line)
    }
}

impl fmt::Display for CheckLine {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { subject, finding, .. } = self;
        match &self.to_do {
            None => write!(out, "ok     {subject}: {finding}"),
            Some(to_do) => write!(out, "TO DO  {subject}: {finding}: {to_do}"),
        }
    }
}

/// Facts of a machine that is a node, or is to be one.
#[derive(Clone, Debug)]
pub struct HostFacts {
    /// Release of the running kernel, as `uname -r` prints it.
    pub kernel_release: String,
    /// True if the kernel accepts programs for connects and for sockets from this process.
    pub accepts_programs: bool,
    /// Features for which the eBPF programs have fallbacks.
    pub features: VerifierFeatures,
    /// Cgroup of the node's pods.
    pub pods_cgroup: Result<PathBuf, PodsCgroupError>,
    /// True if `/sys/fs/bpf` is a bpf file system.
    pub has_bpf_file_system: bool,
    /// Effective capabilities of this process, one bit each.
    pub capabilities: u64,
    /// Number of foreign programs that redirect connects, by owner.
    pub foreign_programs: BTreeMap<ForeignProgramOwner, usize>,
    /// Traces of kube-proxy on the node.
    pub kube_proxy: KubeProxyFacts,
    /// Connection tables of the node's pods.
    pub connection_tables: ConnectionTables,
    /// Facts that only a running agent has.
    pub agent: Option<AgentFacts>,
}

/// Traces of kube-proxy on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KubeProxyFacts {
    /// True if a process of that name runs.
    pub is_running: bool,
    /// Mode that it serves at its metrics port, such as `nftables`.
    pub mode: Option<String>,
    /// True if the interface with the ClusterIPs of mode `ipvs` exists.
    pub has_ipvs_interface: bool,
}

/// Facts that a running agent has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentFacts {
    /// Services that the node serves in kube-proxy's place.
    pub clusterip: ClusterIpMode,
    /// True if the cluster is to do without kube-proxy.
    pub without_kube_proxy: bool,
    /// Reasons for which the agent is not ready.
    pub not_ready: Vec<String>,
    /// Address of the cluster's DNS, which the canaries connect to; `None` if it is not known.
    pub dns_address: Option<SocketAddr>,
    /// True if the node itself has that address, as with NodeLocal DNSCache.
    pub is_dns_local: bool,
    /// Error of the look-up of a Service's name; `None` if it has an address.
    pub dns_failure: Option<String>,
    /// Connect from the node's own network; `None` without an address.
    pub node_canary: Option<CanaryResult>,
    /// Connects from the networks of pods.
    pub pod_canaries: Vec<CanaryResult>,
}

/// Result of one canary connect: the way that it took, or its error.
pub type CanaryResult = Result<CanaryPath, String>;

/// Way of a connect that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CanaryPath {
    /// Rouse's programs replaced the address by an endpoint's.
    Redirected,
    /// The connect passed unchanged, and another proxy led it to an endpoint.
    Unchanged,
}

/// Judges the facts of a node. The order of the lines is the order in which to act.
pub fn check_node(facts: &HostFacts) -> Vec<CheckLine> {
    let mut lines = vec![
        check_kernel(facts),
        check_features(facts),
        check_cgroup(facts),
        check_bpf_file_system(facts),
        check_capabilities(facts.capabilities),
        check_load_balancers(facts),
        check_kube_proxy(facts),
    ];
    lines.extend(check_ipvs_interface(&facts.kube_proxy));
    lines.push(check_connection_tables(&facts.connection_tables));
    if let Some(agent) = &facts.agent {
        lines.extend(check_agent(agent));
    }
    lines
}

fn check_kernel(facts: &HostFacts) -> CheckLine {
    let finding = format!("Linux {}", facts.kernel_release);
    let is_old = kernel_version(&facts.kernel_release).is_some_and(|it| it < OLDEST_KERNEL);
    if is_old {
        return CheckLine::to_do("kernel", finding, "install Linux 5.10 or newer");
    }
    match facts.accepts_programs {
        true => CheckLine::fine("kernel", format!("{finding} accepts the types of programs")),
        false => CheckLine::to_do(
            "kernel",
            format!("{finding} accepts no program for connects and sockets of a cgroup"),
            "run this command as root; else the kernel needs CONFIG_CGROUP_BPF, and no lockdown",
        ),
    }
}

/// Returns major and minor version of a kernel's release; `None` if it has another form.
fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|letter: char| !letter.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn check_features(facts: &HostFacts) -> CheckLine {
    let features = &facts.features;
    let missing: Vec<&str> = [
        (features.set_retval, "refused calls of UDP fail with EPERM instead of ECONNREFUSED"),
        (
            features.refuses_tcp_with_econnrefused(),
            "refused connects of TCP fail with EPERM instead of ECONNREFUSED",
        ),
        (features.sock_ops_netns_cookie, "listeners older than the agent are not counted"),
        (features.mptcp_sock, "subflows of Multipath TCP are not recognized"),
        (features.v6_only.mask != 0, "IPv6-only listeners count for both families"),
    ]
    .into_iter()
    .filter_map(|(has_it, effect)| (!has_it).then_some(effect))
    .collect();
    match missing.as_slice() {
        [] => CheckLine::fine("features", "the kernel has all that have a fallback"),
        // A fallback is a known difference, and nothing that an operator must act on.
        missing => CheckLine::fine("features", format!("with fallbacks: {}", missing.join("; "))),
    }
}

fn check_cgroup(facts: &HostFacts) -> CheckLine {
    match &facts.pods_cgroup {
        Ok(cgroup) => CheckLine::fine("cgroup", format!("pods are below {}", cgroup.display())),
        Err(error) => {
            let to_do = match error {
                PodsCgroupError::Absent => "run this command on a node whose kubelet runs",
                PodsCgroupError::Several(_) => "set ROUSE_PODS_CGROUP on the agents",
                PodsCgroupError::NoMount => {
                    "boot with cgroup v2 (systemd.unified_cgroup_hierarchy=1)"
                }
            };
            CheckLine::to_do("cgroup", error.to_string(), to_do)
        }
    }
}

fn check_bpf_file_system(facts: &HostFacts) -> CheckLine {
    let (subject, path) = ("bpf file system", "/sys/fs/bpf");
    match facts.has_bpf_file_system {
        true => CheckLine::fine(subject, format!("mounted at {path}")),
        false => CheckLine::to_do(
            subject,
            format!("not mounted at {path}"),
            format!("mount -t bpf bpf {path}, and at boot"),
        ),
    }
}

fn check_capabilities(effective: u64) -> CheckLine {
    match missing_capabilities(effective).as_slice() {
        [] => {
            let names = CAPABILITIES.map(|(name, _)| name);
            CheckLine::fine("capabilities", names.join(", "))
        }
        missing => CheckLine::to_do(
            "capabilities",
            format!("without {}", missing.join(", ")),
            "run this command as root; the agents get them from their DaemonSet",
        ),
    }
}

fn check_load_balancers(facts: &HostFacts) -> CheckLine {
    let subject = "load balancers";
    if facts.foreign_programs.is_empty() {
        return CheckLine::fine(subject, "no foreign program redirects connects");
    }
    let owners = facts.foreign_programs.iter();
    let owners: Vec<String> =
        owners.map(|(owner, count)| format!("{} ({count} programs)", owner.name())).collect();
    let finding = format!("programs of {} redirect connects too", owners.join(", "));
    let serves_cluster =
        facts.agent.as_ref().is_some_and(|agent| agent.clusterip != ClusterIpMode::Off);
    match serves_cluster {
        // Both are attached at the root of the hierarchy, and the first one attached decides.
        true => CheckLine::to_do(
            subject,
            finding,
            "let one of the two serve ClusterIPs: turn its socket load balancer off, or install with --clusterip off",
        ),
        false => CheckLine::fine(subject, format!("{finding}; keep --clusterip off beside them")),
    }
}

fn check_kube_proxy(facts: &HostFacts) -> CheckLine {
    let KubeProxyFacts { is_running, mode, .. } = &facts.kube_proxy;
    let is_unwanted = facts.agent.as_ref().is_some_and(|agent| agent.without_kube_proxy);
    let mode = mode.as_deref().unwrap_or("unknown");
    match (is_running, is_unwanted) {
        (true, false) => CheckLine::fine("kube-proxy", format!("runs, mode {mode}")),
        (true, true) => CheckLine::to_do(
            "kube-proxy",
            format!("runs, mode {mode}, and the installation does without it"),
            "remove it once all nodes are fine otherwise, and then its rules (kube-proxy --cleanup)",
        ),
        (false, true) => CheckLine::fine("kube-proxy", "does not run, as installed"),
        (false, false) => CheckLine::fine(
            "kube-proxy",
            "no process of that name; its replacement (k3s has it built in) must serve what Rouse leaves alone",
        ),
    }
}

/// Checks for ClusterIPs that kube-proxy left behind: the node would take them for its own.
fn check_ipvs_interface(kube_proxy: &KubeProxyFacts) -> Option<CheckLine> {
    let uses_it = kube_proxy.is_running && kube_proxy.mode.as_deref().is_none_or(|it| it == "ipvs");
    (kube_proxy.has_ipvs_interface && !uses_it).then(|| {
        CheckLine::to_do(
            "kube-ipvs0",
            "has ClusterIPs of an earlier mode of kube-proxy",
            "ip link delete kube-ipvs0",
        )
    })
}

/// Judges what the agent of the node knows: its mode, its not-ready reasons, DNS and the canaries.
fn check_agent(agent: &AgentFacts) -> Vec<CheckLine> {
    let mode = match agent.clusterip {
        ClusterIpMode::Off => "off: only Rouse's own services",
        ClusterIpMode::Labelled => "labelled",
        ClusterIpMode::All => "all",
    };
    let mut lines = vec![CheckLine::fine("clusterip", mode)];
    if agent.not_ready.is_empty() {
        lines.push(CheckLine::fine("agent", "ready"));
    }
    let not_ready = agent.not_ready.iter();
    lines.extend(not_ready.map(|reason| {
        CheckLine::to_do(
            "agent",
            reason.clone(),
            "see docs/troubleshooting.md, An agent is not ready",
        )
    }));
    lines.push(match &agent.dns_failure {
        None => CheckLine::fine("dns", "the name of a Service has an address"),
        Some(error) => CheckLine::to_do(
            "dns",
            format!("the name of a Service has no address ({error})"),
            "look at the pods and endpoints of the Service kube-dns",
        ),
    });
    // Canaries connect to the cluster's DNS: nearly each cluster has it, and it serves TCP.
    match (agent.dns_address, &agent.node_canary) {
        (Some(address), Some(result)) => {
            lines.push(check_canary(NODE_CANARY, address, result, agent));
            lines.push(check_pod_canaries(address, agent));
        }
        _ => lines.push(CheckLine::to_do(
            NODE_CANARY,
            "/etc/resolv.conf of the agent names no server to connect to",
            "give the agents the dnsPolicy ClusterFirstWithHostNet, as their manifest does",
        )),
    }
    lines
}

/// Judges the connects from pods by the best one: a policy may forbid a pod to use the cluster's DNS.
fn check_pod_canaries(address: SocketAddr, agent: &AgentFacts) -> CheckLine {
    let subject = "canary from a pod";
    let rank = |result: &&CanaryResult| match result {
        Ok(CanaryPath::Redirected) => 0,
        Ok(CanaryPath::Unchanged) => 1,
        Err(_) => 2,
    };
    match agent.pod_canaries.iter().min_by_key(rank) {
        None => {
            CheckLine::fine(subject, "the node has no pod with a network of its own and no mesh")
        }
        Some(best) => check_canary(subject, address, best, agent),
    }
}

/// Judges the result of one canary.
fn check_canary(
    subject: &str,
    address: SocketAddr,
    result: &CanaryResult,
    agent: &AgentFacts,
) -> CheckLine {
    // Only in mode `all` do the programs serve each Service, and never a server that the node itself runs.
    let is_expected = agent.clusterip == ClusterIpMode::All && !agent.is_dns_local;
    match result {
        Ok(CanaryPath::Redirected) => {
            CheckLine::fine(subject, format!("{address} leads to an endpoint by Rouse's programs"))
        }
        Ok(CanaryPath::Unchanged) if is_expected => CheckLine::to_do(
            subject,
            format!("{address} is reached, but not by Rouse's programs"),
            "keep kube-proxy; look at the labels and Events of the Service kube-dns",
        ),
        Ok(CanaryPath::Unchanged) => {
            CheckLine::fine(subject, format!("{address} is reached without Rouse's programs"))
        }
        Err(error) => CheckLine::to_do(
            subject,
            format!("{address} is not reached ({error})"),
            "look at the endpoints of the Service kube-dns, at kube-proxy and at network policies",
        ),
    }
}

#[cfg(test)]
mod tests {
    use datapath::abi::{KERNEL_THREAD_FLAG, SocketBit, TaskFlag};

    use super::*;

    /// Returns the facts of a node on which all is fine, beside kube-proxy.
    fn fine_facts() -> HostFacts {
        HostFacts {
            kernel_release: "6.18.0-1-amd64".into(),
            accepts_programs: true,
            features: VerifierFeatures {
                set_retval: true,
                sock_ops_netns_cookie: true,
                mptcp_sock: true,
                v6_only: SocketBit { byte_index: 1, mask: 1 },
                ..VerifierFeatures::NONE
            },
            pods_cgroup: Ok("/sys/fs/cgroup/kubepods".into()),
            has_bpf_file_system: true,
            capabilities: u64::MAX,
            foreign_programs: BTreeMap::new(),
            kube_proxy: KubeProxyFacts {
                is_running: true,
                mode: Some("nftables".into()),
                has_ipvs_interface: false,
            },
            connection_tables: ConnectionTables::Configurable {
                node_entries: 262_144,
                child_entries: 16_384,
            },
            agent: None,
        }
    }

    fn fine_agent() -> AgentFacts {
        AgentFacts {
            clusterip: ClusterIpMode::All,
            dns_address: Some(([10, 96, 0, 10], 53).into()),
            node_canary: Some(Ok(CanaryPath::Redirected)),
            pod_canaries: vec![Ok(CanaryPath::Redirected)],
            ..AgentFacts::default()
        }
    }

    /// Returns the subjects of the lines with something to do.
    fn to_do(facts: &HostFacts) -> Vec<String> {
        let lines = check_node(facts).into_iter();
        lines.filter(|line| line.to_do.is_some()).map(|line| line.subject).collect()
    }

    #[test]
    fn a_node_without_a_fault_has_nothing_to_do() {
        assert_eq!(to_do(&fine_facts()), [""; 0]);
        let facts = HostFacts { agent: Some(fine_agent()), ..fine_facts() };
        assert_eq!(to_do(&facts), [""; 0]);
        for subject in ["connection tables", "canary from a pod"] {
            assert!(check_node(&facts).iter().any(|it| it.subject == subject), "{subject}");
        }
    }

    #[test]
    fn each_fault_of_a_machine_is_named() {
        let cilium = BTreeMap::from([(ForeignProgramOwner::Cilium, 2)]);
        let cases = [
            ("kernel", HostFacts { kernel_release: "5.4.0-42".into(), ..fine_facts() }),
            ("kernel", HostFacts { accepts_programs: false, ..fine_facts() }),
            ("cgroup", HostFacts { pods_cgroup: Err(PodsCgroupError::Absent), ..fine_facts() }),
            ("bpf file system", HostFacts { has_bpf_file_system: false, ..fine_facts() }),
            ("capabilities", HostFacts { capabilities: 0, ..fine_facts() }),
            (
                "load balancers",
                HostFacts {
                    foreign_programs: cilium.clone(),
                    agent: Some(fine_agent()),
                    ..fine_facts()
                },
            ),
            (
                "kube-ipvs0",
                HostFacts {
                    kube_proxy: KubeProxyFacts {
                        has_ipvs_interface: true,
                        ..fine_facts().kube_proxy
                    },
                    ..fine_facts()
                },
            ),
        ];
        for (subject, facts) in cases {
            assert_eq!(to_do(&facts), [subject]);
        }
        let beside = HostFacts { foreign_programs: cilium, ..fine_facts() };
        assert_eq!(to_do(&beside), [""; 0], "it serves ClusterIPs, and Rouse its own services");
        let old = HostFacts { features: VerifierFeatures::NONE, ..fine_facts() };
        assert_eq!(to_do(&old), [""; 0], "fallbacks are no faults");
    }

    #[test]
    fn the_errno_of_refused_calls_is_named_where_it_is_not_econnrefused() {
        let finding = |set_retval: bool, kernel_thread_mask: u32| {
            let kernel_thread = TaskFlag { mask: kernel_thread_mask, ..TaskFlag::default() };
            let features = VerifierFeatures { set_retval, kernel_thread, ..fine_facts().features };
            check_features(&HostFacts { features, ..fine_facts() }).finding
        };
        let complete = "the kernel has all that have a fallback";
        let of_udp = "with fallbacks: refused calls of UDP fail with EPERM instead of ECONNREFUSED";
        let of_tcp = "refused connects of TCP fail with EPERM instead of ECONNREFUSED";
        assert_eq!(finding(true, 0), complete);
        assert_eq!(finding(false, KERNEL_THREAD_FLAG), of_udp);
        assert_eq!(finding(false, 0), format!("{of_udp}; {of_tcp}"));
    }

    #[test]
    fn each_fault_that_an_agent_sees_is_named() {
        let unchanged: CanaryResult = Ok(CanaryPath::Unchanged);
        let failed = || Err("timed out".to_owned());
        let cases: [(&[&str], AgentFacts); 9] = [
            (&["agent"], AgentFacts { not_ready: vec!["maps: full".into()], ..fine_agent() }),
            (&["dns"], AgentFacts { dns_failure: Some("no answer".into()), ..fine_agent() }),
            (&["kube-proxy"], AgentFacts { without_kube_proxy: true, ..fine_agent() }),
            (&["canary from the node"], AgentFacts { node_canary: Some(failed()), ..fine_agent() }),
            (&["canary from the node"], AgentFacts { dns_address: None, ..fine_agent() }),
            (
                &["canary from a pod"],
                AgentFacts { pod_canaries: vec![failed(), unchanged.clone()], ..fine_agent() },
            ),
            (&["canary from a pod"], AgentFacts { pod_canaries: vec![failed()], ..fine_agent() }),
            // A policy keeps one pod from the cluster's DNS.
            (
                &[],
                AgentFacts {
                    pod_canaries: vec![failed(), Ok(CanaryPath::Redirected)],
                    ..fine_agent()
                },
            ),
            // The node's own cache has the address.
            (
                &[],
                AgentFacts {
                    is_dns_local: true,
                    node_canary: Some(unchanged.clone()),
                    pod_canaries: vec![unchanged],
                    ..fine_agent()
                },
            ),
        ];
        for (subjects, agent) in cases {
            let description = format!("{agent:?}");
            let facts = HostFacts { agent: Some(agent), ..fine_facts() };
            assert_eq!(to_do(&facts), subjects, "{description}");
        }
    }

    #[test]
    fn a_line_survives_its_way_to_the_command() {
        let fine = CheckLine::fine("kernel", "Linux 6.18");
        let to_do = CheckLine::to_do("dns", "no\taddress\nat all", "look at kube-dns");
        assert_eq!(CheckLine::parse(&fine.to_fields()), Some(fine.clone()));
        let parsed = CheckLine::parse(&to_do.to_fields()).expect("a line");
        assert_eq!(parsed.finding, "no address at all");
        assert_eq!(parsed.to_do, to_do.to_do);
        assert_eq!(fine.to_string(), "ok     kernel: Linux 6.18");
        assert_eq!(parsed.to_string(), "TO DO  dns: no address at all: look at kube-dns");
        for bad in ["", "alone", "a\tb\tc\td"] {
            assert_eq!(CheckLine::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn releases_of_distributions_have_a_version() {
        assert_eq!(kernel_version("5.10.0-33-amd64"), Some((5, 10)));
        assert_eq!(kernel_version("6.12-rc1"), Some((6, 12)));
        assert_eq!(kernel_version("unknown"), None);
    }
}

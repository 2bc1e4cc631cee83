//! Shell: the page of an agent with the check of its node.

use agent::{
    kernel::programs::EbpfPrograms, map_sizes::MapSizes, node_check::rules::CheckLine,
    paths::AgentPaths,
};
use serde_json::{Value, json};

use super::{fake_watch_server::FakeWatchServer, *};

/// ClusterIP of the cluster's DNS.
const DNS_ADDRESS: &str = "10.96.0.10";

impl AgentFixture {
    /// Starts an agent in a pod's cgroup, so that its own connects are redirected, with this server of DNS.
    fn start_agent_with_dns(&mut self, address: &str) {
        let file = |name: &str, text: String| {
            let path = self.folder.join(name);
            fs::write(&path, text).expect("a file");
            path
        };
        let kubeconfig = file("kubeconfig", FakeWatchServer::kubeconfig().to_string());
        let resolv_conf = file("resolv.conf", format!("nameserver {address}\n"));
        let pods = self.cgroup.join(self.pods_cgroup);
        let agent_cgroup = pods.join("podagent/main");
        fs::create_dir_all(&agent_cgroup).expect("a cgroup");
        let entering = self.role_command("agent", "n");
        let args: Vec<_> = entering.get_args().filter_map(|word| word.to_str()).collect();
        // The file is the agent's alone: its mount namespace is private.
        let script = format!(
            "echo $$ > {}/cgroup.procs && exec unshare --mount sh -c \
             'mount --bind {} /etc/resolv.conf && exec nsenter {}'",
            agent_cgroup.display(),
            resolv_conf.display(),
            args.join(" ")
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script]).env(ROLE, "agent").envs(self.agent_environment());
        command.env("ROUSE_CLIENTS_CGROUP", pods.parent().expect("the node's cgroup"));
        command.env("ROUSE_PODS_CGROUP", &pods);
        command.env("KUBECONFIG", &kubeconfig).env("ROUSE_CLUSTERIP", "all");
        self.agent = Some(command.spawn().expect("sh"));
    }

    /// Attaches a second set of the same programs to the cgroup above the node's. They act as a foreign load balancer.
    fn attach_foreign_programs(&self) -> EbpfPrograms {
        let pods = self.cgroup.join("foreign");
        fs::create_dir_all(&pods).expect("a cgroup");
        let paths = AgentPaths {
            bpffs: self.folder.join("bpf"),
            clients: self.cgroup.clone(),
            pods,
            kubelet: None,
            version: abi::ABI_VERSION,
            map_sizes: MapSizes::default(),
        };
        EbpfPrograms::load(paths).expect("the kernel takes them")
    }

    /// Checks that the line about connection tables follows the setting of the node's namespace.
    fn check_connection_tables(&self) {
        let subject = "connection tables";
        if !Path::new("/proc/sys/net/ipv4/tcp_child_ehash_entries").exists() {
            self.wait_check_line(subject, |line| line.finding.contains("Linux 6.1 and newer"));
            return;
        }
        let line = self.wait_check_line(subject, |_| true);
        assert!(line.finding.starts_with("pods share the machine's"), "{line}");
        let netns = format!("{}-n", self.name);
        crate::fixture::in_netns(&netns, || {
            fs::write("/proc/sys/net/ipv4/tcp_child_ehash_entries", "9000").expect("root");
        });
        // The kernel rounds up.
        let own = "pods that start get their own, of 16384 buckets";
        self.wait_check_line(subject, |line| line.finding == own);
    }

    /// Returns the line with this subject, once it is as expected.
    fn wait_check_line(
        &self,
        subject: &str,
        is_expected: impl Fn(&CheckLine) -> bool,
    ) -> CheckLine {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        loop {
            let page = self.get_page("n", "127.0.0.1:7104", "/check");
            let mut lines = page.lines().filter_map(CheckLine::parse);
            if let Some(line) = lines.find(|it| it.subject == subject && is_expected(it)) {
                return line;
            }
            assert!(Instant::now() < deadline, "{subject}: {page}");
            thread::sleep(Duration::from_millis(500));
        }
    }
}

fn dns_slice(addresses: &[&str]) -> Value {
    let endpoints = addresses.iter().map(|it| json!({"addresses": [it]}));
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {
            "name": "kube-dns-1", "namespace": "kube-system",
            "labels": {"kubernetes.io/service-name": "kube-dns"},
        },
        "ports": [{"name": "dns-tcp", "port": 8080, "protocol": "TCP"}],
        "endpoints": endpoints.collect::<Vec<_>>(),
    })
}

#[test]
fn a_check_proves_connects_from_the_node_and_from_a_pod() {
    let mut fixture = AgentFixture::with_pods_cgroup("check", "node/pods");
    let server = FakeWatchServer::start(&format!("{}-n", fixture.name));
    server.set(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}));
    server.set(json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system"},
        "spec": {
            "type": "ClusterIP", "clusterIP": DNS_ADDRESS, "clusterIPs": [DNS_ADDRESS],
            "ports": [{"name": "dns-tcp", "port": 53, "protocol": "TCP"}],
        },
    }));
    server.set(dns_slice(&["10.77.0.2"]));
    fixture.start_pod();
    fixture.send_to_pod("listen");
    fixture.start_agent_with_dns(DNS_ADDRESS);

    for subject in ["canary from the node", "canary from a pod"] {
        let line = fixture.wait_check_line(subject, |line| line.to_do.is_none());
        let expected = "10.96.0.10:53 leads to an endpoint by Rouse's programs";
        assert_eq!(line.finding, expected, "{subject}");
    }
    for subject in ["kernel", "features", "cgroup", "capabilities", "load balancers", "clusterip"] {
        let line = fixture.wait_check_line(subject, |_| true);
        assert_eq!(line.to_do, None, "{line}");
    }
    fixture.check_connection_tables();
    let _foreign = fixture.attach_foreign_programs();
    let line = fixture.wait_check_line("load balancers", |line| line.to_do.is_some());
    assert!(line.finding.contains("other (2 programs)"), "{line}");
    // No server of DNS answers here.
    fixture.wait_check_line("dns", |line| line.to_do.is_some());

    server.set(dns_slice(&[]));
    for subject in ["canary from the node", "canary from a pod"] {
        let line = fixture.wait_check_line(subject, |line| line.to_do.is_some());
        assert!(line.finding.contains("is not reached"), "{line}");
    }
}

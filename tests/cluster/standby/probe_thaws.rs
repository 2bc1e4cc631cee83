//! Probes of the kubelet against frozen pods: each gets its answer, and none restarts a container.
//!
//! `ROUSE_STANDBY_PROBES` is the number of thaws by probes for which the test waits.
#![allow(clippy::print_stdout, reason = "the output shows the progress of a long test")]

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use tests::http_client;
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster, SYSTEM_NAMESPACE};
use tests::test_cluster::in_netns;

use super::{AGENT, FrozenPod, StandbyService, manifest};

/// Number of services, each with one of the [`PROBES`].
const SERVICES: usize = 21;
/// Probes of all kinds that need no command in the pod.
const PROBES: [&str; 3] = ["httpGet: {path: /}", "tcpSocket: {}", "grpc: {port: 8080}"];
/// Default number of thaws.
const PROBE_THAWS: u64 = 60;
/// Number of thaws between two lines of progress.
const PROGRESS_STEP: u64 = 60;

/// Container with a liveness probe every three seconds. One probe without an answer restarts the container. A busy machine
/// may need more than the default of one second for an answer, and a pod that stays frozen never gives one. gRPC needs
/// HTTP/2 by prior knowledge, which a port with the name `h2c` gives.
fn probed_container(probe: &str) -> String {
    let port = if probe.starts_with("grpc") { "name: h2c, " } else { "" };
    format!(
        "{HELLO_CONTAINER}, ports: [{{{port}containerPort: 8080}}],
        livenessProbe: {{{probe}, periodSeconds: 3, timeoutSeconds: 10, failureThreshold: 1}}"
    )
}

/// Network namespaces of the agents, in which they export their metrics.
fn agent_netns(rouse: &RouseCluster) -> Vec<PathBuf> {
    let agents = rouse.component_pods(AGENT);
    let names = agents.iter().filter_map(|pod| pod["metadata"]["name"].as_str());
    names.map(|name| rouse.cluster.netns_of(SYSTEM_NAMESPACE, name)).collect()
}

/// Number of pods that all agents have thawed for a probe so far.
fn probe_thaws(agents: &[PathBuf]) -> u64 {
    const SERIES: &str = "rouse_agent_thaws_total{cause=\"probe\"} ";
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 7104));
    let count = |netns: &PathBuf| -> u64 {
        let page = in_netns(netns, || http_client::get(address, "agent", "/metrics"));
        let page = page.expect("the agent runs").body;
        let count = page.lines().find_map(|line| line.strip_prefix(SERIES)?.trim().parse().ok());
        count.unwrap_or_else(|| panic!("no {SERIES:?} in {page}"))
    };
    agents.iter().map(count).sum()
}

#[test]
fn probes_thaw_frozen_pods_for_their_answers_alone_and_restart_nothing() {
    let wanted = std::env::var("ROUSE_STANDBY_PROBES").ok().and_then(|it| it.parse().ok());
    let wanted: u64 = wanted.unwrap_or(PROBE_THAWS);
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("standby-probes");
    let namespace = &namespace.name;
    let names: Vec<String> = (0..SERVICES).map(|number| format!("p{number}")).collect();
    let yaml = names.iter().zip(PROBES.iter().cycle());
    let yaml = yaml.map(|(name, probe)| manifest(name, "", &probed_container(probe), ""));
    rouse.apply_until_ready(namespace, &yaml.collect::<Vec<_>>().join("---\n"));
    let services: Vec<StandbyService<'_>> =
        names.iter().map(|name| StandbyService { rouse: &rouse, namespace, name }).collect();
    let pods: Vec<FrozenPod> = services.iter().map(StandbyService::wait_frozen).collect();
    let agents = agent_netns(&rouse);
    // Counters begin with the agents, and other tests have thawed pods as well.
    let first = probe_thaws(&agents);
    let mut thaws = 0;
    while thaws < wanted {
        let next = wanted.min(thaws + PROGRESS_STEP);
        thaws = rouse.cluster.wait("thaws by probes", || {
            Some(probe_thaws(&agents) - first).filter(|thaws| *thaws >= next)
        });
        println!("{thaws} of {wanted} thaws by probes");
    }
    // The same pods without a restart: each probe got its answer in time.
    for (service, pod) in services.iter().zip(&pods) {
        service.wait_frozen_again(pod);
    }
}

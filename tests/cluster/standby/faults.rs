//! Faults around frozen pods. Without the control plane, a frozen pod answers; without its agent, another pod does.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tests::client_pod::ClientPod;
use tests::installed_cluster::{HELLO_CONTAINER, RouseCluster};
use tests::load_process::{LoadRequest, assert_none_lost};

use super::{AGENT, FrozenPod, LongAgentTimeout, NODES, StandbyService, assert_direct};
use crate::faults::{
    InjectedFault,
    components::{SuspendedProcess, pod_pid},
};

/// Components that take no part in the thaw of a pod.
const OTHERS: [&str; 3] = ["controller", "autoscaler", "activator"];

/// Name of the pod's node as the faults take it, and those of its kubelet and containerd.
fn node_parts(pod: &FrozenPod) -> (&'static str, &'static str, &'static str) {
    match pod.node.as_str() {
        "node1" => ("node1", "node1/kubelet", "node1/containerd"),
        "node2" => ("node2", "node2/kubelet", "node2/containerd"),
        other => panic!("{other} is no node of this cluster"),
    }
}

/// Process ids of all replicas of a component.
fn component_pids(rouse: &RouseCluster, component: &str) -> Vec<Pid> {
    let pods = rouse.component_pods(component);
    let names = pods.iter().filter_map(|pod| pod["metadata"]["name"].as_str());
    names.map(|name| pod_pid(rouse, name)).collect()
}

/// Process id of the agent on a node.
fn agent_pid(rouse: &RouseCluster, node: &str) -> Pid {
    let agents = rouse.component_pods(AGENT);
    let mut on_node = agents.iter().filter(|pod| pod["spec"]["nodeName"] == node);
    let name = on_node.find_map(|pod| pod["metadata"]["name"].as_str());
    pod_pid(rouse, name.expect("each node has an agent"))
}

/// Kills an agent at a moment at which `pod` is frozen. A pod that is thawed then would stay so, and answer.
fn kill_while_frozen(rouse: &RouseCluster, agent: Pid, pod: &FrozenPod) {
    rouse.cluster.wait("the pod to be frozen while its agent is suspended", || {
        // While suspended, it thaws nothing between the check and the kill.
        let _suspended = SuspendedProcess::suspend(agent);
        pod.is_frozen().then(|| kill(agent, Signal::SIGKILL).expect("it runs"))
    });
}

#[test]
fn a_frozen_pod_answers_while_api_server_and_all_other_components_are_suspended() {
    let rouse = RouseCluster::shared();
    let _timeout = LongAgentTimeout::apply(&rouse);
    let namespace = rouse.namespace("standby-alone");
    let service = StandbyService::create(&rouse, &namespace.name, "kept", "", HELLO_CONTAINER);
    let (pod, url) = (service.wait_frozen(), service.url());
    // Before the API server is suspended, which is asked for them.
    let pids: Vec<Pid> = OTHERS.iter().flat_map(|it| component_pids(&rouse, it)).collect();
    assert!(pids.len() >= OTHERS.len(), "{pids:?}");
    let addresses = NODES.map(|node| rouse.client_on(node).addresses());
    let fault = InjectedFault::inject(&rouse.cluster, "stop", "kube-apiserver", "resume");
    let suspended: Vec<SuspendedProcess> =
        pids.into_iter().map(SuspendedProcess::suspend).collect();
    for (node, addresses) in NODES.into_iter().zip(addresses) {
        let response = rouse.client_on(node).get(&url);
        assert_eq!(response.pod(), pod.name);
        let peer = response.header("x-peer");
        assert!(addresses.iter().any(|it| it == peer), "{node} got {response}");
        // No decision comes: the agent itself waits until the pod is quiet.
        rouse.cluster.wait("the pod to be frozen again", || pod.is_frozen().then_some(()));
    }
    drop((suspended, fault));
    service.wait_frozen_again(&pod);
}

#[test]
fn an_agent_that_is_killed_loses_no_request_to_its_frozen_pod() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("standby-agent");
    let service = StandbyService::create(&rouse, &namespace.name, "kept", "", HELLO_CONTAINER);
    for node in NODES {
        let pod = service.wait_frozen();
        kill(agent_pid(&rouse, &pod.node), Signal::SIGKILL).expect("it runs");
        // Until the next agent runs, the kernel keeps the request, or another pod takes it.
        let requests = service.start_request(rouse.client_on(node)).finish();
        assert_none_lost(&requests, 1);
        rouse.cluster.wait("the next agent", || {
            let agents = rouse.component_pods(AGENT);
            let is_ready = |pod: &Value| pod["status"]["containerStatuses"][0]["ready"] == true;
            (agents.len() == NODES.len() && agents.iter().all(is_ready)).then_some(())
        });
    }
    service.wait_frozen();
}

/// Starts requests from a client until one has a response, which is to be that of another pod than `pod`.
fn wait_response_of_other_pod(service: &StandbyService<'_>, client: &ClientPod, pod: &FrozenPod) {
    let args = ["--stages", "1x1s", "--requests", "1", "--timeout-s", "5", "--fresh-pct", "100"];
    let address = service.address();
    let request = service.rouse.cluster.wait("a response of another pod", || {
        let requests = client.start_load(&address, service.name, &args).finish();
        requests.into_iter().find(LoadRequest::is_answered)
    });
    assert_ne!(request.pod, pod.name);
}

/// Without its kubelet, the node does not start the agent again.
#[test]
fn a_frozen_pod_whose_agent_is_gone_for_good_is_passed_over() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("standby-gone");
    let service = StandbyService::create(&rouse, &namespace.name, "kept", "", HELLO_CONTAINER);
    let pod = service.wait_frozen();
    // Without its kubelet, the node loses Kubernetes. No component may have all its replicas there.
    rouse.spread_components();
    service.wait_frozen_again(&pod);
    let agent = agent_pid(&rouse, &pod.node);
    println!("thaws before: {:?}", pod.thaw_causes(&rouse));
    // A pod that Kubernetes places there would never start.
    let cordon = rouse.cordon(&pod.node);
    let (_, kubelet, _) = node_parts(&pod);
    let fault = InjectedFault::inject(&rouse.cluster, "kill", kubelet, "start");
    kill_while_frozen(&rouse, agent, &pod);
    wait_response_of_other_pod(&service, rouse.client_on(pod.other_node()), &pod);
    drop((fault, cordon));
    service.wait_frozen();
}

/// The connections of the pod stay open. So their users see the missing thaw before the controller sees anything.
#[test]
fn a_frozen_pod_whose_agent_hangs_is_passed_over() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("standby-hang");
    let service = StandbyService::create(&rouse, &namespace.name, "kept", "", HELLO_CONTAINER);
    let pod = service.wait_frozen();
    let agent = agent_pid(&rouse, &pod.node);
    // A pod that Kubernetes places there has no agent that makes it ready.
    let cordon = rouse.cordon(&pod.node);
    let suspended = rouse.cluster.wait("the pod to be frozen while its agent is suspended", || {
        let suspended = SuspendedProcess::suspend(agent);
        pod.is_frozen().then_some(suspended)
    });
    wait_response_of_other_pod(&service, rouse.client_on(pod.other_node()), &pod);
    assert!(pod.is_frozen(), "nothing has thawed it");
    let logs = rouse.agent_logs().unwrap_or_else(|error| panic!("logs of the agents: {error}"));
    let is_verdict = |line: &&str| line.contains(&pod.uid) && line.contains("is_passed_over=true");
    let verdicts: Vec<_> = logs.lines().filter(is_verdict).collect();
    assert!(!verdicts.is_empty(), "the agent of the client's node has not passed it over");
    drop((suspended, cordon));
    service.wait_frozen();
}

#[test]
fn restarts_of_kubelet_and_containerd_leave_a_frozen_pod_as_it_is() {
    let rouse = RouseCluster::shared();
    let _timeout = LongAgentTimeout::apply(&rouse);
    let namespace = rouse.namespace("standby-daemons");
    let namespace = &namespace.name;
    let service = StandbyService::create(&rouse, namespace, "kept", "", HELLO_CONTAINER);
    let pod = service.wait_frozen();
    let (_, kubelet, containerd) = node_parts(&pod);
    for part in [kubelet, containerd] {
        drop(InjectedFault::inject(&rouse.cluster, "kill", part, "start"));
        // The kubelet serves logs, and asks containerd for their files.
        rouse.cluster.wait(&format!("{part} to run again"), || {
            rouse.cluster.kubectl(&["logs", "--namespace", namespace, &pod.name]).ok()
        });
        service.wait_frozen_again(&pod);
        let client = rouse.client_on(pod.other_node());
        assert_direct(&client.get(&service.url()), client, &pod);
        service.wait_frozen_again(&pod);
    }
}

#[test]
fn a_drained_node_leaves_the_standby_to_the_other_one() {
    let rouse = RouseCluster::shared();
    let _timeout = LongAgentTimeout::apply(&rouse);
    let namespace = rouse.namespace("standby-drain");
    let service = StandbyService::create(&rouse, &namespace.name, "drained", "", HELLO_CONTAINER);
    let pod = service.wait_frozen();
    // `kubectl drain` leaves the node cordoned; this guard uncordons it.
    let _cordon = rouse.cordon(&pod.node);
    let selector = "serving.knative.dev/service=drained";
    let args = ["drain", &pod.node, "--ignore-daemonsets", "--pod-selector", selector];
    rouse.cluster.kubectl(&args).expect("each pod may be evicted");
    let new = service.wait_frozen_other(&pod);
    assert_eq!(new.node, pod.other_node());
    let client = rouse.client_on(pod.other_node());
    assert_direct(&client.get(&service.url()), client, &new);
}

#[test]
#[ignore = "takes minutes: --long"]
fn a_node_that_boots_again_has_its_standby_again() {
    let rouse = RouseCluster::shared();
    let namespace = rouse.namespace("standby-boot");
    let service = StandbyService::create(&rouse, &namespace.name, "kept", "", HELLO_CONTAINER);
    let (pod, url) = (service.wait_frozen(), service.url());
    let (node, ..) = node_parts(&pod);
    drop(InjectedFault::inject(&rouse.cluster, "kill", node, "start"));
    // The client pod on that node ended with the node.
    let client = rouse.client_on(pod.other_node());
    rouse.cluster.wait("a response", || (client.get(&url).status == 200).then_some(()));
    // Only now, so that the response above waits for no pod of the node that was away.
    let _timeout = LongAgentTimeout::apply(&rouse);
    let again = service.wait_frozen();
    assert_direct(&client.get(&url), client, &again);
    service.wait_frozen_again(&again);
}

//! Pure: choice of the replica to ask, and the meaning of its responses.

use k8s_openapi::api::core::v1::Pod;
use kube::core::Status;

use super::ReplicaChoice;
use crate::admin_pages::AdminPage;

/// Most nodes that an error names.
const NAMED_NODES_MAX: usize = 8;
/// Names of containers that a service mesh adds to pods.
const MESH_CONTAINERS: [&str; 2] = ["istio-proxy", "linkerd-proxy"];

/// Component whose pages are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageComponent {
    /// Agent of a node.
    Agent,
    /// Activator of the installation.
    Activator,
}

impl PageComponent {
    /// Returns the name of the component in messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Activator => "activator",
        }
    }

    /// Returns the port of the component's admin pages.
    pub(super) fn admin_port(self) -> u16 {
        match self {
            Self::Agent => 7104,
            Self::Activator => 7103,
        }
    }

    /// Returns the label of the component's pods.
    pub(super) fn pod_label(self) -> &'static str {
        match self {
            Self::Agent => "app=rouse-agent",
            Self::Activator => "app=activator",
        }
    }

    /// Returns what a user without a component on this machine may do besides the usual, as the end of a sentence.
    pub(super) fn local_advice(self) -> &'static str {
        match self {
            Self::Agent => "",
            Self::Activator => {
                ", or forward its port with `kubectl port-forward -n NAMESPACE deploy/activator 7103`"
            }
        }
    }

    /// Returns what to do if the API server does not reach a pod, as the end of a sentence. Agents have the node's
    /// network, and no policy is in their way.
    pub(super) fn unreachable_advice(self, namespace: &str, pod: &str) -> String {
        match self {
            Self::Agent => String::new(),
            Self::Activator => format!(
                ". If a NetworkPolicy is in the way, run `kubectl port-forward -n {namespace} {pod} \
                 7103`, and this command without --kubeconfig"
            ),
        }
    }
}

/// Pod of a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReplicaPod {
    name: String,
    node: String,
    phase: String,
    /// True if the pod is ready. On a node that is away it is not, and stays in its phase.
    is_ready: bool,
}

impl ReplicaPod {
    /// Reads the pod's name, node and state.
    pub(super) fn new(pod: &Pod) -> Self {
        let node = pod.spec.as_ref().and_then(|it| it.node_name.clone());
        let phase = pod.status.as_ref().and_then(|it| it.phase.clone());
        let mut conditions = pod.status.iter().flat_map(|it| it.conditions.iter().flatten());
        Self {
            is_ready: conditions.any(|it| it.type_ == "Ready" && it.status == "True"),
            name: pod.metadata.name.clone().unwrap_or_default(),
            node: node.unwrap_or_default(),
            phase: phase.unwrap_or_default(),
        }
    }
}

/// Chooses a replica. Returns the name of its pod, or the reason for which there is none.
pub(super) fn choose_replica(
    component: PageComponent,
    pods: &[ReplicaPod],
    choice: ReplicaChoice<'_>,
    namespace: &str,
) -> Result<String, String> {
    let name = component.name();
    let mut pods: Vec<&ReplicaPod> = pods.iter().collect();
    // In a fixed order, so that a repeated command asks the same replica.
    pods.sort_by_key(|it| (&it.node, &it.name));
    if pods.is_empty() {
        return Err(format!(
            "no {name} is in namespace {namespace}: install Rouse with `rouse install`, \
             or name its namespace with --system-namespace"
        ));
    }
    let is_running = |it: &&&ReplicaPod| it.phase == "Running";
    let running = || pods.iter().filter(is_running);
    let others = || {
        let mut nodes: Vec<&str> = running().map(|it| it.node.as_str()).collect();
        nodes.dedup();
        let more = nodes.len().saturating_sub(NAMED_NODES_MAX);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        nodes.truncate(NAMED_NODES_MAX);
        format!("{name}s run on {}{more}", nodes.join(", "))
    };
    let found = match choice {
        ReplicaChoice::OfNode(node) => {
            let on_node = pods.iter().find(|it| it.node == node);
            // Of several on one node, a ready one is asked.
            let running_there = || running().filter(move |it| it.node == node);
            let found = running_there().find(|it| it.is_ready).or_else(|| running_there().next());
            if let (Some(pod), None) = (on_node, found) {
                return Err(format!("the {name} on node {node} is {}, not Running", pod.phase));
            }
            found.ok_or_else(|| format!("no {name} is on node {node}: {}", others()))
        }
        ReplicaChoice::Only if running().count() > 1 => Err(format!(
            "the connect needs a node: name it with --node NODE, or the client with \
             --from pod/NAME; {}",
            others()
        )),
        ReplicaChoice::Any | ReplicaChoice::Only => {
            let none = || format!("no {name} in namespace {namespace} is Running");
            let ready = running().find(|it| it.is_ready);
            ready.or_else(|| running().next()).ok_or_else(none)
        }
    };
    found.map(|it| it.name.clone())
}

/// Pod from which a connect comes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodClient {
    /// Node of the pod.
    pub(crate) node: String,
    /// Properties of the pod on which its connects depend, each as a sentence.
    pub(crate) notes: Vec<String>,
}

/// Reads the properties of a pod on which its connects depend, or the reason for which it makes none.
pub(crate) fn describe_pod(pod: &Pod) -> Result<PodClient, String> {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let spec = pod.spec.as_ref();
    let node = spec.and_then(|it| it.node_name.clone()).filter(|it| !it.is_empty());
    let node = node.ok_or_else(|| format!("pod {name} is on no node yet"))?;
    let mut notes = Vec::new();
    if spec.and_then(|it| it.host_network) == Some(true) {
        let note = "the pod has the node's network: for sessionAffinity both are one client";
        notes.push(note.to_owned());
    }
    if let Some(class) = spec.and_then(|it| it.runtime_class_name.as_deref()) {
        notes.push(format!(
            "if runtime class {class} is a sandbox (gVisor, Kata), the pod's connects go unchanged \
             to kube-proxy's rules"
        ));
    }
    // A sidecar may also be an init container that always restarts.
    let containers = spec.into_iter().flat_map(|it| {
        it.containers.iter().chain(it.init_containers.iter().flatten()).map(|it| it.name.as_str())
    });
    if let Some(proxy) = containers.into_iter().find(|it| MESH_CONTAINERS.contains(it)) {
        notes.push(format!(
            "if the pod's mesh ({proxy}) redirects its connections, they go on unchanged, and the \
             proxy chooses an endpoint"
        ));
    }
    Ok(PodClient { node, notes })
}

/// Returns true if an error response comes from the component and not from the API server before it.
pub(super) fn is_of_component(status: &Status) -> bool {
    // kube gives this reason to a response that is not a Status, as the API server's errors are.
    status.reason == "Failed to parse error data"
}

/// Returns true if the API server could not connect to the component.
pub(super) fn is_unreachable(status: &Status) -> bool {
    matches!(status.code, 502..=504) && !is_of_component(status)
}

/// Checks that the node that was named has answered: on a Kubernetes node the component of this machine answers,
/// whatever node is named. `answered` is the node of the page; empty: the component does not know it.
pub(crate) fn check_node(
    component: PageComponent,
    named: Option<&str>,
    answered: &str,
) -> Result<(), String> {
    let name = component.name();
    match named {
        Some(node) if node != answered && !answered.is_empty() => Err(format!(
            "the {name} of this machine is that of node {answered}, not of {node}: \
             name the cluster with --kubeconfig FILE"
        )),
        _ => Ok(()),
    }
}

/// Returns the text of a page, or the error that the component responded with.
pub(super) fn page_text(component: PageComponent, page: AdminPage) -> Result<String, String> {
    let (name, body) = (component.name(), page.body.trim());
    match page.status {
        200 => Ok(page.body),
        404 => Err(format!(
            "the {name} is of a version without this page: \
             bring the {name}s to the version of this command with `rouse install --apply`"
        )),
        400 | 503 if !body.is_empty() => Err(body.to_owned()),
        status => Err(format!("the {name} responded with status {status}: {body}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn agent(name: &str, node: &str, phase: &str) -> ReplicaPod {
        ReplicaPod { name: name.into(), node: node.into(), phase: phase.into(), is_ready: true }
    }

    fn pod(spec: Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).expect("a pod")
    }

    #[test]
    fn an_agent_is_chosen_by_its_node() {
        let pods = [agent("a-2", "n2", "Running"), agent("a-1", "n1", "Running")];
        let choose = |choice| choose_replica(PageComponent::Agent, &pods, choice, "rouse");
        assert_eq!(choose(ReplicaChoice::OfNode("n2")), Ok("a-2".into()));
        assert_eq!(choose(ReplicaChoice::Any), Ok("a-1".into()), "the first by node");
        let unknown = choose(ReplicaChoice::OfNode("n3")).unwrap_err();
        assert_eq!(unknown, "no agent is on node n3: agents run on n1, n2");
        let several = choose(ReplicaChoice::Only).unwrap_err();
        assert!(several.contains("--node NODE") && several.ends_with("n1, n2"), "{several}");
        assert_eq!(
            choose_replica(PageComponent::Agent, &pods[..1], ReplicaChoice::Only, "rouse"),
            Ok("a-2".into())
        );
    }

    #[test]
    fn without_a_running_agent_the_error_says_what_to_do() {
        let pods = [agent("a-1", "n1", "Pending")];
        let error =
            choose_replica(PageComponent::Agent, &pods, ReplicaChoice::OfNode("n1"), "rouse")
                .unwrap_err();
        assert_eq!(error, "the agent on node n1 is Pending, not Running");
        let error =
            choose_replica(PageComponent::Agent, &pods, ReplicaChoice::Any, "rouse").unwrap_err();
        assert_eq!(error, "no agent in namespace rouse is Running");
        let error =
            choose_replica(PageComponent::Agent, &[], ReplicaChoice::Any, "rouse").unwrap_err();
        assert!(error.contains("--system-namespace"), "{error}");
        // A pod that is replaced stays for a while beside its successor.
        let both = [agent("a-1", "n1", "Failed"), agent("a-2", "n1", "Running")];
        assert_eq!(
            choose_replica(PageComponent::Agent, &both, ReplicaChoice::OfNode("n1"), "rouse"),
            Ok("a-2".into())
        );
    }

    #[test]
    fn an_agent_of_a_node_that_is_away_is_asked_last() {
        let agent_pod = |node: &str, ready: &str| {
            let conditions = json!([
                {"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready},
            ]);
            let pod = json!({
                "metadata": {"name": format!("a-{node}")},
                "spec": {"nodeName": node, "containers": []},
                "status": {"phase": "Running", "conditions": conditions},
            });
            ReplicaPod::new(&serde_json::from_value(pod).expect("a pod"))
        };
        let pods = [agent_pod("n1", "False"), agent_pod("n2", "True")];
        let choose = |pods: &[ReplicaPod]| {
            choose_replica(PageComponent::Agent, pods, ReplicaChoice::Any, "rouse")
        };
        assert_eq!(choose(&pods), Ok("a-n2".into()));
        assert_eq!(choose(&pods[..1]), Ok("a-n1".into()), "it may tell why it is not ready");
        assert_eq!(
            choose_replica(PageComponent::Agent, &pods, ReplicaChoice::OfNode("n1"), "rouse"),
            Ok("a-n1".into())
        );
    }

    #[test]
    fn many_nodes_are_counted_and_not_all_named() {
        let pods: Vec<_> =
            (10..30).map(|it| agent(&format!("a{it}"), &format!("n{it}"), "Running")).collect();
        let error =
            choose_replica(PageComponent::Agent, &pods, ReplicaChoice::Only, "rouse").unwrap_err();
        assert!(error.ends_with("n16, n17 and 12 more"), "{error}");
    }

    #[test]
    fn a_pod_tells_its_node_and_what_its_connects_depend_on() {
        let notes = |spec| describe_pod(&pod(spec)).map(|it| it.notes);
        let plain = json!({"nodeName": "n1", "containers": [{"name": "app"}]});
        assert_eq!(describe_pod(&pod(plain)), Ok(PodClient { node: "n1".into(), notes: vec![] }));
        let unscheduled = notes(json!({"containers": []})).unwrap_err();
        assert_eq!(unscheduled, "pod p is on no node yet");
        let all = notes(json!({
            "nodeName": "n1", "hostNetwork": true, "runtimeClassName": "gvisor",
            "containers": [{"name": "app"}], "initContainers": [{"name": "istio-proxy"}],
        }));
        let all = all.expect("it is on a node");
        assert_eq!(all.len(), 3, "{all:?}");
        assert!(all[1].contains("gvisor") && all[2].contains("istio-proxy"), "{all:?}");
    }

    #[test]
    fn the_page_of_another_node_is_no_answer() {
        assert_eq!(check_node(PageComponent::Agent, None, "n1"), Ok(()));
        assert_eq!(check_node(PageComponent::Agent, Some("n1"), "n1"), Ok(()));
        let other = check_node(PageComponent::Agent, Some("n2"), "n1").unwrap_err();
        assert!(other.contains("of node n1, not of n2: name the cluster"), "{other}");
    }

    #[test]
    fn an_activator_that_the_api_server_does_not_reach_is_asked_by_a_forwarded_port() {
        let status =
            |code| Status::failure("dial tcp: i/o timeout", "ServiceUnavailable").with_code(code);
        assert!(is_unreachable(&status(503)) && is_unreachable(&status(502)));
        assert!(!is_unreachable(&status(403)));
        let own = Status::failure("busy", "Failed to parse error data").with_code(503);
        assert!(!is_unreachable(&own), "the component itself has responded");
        let advice = PageComponent::Activator.unreachable_advice("rouse", "a-1");
        assert!(advice.contains("kubectl port-forward -n rouse a-1 7103"), "{advice}");
    }

    #[test]
    fn of_several_activators_on_a_node_a_ready_one_is_asked() {
        let mut pods = [agent("a-1", "n1", "Running"), agent("a-2", "n1", "Running")];
        pods[0].is_ready = false;
        let choose = |choice| choose_replica(PageComponent::Activator, &pods, choice, "rouse");
        assert_eq!(choose(ReplicaChoice::OfNode("n1")), Ok("a-2".into()));
        assert_eq!(choose(ReplicaChoice::Any), Ok("a-2".into()));
        let unknown = choose(ReplicaChoice::OfNode("n2")).unwrap_err();
        assert_eq!(unknown, "no activator is on node n2: activators run on n1");
    }

    #[test]
    fn an_agent_without_the_page_is_of_an_older_version() {
        let page = |status, body: &str| {
            page_text(PageComponent::Agent, AdminPage { status, body: body.into() })
        };
        assert_eq!(page(200, "{}"), Ok("{}".into()));
        assert!(page(404, "").unwrap_err().contains("rouse install --apply"));
        assert_eq!(page(400, "to is \"x\"\n"), Err("to is \"x\"".into()));
        assert_eq!(page(503, "it starts\n"), Err("it starts".into()));
        assert_eq!(page(500, ""), Err("the agent responded with status 500: ".into()));
        let status = |reason: &str| Status::failure("", reason).with_code(404);
        assert!(is_of_component(&status("Failed to parse error data")));
        assert!(!is_of_component(&status("NotFound")));
    }
}

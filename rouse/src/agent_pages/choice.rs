//! Pure: choice of the agent to ask, and the meaning of its responses.

use k8s_openapi::api::core::v1::Pod;
use kube::core::Status;

use super::AgentChoice;
use crate::admin_pages::AdminPage;

/// Most nodes that an error names.
const NAMED_NODES_MAX: usize = 8;
/// Names of containers that a service mesh adds to pods.
const MESH_CONTAINERS: [&str; 2] = ["istio-proxy", "linkerd-proxy"];

/// Pod of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AgentPod {
    name: String,
    node: String,
    phase: String,
    /// True if the pod is ready. On a node that is away it is not, and stays in its phase.
    is_ready: bool,
}

impl AgentPod {
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

/// Chooses an agent. Returns the name of its pod, or the reason for which there is none.
pub(super) fn choose_agent(
    pods: &[AgentPod],
    choice: AgentChoice<'_>,
    namespace: &str,
) -> Result<String, String> {
    let mut pods: Vec<&AgentPod> = pods.iter().collect();
    pods.sort_by_key(|it| (&it.node, &it.name));
    if pods.is_empty() {
        return Err(format!(
            "no agent is in namespace {namespace}: install Rouse with `rouse install`, \
             or name its namespace with --system-namespace"
        ));
    }
    let is_running = |it: &&&AgentPod| it.phase == "Running";
    let running = || pods.iter().filter(is_running);
    let others = || {
        let mut nodes: Vec<&str> = running().map(|it| it.node.as_str()).collect();
        nodes.dedup();
        let more = nodes.len().saturating_sub(NAMED_NODES_MAX);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        nodes.truncate(NAMED_NODES_MAX);
        format!("agents run on {}{more}", nodes.join(", "))
    };
    let found = match choice {
        AgentChoice::OfNode(node) => {
            let on_node = pods.iter().find(|it| it.node == node);
            if let (Some(pod), None) = (on_node, running().find(|it| it.node == node)) {
                return Err(format!("the agent on node {node} is {}, not Running", pod.phase));
            }
            let found = running().find(|it| it.node == node);
            found.ok_or_else(|| format!("no agent is on node {node}: {}", others()))
        }
        AgentChoice::Only if running().count() > 1 => Err(format!(
            "the connect needs a node: name it with --node NODE, or the client with \
             --from pod/NAME; {}",
            others()
        )),
        AgentChoice::Any | AgentChoice::Only => {
            let none = || format!("no agent in namespace {namespace} is Running");
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

/// Returns true if an error response comes from the agent and not from the API server before it.
pub(super) fn is_of_agent(status: &Status) -> bool {
    // kube gives this reason to a response that is not a Status, as the API server's errors are.
    status.reason == "Failed to parse error data"
}

/// Checks that the node that was named has answered: on a Kubernetes node the agent of this machine answers, whatever
/// node is named. `answered` is the node of the page.
pub(crate) fn check_node(named: Option<&str>, answered: &str) -> Result<(), String> {
    match named {
        Some(node) if node != answered => Err(format!(
            "the agent of this machine is that of node {answered}, not of {node}: \
             name the cluster with --kubeconfig FILE"
        )),
        _ => Ok(()),
    }
}

/// Returns the text of a page, or the error that the agent responded with.
pub(super) fn page_text(page: AdminPage) -> Result<String, String> {
    let body = page.body.trim();
    match page.status {
        200 => Ok(page.body),
        404 => Err("the agent is of a version without this page: \
                    bring the agents to the version of this command with `rouse install --apply`"
            .to_owned()),
        400 | 503 if !body.is_empty() => Err(body.to_owned()),
        status => Err(format!("the agent responded with status {status}: {body}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn agent(name: &str, node: &str, phase: &str) -> AgentPod {
        AgentPod { name: name.into(), node: node.into(), phase: phase.into(), is_ready: true }
    }

    fn pod(spec: Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).expect("a pod")
    }

    #[test]
    fn an_agent_is_chosen_by_its_node() {
        let pods = [agent("a-2", "n2", "Running"), agent("a-1", "n1", "Running")];
        let choose = |choice| choose_agent(&pods, choice, "rouse");
        assert_eq!(choose(AgentChoice::OfNode("n2")), Ok("a-2".into()));
        assert_eq!(choose(AgentChoice::Any), Ok("a-1".into()), "the first by node");
        let unknown = choose(AgentChoice::OfNode("n3")).unwrap_err();
        assert_eq!(unknown, "no agent is on node n3: agents run on n1, n2");
        let several = choose(AgentChoice::Only).unwrap_err();
        assert!(several.contains("--node NODE") && several.ends_with("n1, n2"), "{several}");
        assert_eq!(choose_agent(&pods[..1], AgentChoice::Only, "rouse"), Ok("a-2".into()));
    }

    #[test]
    fn without_a_running_agent_the_error_says_what_to_do() {
        let pods = [agent("a-1", "n1", "Pending")];
        let error = choose_agent(&pods, AgentChoice::OfNode("n1"), "rouse").unwrap_err();
        assert_eq!(error, "the agent on node n1 is Pending, not Running");
        let error = choose_agent(&pods, AgentChoice::Any, "rouse").unwrap_err();
        assert_eq!(error, "no agent in namespace rouse is Running");
        let error = choose_agent(&[], AgentChoice::Any, "rouse").unwrap_err();
        assert!(error.contains("--system-namespace"), "{error}");
        // A pod that is replaced stays for a while beside its successor.
        let both = [agent("a-1", "n1", "Failed"), agent("a-2", "n1", "Running")];
        assert_eq!(choose_agent(&both, AgentChoice::OfNode("n1"), "rouse"), Ok("a-2".into()));
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
            AgentPod::new(&serde_json::from_value(pod).expect("a pod"))
        };
        let pods = [agent_pod("n1", "False"), agent_pod("n2", "True")];
        let choose = |pods: &[AgentPod]| choose_agent(pods, AgentChoice::Any, "rouse");
        assert_eq!(choose(&pods), Ok("a-n2".into()));
        assert_eq!(choose(&pods[..1]), Ok("a-n1".into()), "it may tell why it is not ready");
        assert_eq!(choose_agent(&pods, AgentChoice::OfNode("n1"), "rouse"), Ok("a-n1".into()));
    }

    #[test]
    fn many_nodes_are_counted_and_not_all_named() {
        let pods: Vec<_> =
            (10..30).map(|it| agent(&format!("a{it}"), &format!("n{it}"), "Running")).collect();
        let error = choose_agent(&pods, AgentChoice::Only, "rouse").unwrap_err();
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
        assert_eq!(check_node(None, "n1"), Ok(()));
        assert_eq!(check_node(Some("n1"), "n1"), Ok(()));
        let other = check_node(Some("n2"), "n1").unwrap_err();
        assert!(other.contains("of node n1, not of n2: name the cluster"), "{other}");
    }

    #[test]
    fn an_agent_without_the_page_is_of_an_older_version() {
        let page = |status, body: &str| page_text(AdminPage { status, body: body.into() });
        assert_eq!(page(200, "{}"), Ok("{}".into()));
        assert!(page(404, "").unwrap_err().contains("rouse install --apply"));
        assert_eq!(page(400, "to is \"x\"\n"), Err("to is \"x\"".into()));
        assert_eq!(page(503, "it starts\n"), Err("it starts".into()));
        assert_eq!(page(500, ""), Err("the agent responded with status 500: ".into()));
        let status = |reason: &str| Status::failure("", reason).with_code(404);
        assert!(is_of_agent(&status("Failed to parse error data")));
        assert!(!is_of_agent(&status("NotFound")));
    }
}

//! A cluster in its desired state, made by the controller itself against a model of the API server.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use common::{
    outbox::Outbox,
    wire::{ConnectionPath, NamespacedName, RevisionActivity, ScaleDecision},
};
use controller::{
    decide::machine::{ControllerEvent, ControllerStateMachine},
    model::{
        cluster_state::{ClusterState, ControllerSettings, PlatformKind, UnixMillis},
        object::{ObjectPartKey, ResourceKind},
    },
    shell::api::{
        object_cache::ObservedObject,
        write_decision::{WriteAction, next_write},
    },
    write::desired::desired_state,
};
use serde_json::{Value, json};

/// Namespace of Rouse's own components.
pub(super) const SYSTEM: &str = "knative-serving";
/// Number of services in one namespace.
const SERVICES_PER_NAMESPACE: usize = 100;

/// Size of the cluster to make.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClusterSize {
    /// Number of services, each with one Revision.
    pub(super) services: usize,
    /// Number of pods per Revision.
    pub(super) pods: usize,
    /// Number of nodes, each with an agent.
    pub(super) nodes: usize,
}

/// A pod's identity, as its agent reports it.
#[derive(Clone, Debug)]
pub(super) struct ReportedPod {
    pub(super) uid: String,
    pub(super) node: String,
    pub(super) address: String,
}

/// All objects of the cluster, with the machine that planned them.
pub(super) struct DesiredCluster {
    machine: ControllerStateMachine,
    now: UnixMillis,
    size: ClusterSize,
    objects_made: usize,
    pub(super) objects: BTreeMap<(ResourceKind, NamespacedName), Value>,
    pub(super) pods: Vec<ReportedPod>,
    pub(super) decisions: Vec<ScaleDecision>,
}

impl DesiredCluster {
    /// Plays users, controller and Kubernetes until no write is left.
    pub(super) fn new(size: ClusterSize, now: UnixMillis) -> Self {
        let settings = ControllerSettings {
            platform: PlatformKind::Kubernetes,
            ..ControllerSettings::default()
        };
        let settings = ControllerSettings {
            external_domain: "example.com".into(),
            fixed_activators: Vec::new(),
            ..settings
        };
        let state =
            ClusterState { settings: settings.into(), is_leader: false, ..ClusterState::default() };
        let machine = ControllerStateMachine::new(state, Outbox::new());
        let (objects, pods, decisions) = (BTreeMap::new(), Vec::new(), Vec::new());
        let mut all = Self { machine, now, size, objects_made: 0, objects, pods, decisions };
        all.settle_events(vec![ControllerEvent::LeadershipChanged(true)]);
        (0..2).for_each(|at| all.add_activator(at));
        (0..size.nodes).for_each(|at| all.add_node(at));
        (0..size.services).for_each(|at| all.add_service(at));
        all
    }

    /// Returns the number of objects of a kind.
    pub(super) fn count(&self, resource: ResourceKind) -> usize {
        self.objects.keys().filter(|(kind, _)| *kind == resource).count()
    }

    /// Handles events, and all events that follow from the resulting writes.
    fn settle_events(&mut self, events: Vec<ControllerEvent>) {
        let (mut events, mut keys) = (VecDeque::from(events), BTreeSet::new());
        loop {
            if let Some(event) = events.pop_front() {
                let effects = self.machine.step(self.now, event);
                keys.extend(effects.changed_keys);
                events.extend(
                    effects.revisions_to_resolve.iter().filter_map(|it| self.resolve_digests(it)),
                );
            } else if let Some(key) = keys.pop_first() {
                events.extend(self.write_part(&key));
            } else {
                return;
            }
        }
    }

    /// Returns empty digests, as for a registry that is skipped.
    fn resolve_digests(&self, revision: &NamespacedName) -> Option<ControllerEvent> {
        let request = self.machine.digest_request(revision)?;
        let none = request.images.into_iter().map(|(name, _)| (name, String::new()));
        Some(ControllerEvent::DigestsResolved {
            revision: revision.clone(),
            resolution: Ok(none.collect()),
        })
    }

    fn write_part(&mut self, key: &ObjectPartKey) -> Vec<ControllerEvent> {
        let at = (key.resource, key.name.clone());
        let observed = self.objects.get(&at).map(ObservedObject::from_object);
        match next_write(key, desired_state(self.machine.cluster(), key), observed.as_ref(), None) {
            WriteAction::None => Vec::new(),
            WriteAction::Create(body) | WriteAction::Apply(body) => {
                self.apply(key.resource, &key.name, body)
            }
            WriteAction::Status(body) => {
                self.objects.get_mut(&at).expect("it exists")["status"] = body["status"].clone();
                self.observe_events(at)
            }
            // Restores, scales and deletions cannot occur while the cluster is only built up.
            other => panic!("{key} needs an unexpected write: {other:?}"),
        }
    }

    fn observe_events(&self, at: (ResourceKind, NamespacedName)) -> Vec<ControllerEvent> {
        let object = Box::new(self.objects[&at].clone());
        vec![ControllerEvent::ObjectObserved { resource: at.0, name: at.1, object: Some(object) }]
    }

    /// Applies a body as the API server and Kubernetes' own controllers would.
    fn apply(
        &mut self,
        resource: ResourceKind,
        name: &NamespacedName,
        mut object: Value,
    ) -> Vec<ControllerEvent> {
        let at = (resource, name.clone());
        let previous = self.objects.get(&at);
        let meta = |field: &str| previous.map(|it| it["metadata"][field].clone());
        let is_same_spec = previous.is_some_and(|it| it["spec"] == object["spec"]);
        let generation = meta("generation").and_then(|it| it.as_i64()).unwrap_or(0);
        let (uid, made_at) = (meta("uid"), meta("creationTimestamp"));
        let status = previous.and_then(|it| it.get("status")).cloned();
        let old_ips = previous.map(|it| it["spec"]["clusterIPs"].clone());
        self.objects_made += 1;
        object["apiVersion"] = json!(resource.api_version());
        object["kind"] = json!(resource.kind());
        object["metadata"]["uid"] = uid.unwrap_or_else(|| json!(uuid(4, self.objects_made)));
        object["metadata"]["creationTimestamp"] =
            made_at.unwrap_or_else(|| json!(self.now.rfc3339()));
        object["metadata"]["generation"] = json!(generation + i64::from(!is_same_spec));
        if let Some(status) = status {
            object["status"] = status;
        }
        // A Service without a selector is a placeholder, whose ClusterIP must not change.
        if resource == ResourceKind::Service && object["spec"].get("selector").is_none() {
            let host = self.objects_made;
            let new_ips = || {
                json!([format!("10.{}.{}.{}", 96 + (host >> 16), (host >> 8) & 255, host & 255)])
            };
            object["spec"]["clusterIPs"] = old_ips.filter(Value::is_array).unwrap_or_else(new_ips);
        }
        let is_new = previous.is_none();
        self.objects.insert(at.clone(), object);
        let mut events = self.observe_events(at);
        // The Deployment's pods are made at once, and ready.
        if resource == ResourceKind::Deployment && is_new {
            events.extend((0..self.size.pods).flat_map(|_| self.add_pod(name)).collect::<Vec<_>>());
        }
        events
    }

    fn add_service(&mut self, at: usize) {
        let name = NamespacedName::new(
            format!("team-{}", at / SERVICES_PER_NAMESPACE),
            format!("shop-{at}"),
        );
        let metadata = json!({"name": name.name.as_str(), "namespace": name.namespace.as_str()});
        let body =
            json!({"metadata": metadata, "spec": {"template": template(at, self.size.pods)}});
        let events = self.apply(ResourceKind::KnativeService, &name, body);
        self.settle_events(events);
        let revision = NamespacedName::new(name.namespace, format!("{}-00001", name.name));
        let decision = decision(revision, self.size.pods);
        self.decisions.push(decision.clone());
        self.settle_events(vec![ControllerEvent::DecisionReceived(decision)]);
    }

    fn add_node(&mut self, at: usize) {
        let ready = json!([{"type": "Ready", "status": "True"}]);
        let body =
            json!({"metadata": {"name": format!("node-{at}")}, "status": {"conditions": ready}});
        let events =
            self.apply(ResourceKind::Node, &NamespacedName::new("", format!("node-{at}")), body);
        self.settle_events(events);
    }

    fn add_activator(&mut self, at: usize) {
        let name = NamespacedName::new(SYSTEM, format!("activator-{at}"));
        let body = json!({
            "metadata": {"name": name.name.as_str(), "namespace": SYSTEM, "labels": {"app": "activator"}},
            "spec": {"nodeName": format!("node-{at}")},
            "status": {"podIP": format!("10.1.0.{at}"), "conditions": [{"type": "Ready", "status": "True"}]},
        });
        let events = self.apply(ResourceKind::Pod, &name, body);
        self.settle_events(events);
    }

    /// Makes a pod that runs and is ready, as large as a pod of a real API server.
    fn add_pod(&mut self, deployment: &NamespacedName) -> Vec<ControllerEvent> {
        self.objects_made += 1;
        let (object_number, number) = (self.objects_made, self.pods.len());
        let address =
            format!("10.{}.{}.{}", 128 + (number >> 16), (number >> 8) & 255, number & 255);
        let node = format!("node-{}", number % self.size.nodes);
        let name = NamespacedName::new(
            deployment.namespace.clone(),
            format!("{}-{object_number:09}", deployment.name),
        );
        let deployment_object = &self.objects[&(ResourceKind::Deployment, deployment.clone())];
        let labels = &deployment_object["spec"]["template"]["metadata"]["labels"];
        let mut spec = deployment_object["spec"]["template"]["spec"].clone();
        spec["nodeName"] = json!(node);
        // Tolerations that the API server's admission adds to every pod.
        spec["tolerations"] = json!([
            {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
            {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
        ]);
        let uid = uuid(5, object_number);
        let object = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": name.name.as_str(), "namespace": name.namespace.as_str(), "uid": uid, "labels": labels,
                "creationTimestamp": self.now.rfc3339(),
            },
            "spec": spec,
            "status": pod_status(&address, &self.now.rfc3339()),
        });
        self.pods.push(ReportedPod { uid, node, address });
        let at = (ResourceKind::Pod, name);
        self.objects.insert(at.clone(), object);
        self.observe_events(at)
    }
}

fn uuid(kind: u8, number: usize) -> String {
    format!("5f3a7c21-0000-4{kind:03}-8000-{number:012x}")
}

fn pod_status(address: &str, since: &str) -> Value {
    let kinds =
        ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"];
    let condition = |kind: &&str| json!({"type": kind, "status": "True", "lastTransitionTime": since, "lastProbeTime": null});
    json!({
        "phase": "Running", "hostIP": "192.168.0.1", "podIP": address, "podIPs": [{"ip": address}],
        "qosClass": "Burstable", "startTime": since,
        "conditions": kinds.iter().map(condition).collect::<Vec<_>>(),
        "containerStatuses": [{
            "name": "user-container", "ready": true, "started": true, "restartCount": 0,
            "image": "dev.local/shop:v1", "imageID": "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            "containerID": "containerd://0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
            "state": {"running": {"startedAt": since}}, "lastState": {},
        }],
    })
}

/// Returns a template; every service runs an image of its own, so no two templates are equal.
fn template(at: usize, pods: usize) -> Value {
    let probe = json!({"tcpSocket": {"port": 0}, "successThreshold": 1, "periodSeconds": 0});
    let resources =
        json!({"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}});
    let env =
        json!([{"name": "SHOP", "value": at.to_string()}, {"name": "LOG_LEVEL", "value": "info"}]);
    json!({
        "metadata": {"annotations": {"autoscaling.knative.dev/initial-scale": pods.to_string()}},
        "spec": {
            "containers": [{
                "name": "user-container", "image": format!("dev.local/shop-{at}:v1"), "env": env,
                "readinessProbe": probe, "resources": resources,
            }],
            "containerConcurrency": 0, "timeoutSeconds": 300, "enableServiceLinks": false,
        },
    })
}

fn decision(revision: NamespacedName, pods: usize) -> ScaleDecision {
    ScaleDecision {
        revision,
        requested_scale: u32::try_from(pods).ok(),
        connection_path: ConnectionPath::Direct,
        activator_count: 2,
        activity: RevisionActivity::Active,
        stable_load: 0.0,
        panic_load: 0.0,
        target_load: 70.0,
        ready_pods: u32::try_from(pods).unwrap_or(u32::MAX),
        is_panicking: false,
        excess_burst_capacity: 0.0,
        reason: String::new(),
        inputs: None,
        wake_origin: None,
    }
}

//! Model of the API server, with the controllers of Kubernetes that the tests need.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use common::{
    outbox::Outbox,
    wire::{
        ClientComponent, ComponentReplica, ConnectionPath, NamespacedName, PodObservation,
        RevisionActivity, RouteTable, ScaleDecision,
    },
};
use serde_json::{Value, json};

use crate::{
    decide::machine::{
        CertificateCounts, ControllerEvent, ControllerStateMachine, ObjectEventRecord, PodRead,
    },
    model::{
        cluster_state::{
            ClientCaRead, ClusterState, ControllerSettings, PlatformKind, SecretRead, UnixMillis,
        },
        knative::key,
        object::{ObjectPartKey, ResourceKind, WriteError},
    },
    shell::api::{
        object_cache::ObservedObject,
        write_decision::{WriteAction, next_write},
    },
    write::desired::desired_state,
};

mod resizes;
mod user_workloads;
mod withheld;

pub(super) const NAMESPACE: &str = "default";

pub(super) fn name(name: &str) -> NamespacedName {
    NamespacedName::new(NAMESPACE, name)
}

/// A model of the API server, with the Kubernetes controllers that matter here.
pub(super) struct FakeApiServer {
    /// Machine of the leader, unless the test makes it a follower.
    pub(super) machine: ControllerStateMachine,
    /// Machine of another replica, which observes the same and must have the same table. `None` where a test shows them
    /// different things.
    pub(super) other_replica: Option<ControllerStateMachine>,
    pub(super) now: UnixMillis,
    /// Time of the API server's clock; `None`: same as the controller's.
    pub(super) api_server_clock: Option<UnixMillis>,
    pub(super) objects: BTreeMap<(ResourceKind, NamespacedName), Value>,
    /// Number given out last: of an object's UID, a pod's name or an address. Each apply takes one, also of an object
    /// that exists.
    pub(super) last_number: u64,
    pub(super) writes: usize,
    /// True if each request for digests is completed at once, with the result for registries that are skipped.
    pub(super) completes_digests: bool,
    /// Parts of objects whose last write failed.
    pub(super) failed_writes: BTreeSet<ObjectPartKey>,
    /// Labels that were applied last, by object.
    pub(super) labels: BTreeMap<(ResourceKind, NamespacedName), Value>,
    /// True if the first list of users' workloads is complete as soon as it is needed.
    pub(super) lists_workloads: bool,
    /// True once the workloads of users are listed.
    pub(super) are_workloads_listed: bool,
    /// Numbers of pods that the controller has written into workloads of users, in their order.
    pub(super) replicas_writes: Vec<u64>,
    /// Number of writes to workloads of users, and to ConfigMaps, that were refused, since these had changed.
    pub(super) conflicts: usize,
    /// Object whose observations are withheld from all replicas, as by slow watches.
    withheld: Option<(ResourceKind, NamespacedName)>,
    /// Observations that were withheld, in their order.
    withheld_events: Vec<ControllerEvent>,
    /// Events on Services of users and on Revisions.
    pub(super) object_events: Vec<ObjectEventRecord>,
    /// Error of each resize of a pod.
    pub(super) resize_refusal: Option<WriteError>,
    /// Reads of pods that the machine of the leader has asked for, and that the test answers.
    pub(super) pod_reads: Vec<PodRead>,
    /// Reads of pods that the other replica has asked for.
    pub(super) pod_reads_of_other: Vec<PodRead>,
    /// Secrets that the reader of the leader is to read.
    pub(super) named_secrets: BTreeSet<NamespacedName>,
    /// Secrets that the reader of the leader is to read for authorities of client certificates.
    pub(super) named_client_cas: BTreeSet<NamespacedName>,
    /// Changes to the certificates that the signer of the leader is to sign, in their order.
    pub(super) local_requests: Vec<(NamespacedName, Option<u64>)>,
    /// Number of named Secrets in each state.
    pub(super) certificate_counts: CertificateCounts,
}

/// Returns the result for registries that are skipped: empty digests.
fn empty_digests(
    machine: &ControllerStateMachine,
    revision: &NamespacedName,
) -> Option<ControllerEvent> {
    let request = machine.digest_request(revision)?;
    let digests = request.images.into_iter().map(|(name, _)| (name, String::new())).collect();
    Some(ControllerEvent::DigestsResolved { revision: revision.clone(), resolution: Ok(digests) })
}

pub(super) fn machine() -> ControllerStateMachine {
    let settings =
        ControllerSettings { platform: PlatformKind::Kubernetes, ..ControllerSettings::default() };
    let cluster =
        ClusterState { settings: Arc::new(settings), is_leader: false, ..ClusterState::default() };
    ControllerStateMachine::new(cluster, Outbox::new())
}

impl FakeApiServer {
    pub(super) fn new() -> Self {
        let mut api_server = Self {
            machine: machine(),
            other_replica: Some(machine()),
            now: UnixMillis(1_000_000_000),
            api_server_clock: None,
            objects: BTreeMap::new(),
            last_number: 0,
            writes: 0,
            completes_digests: true,
            failed_writes: BTreeSet::new(),
            labels: BTreeMap::new(),
            lists_workloads: true,
            are_workloads_listed: false,
            replicas_writes: Vec::new(),
            conflicts: 0,
            withheld: None,
            withheld_events: Vec::new(),
            object_events: Vec::new(),
            resize_refusal: None,
            pod_reads: Vec::new(),
            pod_reads_of_other: Vec::new(),
            named_secrets: BTreeSet::new(),
            named_client_cas: BTreeSet::new(),
            local_requests: Vec::new(),
            certificate_counts: CertificateCounts::default(),
        };
        let activator = json!({
            "metadata": {"name": "activator-1", "namespace": "knative-serving", "uid": "a1", "labels": {"app": "activator"}},
            "spec": {"nodeName": "n1"},
            "status": {"podIP": "10.1.0.9", "conditions": [{"type": "Ready", "status": "True"}]},
        });
        let activator_name = NamespacedName::new("knative-serving", "activator-1");
        api_server.objects.insert((ResourceKind::Pod, activator_name.clone()), activator.clone());
        api_server.step(ControllerEvent::LeadershipChanged(true));
        api_server.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::Pod,
            name: activator_name,
            object: Some(Box::new(activator)),
        });
        api_server
    }

    /// Handles an event, and all events that follow from the resulting writes.
    pub(super) fn step(&mut self, event: ControllerEvent) {
        self.step_all(vec![event]);
    }

    /// Handles events that follow from one change, and all that follow from the resulting writes. Replicas agree only
    /// after the last one: a pod that is gone takes no mark of the leader.
    fn step_all(&mut self, first: Vec<ControllerEvent>) {
        let mut events = VecDeque::from(first);
        let mut turns = 0;
        while let Some(event) = events.pop_front() {
            turns += 1;
            assert!(turns < 2000, "it never comes to rest");
            if self.is_withheld(&event) {
                self.withheld_events.push(event);
                continue;
            }
            let is_for_leader = matches!(
                event,
                ControllerEvent::LeadershipChanged(_)
                    | ControllerEvent::DigestsResolved { .. }
                    | ControllerEvent::WriteErrorChanged { .. }
            );
            if let Some(follower) = self.other_replica.as_mut().filter(|_| !is_for_leader) {
                let effects = follower.step(self.now, event.clone());
                self.pod_reads_of_other.extend(effects.pods_to_read);
            }
            let effects = self.machine.step(self.now, event);
            self.pod_reads.extend(effects.pods_to_read);
            self.object_events.extend(effects.object_events);
            if let Some(named) = effects.named_secrets {
                self.named_secrets = named;
            }
            if let Some(named) = effects.named_client_cas {
                self.named_client_cas = named;
            }
            self.local_requests.extend(effects.local_certificates);
            if let Some(counts) = effects.certificate_counts {
                self.certificate_counts = counts;
            }
            if effects.needs_workload_watch && self.lists_workloads && !self.are_workloads_listed {
                self.are_workloads_listed = true;
                events.extend(observations_of_workloads(&self.objects));
                events.push_back(ControllerEvent::WorkloadsListed);
            }
            for revision in
                effects.revisions_to_resolve.into_iter().filter(|_| self.completes_digests)
            {
                events.extend(empty_digests(&self.machine, &revision));
            }
            for key in effects.changed_keys.into_iter().collect::<BTreeSet<_>>() {
                events.extend(self.write(&key));
            }
        }
        assert_eq!(hosts_with_two_services(&self.table()), [""; 0]);
        if let Some(follower) =
            self.other_replica.as_ref().filter(|_| self.machine.cluster().is_leader)
        {
            assert_eq!(differences(&table(follower), &self.table()), [""; 0]);
        }
    }

    /// Writes an object part as the writer of the leader does, and returns the observations that follow.
    pub(super) fn write(&mut self, key: &ObjectPartKey) -> Vec<ControllerEvent> {
        if !self.machine.cluster().is_leader {
            return Vec::new();
        }
        let observed =
            self.objects.get(&(key.resource, key.name.clone())).map(ObservedObject::from_object);
        match next_write(key, desired_state(self.machine.cluster(), key), observed.as_ref(), None) {
            WriteAction::None => Vec::new(),
            WriteAction::NotOwned(error) => {
                self.failed_writes.insert(key.clone());
                vec![ControllerEvent::WriteErrorChanged { key: key.clone(), error: Some(error) }]
            }
            WriteAction::Apply(body) | WriteAction::Restore(body)
                if self.is_conflict(key, &body) =>
            {
                self.conflicts += 1;
                Vec::new()
            }
            WriteAction::Create(body) | WriteAction::Apply(body) | WriteAction::Restore(body) => {
                let mut events = self.apply(key.resource, &key.name, body);
                events.extend(
                    self.failed_writes
                        .take(key)
                        .map(|key| ControllerEvent::WriteErrorChanged { key, error: None }),
                );
                events
            }
            WriteAction::Status(body) => self.put_status(key, body["status"].clone()),
            WriteAction::Scale { replicas, pods_to_remove: leaving_pods } => {
                self.scale(&key.name, replicas, &leaving_pods)
            }
            WriteAction::Replicas { body, pods_to_remove } => {
                self.write_replicas(key, &body, &pods_to_remove)
            }
            WriteAction::GiveBack { version, body } => self.give_back(key, &version, body.as_ref()),
            WriteAction::Resize { uid, requests } => self.resize(key, &uid, requests),
            WriteAction::Delete(_) => self.delete(key.resource, &key.name),
        }
    }

    /// Maps a host to a service by a DomainMapping of this name, with these annotations. Later ones are younger.
    pub(super) fn map_service_domain(&mut self, mapping: &str, service: &str, annotations: Value) {
        let reference =
            json!({"apiVersion": "serving.knative.dev/v1", "kind": "Service", "name": service});
        let body = json!({
            "apiVersion": "serving.knative.dev/v1beta1", "kind": "DomainMapping",
            "metadata": {"name": mapping, "namespace": NAMESPACE, "annotations": annotations},
            "spec": {"ref": reference},
        });
        for event in self.apply(ResourceKind::DomainMapping, &name(mapping), body) {
            self.step(event);
        }
        self.now = self.now.plus_ms(2000);
    }

    /// Creates a ClusterDomainClaim, as an administrator does.
    pub(super) fn claim_domain(&mut self, domain: &str, namespace: &str) {
        let body = json!({
            "metadata": {"name": domain}, "spec": {"namespace": namespace},
        });
        for event in
            self.apply(ResourceKind::ClusterDomainClaim, &NamespacedName::new("", domain), body)
        {
            self.step(event);
        }
    }

    /// Applies a DomainMapping; the kind `CoreService` is the Service of Kubernetes.
    pub(super) fn map_domain(&mut self, domain: &str, kind: &str, target: &str) {
        let api_version = if kind == "Service" { "serving.knative.dev/v1" } else { "v1" };
        let kind = kind.trim_start_matches("Core");
        let spec = json!({"ref": {"apiVersion": api_version, "kind": kind, "name": target}});
        self.apply_as_user(ResourceKind::DomainMapping, domain, spec);
    }

    /// Passes the result of one read of a Secret to all replicas.
    pub(super) fn read_secret(&mut self, name: &NamespacedName, read: SecretRead) {
        self.step(ControllerEvent::SecretRead { name: name.clone(), read });
    }

    /// Passes the result of one read of a Secret with authorities to all replicas.
    pub(super) fn read_client_ca(&mut self, name: &NamespacedName, read: ClientCaRead) {
        self.step(ControllerEvent::ClientCaRead { name: name.clone(), read });
    }

    pub(super) fn set_config_map(&mut self, name: &str, data: Value) {
        let config_name = NamespacedName::new("knative-serving", name);
        let object = json!({"data": data});
        self.objects.insert((ResourceKind::ConfigMap, config_name.clone()), object.clone());
        self.step(ControllerEvent::ObjectObserved {
            resource: ResourceKind::ConfigMap,
            name: config_name,
            object: Some(Box::new(object)),
        });
    }

    /// Stores an object as a server-side apply does, and returns the observations that follow.
    pub(super) fn apply(
        &mut self,
        resource: ResourceKind,
        name: &NamespacedName,
        body: Value,
    ) -> Vec<ControllerEvent> {
        let at = (resource, name.clone());
        if resource == ResourceKind::Pod {
            return self.annotate(name, &body);
        }
        let mut object = body;
        let before = self.objects.get(&at).cloned();
        self.last_number += 1;
        let meta = |field: &str| before.as_ref().map(|it| it["metadata"][field].clone());
        object["metadata"]["uid"] = meta("uid")
            .unwrap_or_else(|| json!(format!("00000000-0000-4000-8000-{:012x}", self.last_number)));
        object["metadata"]["creationTimestamp"] =
            meta("creationTimestamp").unwrap_or_else(|| json!(self.api_server_time().rfc3339()));
        if let Some(status) = before.as_ref().and_then(|it| it.get("status")) {
            object["status"] = status.clone();
        }
        if resource == ResourceKind::Service && object["spec"].get("selector").is_none() {
            let given = before.as_ref().map(|it| it["spec"]["clusterIPs"].clone());
            let fresh = || {
                json!([
                    format!("10.96.0.{}", self.last_number % 250 + 1),
                    format!("fd00::{:x}", self.last_number)
                ])
            };
            object["spec"]["clusterIPs"] = given.filter(|it| it.is_array()).unwrap_or_else(fresh);
        }
        if let (ResourceKind::Deployment, Some(before)) = (resource, &before) {
            // The scale subresource owns the replicas, not the apply.
            object["spec"]["replicas"] = before["spec"]["replicas"].clone();
        }
        // A server-side apply leaves labels of other managers.
        let applied = object["metadata"]["labels"].clone();
        let last_applied = self.labels.insert(at.clone(), applied).unwrap_or_default();
        for (key, value) in meta("labels").iter().filter_map(Value::as_object).flatten() {
            if last_applied.get(key).is_none() && object["metadata"]["labels"].get(key).is_none() {
                object["metadata"]["labels"][key] = value.clone();
            }
        }
        if resource == ResourceKind::ConfigMap {
            object["metadata"]["resourceVersion"] = meta("resourceVersion").unwrap_or_default();
        }
        let generation = meta("generation").and_then(|it| it.as_i64()).unwrap_or(0);
        let same_spec = before.as_ref().is_some_and(|it| it["spec"] == object["spec"]);
        if resource != ResourceKind::ConfigMap {
            object["metadata"]["generation"] = json!(generation + i64::from(!same_spec));
        }
        if before.as_ref() == Some(&object) {
            return Vec::new();
        }
        if resource == ResourceKind::ConfigMap {
            object["metadata"]["resourceVersion"] = json!(self.last_number.to_string());
        }
        self.writes += 1;
        self.objects.insert(at, object.clone());
        let mut events = vec![ControllerEvent::ObjectObserved {
            resource,
            name: name.clone(),
            object: Some(Box::new(object)),
        }];
        if resource == ResourceKind::Deployment {
            events.extend(self.run_deployment_controller(name, &[]));
        }
        events
    }

    fn api_server_time(&self) -> UnixMillis {
        self.api_server_clock.unwrap_or(self.now)
    }

    /// Returns the machine of another replica that starts now and has observed all objects.
    pub(super) fn start_replica(&self) -> ControllerStateMachine {
        let mut other = machine().loading();
        for event in observations(&self.objects, &[]) {
            other.step(self.now, event);
        }
        if other.needs_workload_watch() {
            for event in observations_of_workloads(&self.objects) {
                other.step(self.now, event);
            }
            other.step(self.now, ControllerEvent::WorkloadsListed);
        }
        other.step(self.now, ControllerEvent::InitialListSynced);
        other
    }

    /// Replaces the annotations of a pod, all of which are the controller's. Its other fields have other managers, and
    /// so has the note of its original requests.
    fn annotate(&mut self, name: &NamespacedName, body: &Value) -> Vec<ControllerEvent> {
        let Some(object) = self.objects.get_mut(&(ResourceKind::Pod, name.clone())) else {
            return Vec::new();
        };
        let mut annotations = body["metadata"]["annotations"].clone();
        if let Some(note) = object["metadata"]["annotations"].get(key::ORIGINAL_REQUESTS) {
            annotations[key::ORIGINAL_REQUESTS] = note.clone();
        }
        if object["metadata"]["annotations"] == annotations {
            return Vec::new();
        }
        object["metadata"]["annotations"] = annotations;
        self.writes += 1;
        vec![ControllerEvent::ObjectObserved {
            resource: ResourceKind::Pod,
            name: name.clone(),
            object: Some(Box::new(object.clone())),
        }]
    }

    fn put_status(&mut self, key: &ObjectPartKey, status: Value) -> Vec<ControllerEvent> {
        let at = (key.resource, key.name.clone());
        let Some(object) = self.objects.get_mut(&at) else { return Vec::new() };
        if object["status"] == status {
            return Vec::new();
        }
        object["status"] = status;
        self.writes += 1;
        vec![ControllerEvent::ObjectObserved {
            resource: key.resource,
            name: key.name.clone(),
            object: Some(Box::new(object.clone())),
        }]
    }

    pub(super) fn scale(
        &mut self,
        name: &NamespacedName,
        replicas: i64,
        leaving_pods: &[NamespacedName],
    ) -> Vec<ControllerEvent> {
        let Some(object) = self.objects.get_mut(&(ResourceKind::Deployment, name.clone())) else {
            return Vec::new();
        };
        if object["spec"]["replicas"] == replicas {
            return Vec::new();
        }
        object["spec"]["replicas"] = json!(replicas);
        self.writes += 1;
        let object = object.clone();
        let mut events = vec![ControllerEvent::ObjectObserved {
            resource: ResourceKind::Deployment,
            name: name.clone(),
            object: Some(Box::new(object)),
        }];
        events.extend(self.run_deployment_controller(name, leaving_pods));
        events
    }

    /// Creates and deletes pods, as the controllers of Deployments and ReplicaSets do.
    fn run_deployment_controller(
        &mut self,
        deployment: &NamespacedName,
        leaving_pods: &[NamespacedName],
    ) -> Vec<ControllerEvent> {
        let object = self.objects[&(ResourceKind::Deployment, deployment.clone())].clone();
        let replicas =
            usize::try_from(object["spec"]["replicas"].as_i64().unwrap_or(1)).expect("a count");
        let mut present = self.pods_of_deployment(deployment);
        present.sort_by_key(|it| leaving_pods.contains(it));
        let mut events = Vec::new();
        for surplus in present.iter().skip(replicas) {
            events.extend(self.delete(ResourceKind::Pod, surplus));
        }
        for _ in present.len()..replicas {
            self.last_number += 1;
            let name = NamespacedName::new(
                &*deployment.namespace,
                format!("{}-{}", deployment.name, self.last_number),
            );
            let pod = json!({
                "metadata": {
                    "name": name.name.as_str(), "namespace": name.namespace.as_str(),
                    "uid": format!("00000000-0000-4000-9000-{:012x}", self.last_number),
                    "creationTimestamp": self.api_server_time().rfc3339(),
                    "labels": object["spec"]["template"]["metadata"]["labels"],
                },
                "spec": {"nodeName": "n1"},
                "status": {"phase": "Running", "podIP": format!("10.1.1.{}", self.last_number % 250)},
            });
            self.objects.insert((ResourceKind::Pod, name.clone()), pod.clone());
            events.push(ControllerEvent::ObjectObserved {
                resource: ResourceKind::Pod,
                name,
                object: Some(Box::new(pod)),
            });
        }
        events
    }

    /// Deletes an object and, as the garbage collector does, all objects that it owns.
    pub(super) fn delete(
        &mut self,
        resource: ResourceKind,
        name: &NamespacedName,
    ) -> Vec<ControllerEvent> {
        let Some(removed) = self.objects.remove(&(resource, name.clone())) else {
            return Vec::new();
        };
        self.writes += 1;
        let mut events =
            vec![ControllerEvent::ObjectObserved { resource, name: name.clone(), object: None }];
        let uid = removed["metadata"]["uid"].clone();
        let owned = |(_, it): &(&(ResourceKind, NamespacedName), &Value)| {
            uid.is_string() && it["metadata"]["ownerReferences"][0]["uid"] == uid
        };
        let children: Vec<_> =
            self.objects.iter().filter(owned).map(|(at, _)| at.clone()).collect();
        for (resource, name) in children {
            events.extend(self.delete(resource, &name));
        }
        if matches!(resource, ResourceKind::Deployment | ResourceKind::StatefulSet) {
            for pod in self.pods_of_deployment(name) {
                events.extend(self.delete(ResourceKind::Pod, &pod));
            }
        }
        events
    }

    /// Returns the pods of a Deployment or StatefulSet, which are named after it.
    fn pods_of_deployment(&self, deployment: &NamespacedName) -> Vec<NamespacedName> {
        let prefix = format!("{}-", deployment.name);
        let mut pods = self.names(ResourceKind::Pod);
        pods.retain(|it| it.namespace == deployment.namespace && it.name.starts_with(&prefix));
        pods
    }

    pub(super) fn names(&self, resource: ResourceKind) -> Vec<NamespacedName> {
        self.objects
            .keys()
            .filter(|(have, _)| *have == resource)
            .map(|(_, it)| it.clone())
            .collect()
    }

    /// Applies an object as `kubectl apply` of a user does.
    pub(super) fn apply_as_user(&mut self, resource: ResourceKind, object_name: &str, spec: Value) {
        let body = json!({
            "apiVersion": resource.api_version(), "kind": resource.kind(),
            "metadata": {"name": object_name, "namespace": NAMESPACE}, "spec": spec,
        });
        for event in self.apply(resource, &name(object_name), body) {
            self.step(event);
        }
    }

    pub(super) fn delete_as_user(&mut self, resource: ResourceKind, object_name: &str) {
        for event in self.delete(resource, &name(object_name)) {
            self.step(event);
        }
    }

    /// Applies a Knative Service as its user. With `null` as `traffic`, all requests go to the latest Revision.
    pub(super) fn apply_service(
        &mut self,
        name: &str,
        image: &str,
        initial_scale: u32,
        traffic: Value,
    ) {
        let mut spec = json!({"template": template(image, initial_scale)});
        if traffic.is_array() {
            spec["traffic"] = traffic;
        }
        self.apply_as_user(ResourceKind::KnativeService, name, spec);
    }

    /// Reports every pod as ready, as its agent does.
    pub(super) fn report_all_ready(&mut self) {
        self.report_all(false);
    }

    /// Reports every pod as ready and drained.
    pub(super) fn report_all_drained(&mut self) {
        self.report_all(true);
    }

    fn report_all(&mut self, drained: bool) {
        for (resource, it) in self.objects.keys().cloned().collect::<Vec<_>>() {
            if resource != ResourceKind::Pod || it.namespace != NAMESPACE {
                continue;
            }
            let pod = &self.objects[&(resource, it)];
            let observation = PodObservation {
                uid: pod["metadata"]["uid"].as_str().expect("a uid").into(),
                address: format!("{}:8080", pod["status"]["podIP"].as_str().expect("an address"))
                    .parse()
                    .ok(),
                listening: true,
                ready: true,
                drained,
                in_flight: 0,
                listening_since_ns: 1,
                not_ready_reason: String::new(),
                ..ready_observation()
            };
            let agent = ComponentReplica {
                role: ClientComponent::Agent,
                name: "n1".into(),
                node: "n1".into(),
            };
            self.step(ControllerEvent::PodReported { reporter: agent, stream: 1, observation });
        }
    }

    pub(super) fn decide(&mut self, revision: &str, requested_scale: u32) {
        self.step(ControllerEvent::DecisionReceived(decision(revision, requested_scale)));
    }

    pub(super) fn object(&self, resource: ResourceKind, object_name: &str) -> &Value {
        &self.objects[&(resource, name(object_name))]
    }

    /// Returns a condition as `status reason: message`.
    pub(super) fn condition(
        &self,
        resource: ResourceKind,
        name: &str,
        condition_type: &str,
    ) -> String {
        let all = self.object(resource, name)["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let it = all.into_iter().find(|it| it["type"] == condition_type).unwrap_or_default();
        let word = |field: &str| it[field].as_str().unwrap_or_default().to_owned();
        format!("{} {}: {}", word("status"), word("reason"), word("message"))
    }

    pub(super) fn table(&self) -> RouteTable {
        table(&self.machine)
    }
}

pub(super) fn decision(revision: &str, requested_scale: u32) -> ScaleDecision {
    ScaleDecision {
        revision: name(revision),
        requested_scale: Some(requested_scale),
        connection_path: ConnectionPath::Direct,
        activator_count: 2,
        activity: if requested_scale == 0 {
            RevisionActivity::Inactive
        } else {
            RevisionActivity::Active
        },
        stable_load: 0.0,
        panic_load: 0.0,
        target_load: 70.0,
        ready_pods: 0,
        is_panicking: false,
        excess_burst_capacity: 0.0,
        reason: String::new(),
        inputs: None,
        wake_origin: None,
    }
}

pub(super) fn ready_observation() -> PodObservation {
    crate::decide::machine::tests::pod_seen("")
}

pub(super) fn table(machine: &ControllerStateMachine) -> RouteTable {
    crate::decide::machine::tests::route_table(machine).unwrap_or_default()
}

/// Returns the hosts that more than one service has. Those with path rules are followed by their prefixes.
fn hosts_with_two_services(table: &RouteTable) -> Vec<String> {
    let host = |it: &common::wire::MappedDomain| match &it.path_rule {
        Some(rule) => format!("{}{}", it.host, rule.prefix),
        None => it.host.clone(),
    };
    let of = |it: &common::wire::ServiceEntry| {
        let domains = it.gateway_rules.iter().flat_map(|it| &it.mapped_domains).map(host);
        it.hosts.iter().cloned().chain(domains).collect::<Vec<_>>()
    };
    let mut seen = BTreeSet::new();
    let all = table.services.values().flat_map(of);
    all.filter(|it| !seen.insert(it.clone())).collect()
}

/// Returns the services, Revisions, pods and certificates in which two tables differ.
pub(super) fn differences(one: &RouteTable, other: &RouteTable) -> Vec<String> {
    let lines = |table: &RouteTable| -> BTreeSet<String> {
        let services = table.services.values().map(|it| format!("{it:?}"));
        let revisions = table.revisions.values().map(|it| format!("{it:?}"));
        let pods = table.pods.values().map(|it| format!("{it:?}"));
        let certificates = table.certificates.values().map(|it| format!("{it:?}"));
        let client_cas = table.client_cas.values().map(|it| format!("{it:?}"));
        services.chain(revisions).chain(pods).chain(certificates).chain(client_cas).collect()
    };
    lines(one).symmetric_difference(&lines(other)).cloned().collect()
}

/// Returns the template of a Revision, as admission stores it.
pub(super) fn template(image: &str, initial_scale: u32) -> Value {
    let initial_scale = initial_scale.to_string();
    json!({
        "metadata": {"annotations": {"autoscaling.knative.dev/initial-scale": initial_scale}},
        "spec": {
            "containers": [{"name": "user-container", "image": image, "readinessProbe": {"tcpSocket": {"port": 0}, "successThreshold": 1, "periodSeconds": 0}}],
            "containerConcurrency": 0, "timeoutSeconds": 300, "enableServiceLinks": false,
        },
    })
}

pub(super) fn requested_replicas(api_server: &FakeApiServer) -> &Value {
    &api_server.object(ResourceKind::Deployment, "hello-00001-deployment")["spec"]["replicas"]
}

/// Returns an observation of each object, in the given order, with the rest after it.
pub(super) fn observations(
    objects: &BTreeMap<(ResourceKind, NamespacedName), Value>,
    order: &[usize],
) -> Vec<ControllerEvent> {
    let all: Vec<_> = objects.iter().collect();
    let mut order: Vec<usize> = order.iter().map(|it| it % all.len()).collect();
    order.extend(0..all.len());
    let mut seen = BTreeSet::new();
    order.retain(|it| seen.insert(*it));
    order
        .into_iter()
        .map(|at| {
            let ((resource, name), object) = all[at];
            ControllerEvent::ObjectObserved {
                resource: *resource,
                name: name.clone(),
                object: Some(Box::new(object.clone())),
            }
        })
        .collect()
}

/// Returns an observation of each object of the kinds that users' workloads consist of.
pub(super) fn observations_of_workloads(
    objects: &BTreeMap<(ResourceKind, NamespacedName), Value>,
) -> Vec<ControllerEvent> {
    let kinds = [
        ResourceKind::Deployment,
        ResourceKind::StatefulSet,
        ResourceKind::HorizontalPodAutoscaler,
        ResourceKind::Pod,
    ];
    let mut all = observations(objects, &[]);
    all.retain(|it| {
        matches!(it, ControllerEvent::ObjectObserved { resource, .. } if kinds.contains(resource))
    });
    all
}

/// Returns an observation of each object: of the Deployments first, although they belong to Revisions.
pub(super) fn observations_of_deployments_first(
    objects: &BTreeMap<(ResourceKind, NamespacedName), Value>,
) -> Vec<ControllerEvent> {
    let is_deployment = |it: &ControllerEvent| {
        matches!(it, ControllerEvent::ObjectObserved { resource: ResourceKind::Deployment, .. })
    };
    let mut all = observations(objects, &[]);
    all.sort_by_key(|it| !is_deployment(it));
    all
}

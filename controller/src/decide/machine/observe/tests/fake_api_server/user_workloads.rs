//! Model of Deployments and StatefulSets of users, of their controllers, and of the writes to them.

use common::wire::NamespacedName;
use serde_json::{Value, json};

use super::{FakeApiServer, NAMESPACE, name};
use crate::{
    decide::machine::ControllerEvent,
    model::{
        knative::key,
        object::{ObjectPartKey, ResourceKind, WorkloadVersion, hash::stable_json_hash},
    },
};

impl FakeApiServer {
    /// Creates or changes a Deployment or StatefulSet as its user does. Fields that `spec` leaves out stay.
    pub(in crate::decide::machine::observe::tests) fn apply_workload(
        &mut self,
        resource: ResourceKind,
        workload: &str,
        spec: &Value,
    ) {
        let at = (resource, name(workload));
        let mut object = self.objects.get(&at).cloned().unwrap_or_else(|| {
            self.last_number += 1;
            json!({"metadata": {
                "name": workload, "namespace": NAMESPACE,
                "uid": format!("00000000-0000-4000-a000-{:012x}", self.last_number),
            }})
        });
        for (field, value) in spec.as_object().into_iter().flatten() {
            object["spec"][field] = value.clone();
        }
        let events = self.store_workload(resource, object, &[]);
        self.step_all(events);
    }

    /// Sets the number of pods as `kubectl scale` does.
    pub(in crate::decide::machine::observe::tests) fn scale_as_user(
        &mut self,
        resource: ResourceKind,
        workload: &str,
        replicas: u32,
    ) {
        self.apply_workload(resource, workload, &json!({"replicas": replicas}));
    }

    /// Changes an object in place, as any client may.
    pub(in crate::decide::machine::observe::tests) fn change_object(
        &mut self,
        resource: ResourceKind,
        object_name: &str,
        change: impl FnOnce(&mut Value),
    ) {
        let at = (resource, name(object_name));
        let object = self.objects.get_mut(&at).expect("such an object");
        change(object);
        let object = Some(Box::new(object.clone()));
        self.step(ControllerEvent::ObjectObserved { resource, name: at.1, object });
    }

    /// Lets the kubelet report each pod as ready.
    pub(in crate::decide::machine::observe::tests) fn make_pods_ready(&mut self) {
        for pod in self.user_pods() {
            self.change_object(ResourceKind::Pod, &pod, |it| {
                it["status"]["conditions"] = json!([{"type": "Ready", "status": "True"}]);
            });
        }
    }

    /// Returns the names of the pods in the namespace of the tests.
    pub(in crate::decide::machine::observe::tests) fn user_pods(&self) -> Vec<String> {
        let mut pods = self.names(ResourceKind::Pod);
        pods.retain(|it| it.namespace == NAMESPACE);
        pods.into_iter().map(|it| it.name.to_string()).collect()
    }

    /// Writes the number of pods and its record, unless the workload has changed since the decision.
    pub(super) fn write_replicas(
        &mut self,
        key: &ObjectPartKey,
        body: &Value,
        leaving_pods: &[NamespacedName],
    ) -> Vec<ControllerEvent> {
        let text = |field: &str| body["metadata"][field].as_str().unwrap_or_default().into();
        let version =
            WorkloadVersion { uid: text("uid"), resource_version: text("resourceVersion") };
        let Some(mut object) = self.object_of_version(key, &version) else { return Vec::new() };
        object["spec"]["replicas"] = body["spec"]["replicas"].clone();
        let record = body["metadata"]["annotations"].as_object().expect("a record");
        for (annotation, value) in record {
            object["metadata"]["annotations"][annotation] = value.clone();
        }
        self.writes += 1;
        self.replicas_writes.push(object["spec"]["replicas"].as_u64().expect("a number"));
        self.store_workload(key.resource, object, leaving_pods)
    }

    /// Gives a workload back, unless it has changed since the decision.
    pub(super) fn give_back(
        &mut self,
        key: &ObjectPartKey,
        version: &WorkloadVersion,
        body: Option<&Value>,
    ) -> Vec<ControllerEvent> {
        let Some(mut object) = self.object_of_version(key, version) else { return Vec::new() };
        if let Some(body) = body {
            object["spec"]["replicas"] = body["spec"]["replicas"].clone();
        }
        let annotations = object["metadata"]["annotations"].as_object_mut().expect("a record");
        annotations.remove(key::SCALED_TO);
        annotations.remove(key::USER_REPLICAS);
        self.writes += 1;
        self.store_workload(key.resource, object, &[])
    }

    /// Returns a workload if it still has this version; otherwise the API server refuses the write.
    fn object_of_version(
        &mut self,
        key: &ObjectPartKey,
        version: &WorkloadVersion,
    ) -> Option<Value> {
        let object = self.objects.get(&(key.resource, key.name.clone())).cloned();
        let metadata = object.as_ref().map(|it| it["metadata"].clone()).unwrap_or_default();
        let is_expected = metadata["uid"] == *version.uid
            && metadata["resourceVersion"] == *version.resource_version;
        if !is_expected {
            self.conflicts += 1;
        }
        object.filter(|_| is_expected)
    }

    /// Stores a workload as a new version, and lets its controller act.
    fn store_workload(
        &mut self,
        resource: ResourceKind,
        mut object: Value,
        leaving_pods: &[NamespacedName],
    ) -> Vec<ControllerEvent> {
        self.last_number += 1;
        object["metadata"]["resourceVersion"] = json!(self.last_number.to_string());
        let workload = name(object["metadata"]["name"].as_str().expect("a name"));
        self.objects.insert((resource, workload.clone()), object.clone());
        let mut events = vec![ControllerEvent::ObjectObserved {
            resource,
            name: workload.clone(),
            object: Some(Box::new(object.clone())),
        }];
        let replicas = object["spec"]["replicas"].as_u64().unwrap_or(1);
        let hash = format!("{:x}", stable_json_hash(&object["spec"]["template"]) % 0x1_0000);
        let mut present = self.pods_of_deployment(&workload);
        // The order in which they stay. A StatefulSet keeps its first pods, and a Deployment those without a mark.
        match resource {
            ResourceKind::Deployment => present.sort_by_key(|it| leaving_pods.contains(it)),
            _ => present.sort_by_key(|it| it.name.clone()),
        }
        let is_old = |server: &Self, pod: &NamespacedName| {
            let labels = &server.objects[&(ResourceKind::Pod, pod.clone())]["metadata"]["labels"];
            labels["pod-template-hash"] != hash.as_str()
        };
        let (old, mut kept): (Vec<_>, Vec<_>) =
            present.into_iter().partition(|it| is_old(self, it));
        let count = usize::try_from(replicas).expect("a small number");
        let surplus = kept.split_off(count.min(kept.len()));
        for pod in old.iter().chain(&surplus) {
            events.extend(self.delete(ResourceKind::Pod, pod));
        }
        for pod in self.missing_pods(resource, &workload, &hash, &kept, count) {
            events.push(self.create_pod(resource, &object, &pod, &hash));
        }
        events
    }

    /// Returns the names of the pods that a workload lacks.
    fn missing_pods(
        &mut self,
        resource: ResourceKind,
        workload: &NamespacedName,
        hash: &str,
        present: &[NamespacedName],
        count: usize,
    ) -> Vec<NamespacedName> {
        if resource == ResourceKind::StatefulSet {
            let all = (0..count).map(|ordinal| name(&format!("{}-{ordinal}", workload.name)));
            return all.filter(|it| !present.contains(it)).collect();
        }
        let missing = count - present.len();
        let first = self.last_number + 1;
        self.last_number += u64::try_from(missing).expect("a small number");
        let numbers = first..=self.last_number;
        numbers.map(|number| name(&format!("{}-{hash}-{number}", workload.name))).collect()
    }

    fn create_pod(
        &mut self,
        resource: ResourceKind,
        workload: &Value,
        pod: &NamespacedName,
        hash: &str,
    ) -> ControllerEvent {
        self.last_number += 1;
        let number = self.last_number;
        let template = &workload["spec"]["template"];
        let metadata = &workload["metadata"];
        let owner = match resource {
            ResourceKind::StatefulSet => {
                json!({"kind": "StatefulSet", "name": metadata["name"], "uid": metadata["uid"]})
            }
            _ => {
                let set = format!("{}-{hash}", metadata["name"].as_str().expect("a name"));
                json!({"kind": "ReplicaSet", "name": set, "uid": hash})
            }
        };
        let mut object = json!({
            "metadata": {
                "name": pod.name.as_str(), "namespace": NAMESPACE,
                "uid": format!("00000000-0000-4000-9000-{number:012x}"),
                "creationTimestamp": self.api_server_time().rfc3339(),
                "labels": template["metadata"]["labels"],
                "ownerReferences": [owner],
            },
            "spec": template["spec"],
            "status": {"phase": "Running", "podIP": format!("10.1.2.{}", number % 250)},
        });
        object["metadata"]["ownerReferences"][0]["controller"] = json!(true);
        object["metadata"]["labels"]["pod-template-hash"] = json!(hash);
        object["spec"]["nodeName"] = json!("n1");
        self.objects.insert((ResourceKind::Pod, pod.clone()), object.clone());
        ControllerEvent::ObjectObserved {
            resource: ResourceKind::Pod,
            name: pod.clone(),
            object: Some(Box::new(object)),
        }
    }
}

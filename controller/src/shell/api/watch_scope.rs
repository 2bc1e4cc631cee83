//! Pure: scopes of the watches, and the fields that are kept of each kind.

use common::wire::NamespacedName;
use serde_json::{Map, Value};

use crate::model::{knative::key, object::ResourceKind};

/// Scope of one watch: a kind, and a selection of its objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WatchScope {
    /// Kind of the watched objects.
    pub resource: ResourceKind,
    /// Namespace to watch; `None`: all namespaces.
    pub namespace: Option<String>,
    /// Namespace that another watch of the same kind [covers](Self::covers). The lists of this watch may name its
    /// objects too.
    pub excluded_namespace: Option<String>,
    /// Label selector, if the watch has one.
    pub label_selector: Option<&'static str>,
    /// True if only the metadata is kept, without spec and status.
    pub metadata_only: bool,
}

impl WatchScope {
    fn all_of(resource: ResourceKind) -> Self {
        Self {
            resource,
            namespace: None,
            excluded_namespace: None,
            label_selector: None,
            metadata_only: false,
        }
    }

    /// Returns a text that distinguishes this watch from all others.
    pub fn label(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("{} of {namespace}", self.resource),
            None => self.resource.to_string(),
        }
    }

    /// Returns true if the scope contains this name. Its absence from the watch's list then means that it was deleted.
    pub fn covers(&self, name: &NamespacedName) -> bool {
        self.namespace.as_ref().is_none_or(|it| *it == name.namespace)
            && self.excluded_namespace.as_ref().is_none_or(|it| *it != name.namespace)
    }
}

/// Returns the scopes of all watches except that of pods that NetworkPolicies may admit, which begins with the first
/// policy that selects pods.
///
/// All Kubernetes Services are watched, so that a conflicting one is known before a write. Pods have two watches:
/// Revision pods in every namespace, and all pods of the system namespace, where Rouse's own components run.
pub fn watch_scopes(system_namespace: &str) -> Vec<WatchScope> {
    let all = WatchScope::all_of;
    let labelled = |resource, labels| WatchScope { label_selector: Some(labels), ..all(resource) };
    let metadata = |resource| WatchScope { metadata_only: true, ..all(resource) };
    let system =
        |resource| WatchScope { namespace: Some(system_namespace.into()), ..all(resource) };
    let except = Some(system_namespace.to_owned());
    vec![
        all(ResourceKind::KnativeService),
        all(ResourceKind::Configuration),
        all(ResourceKind::Revision),
        all(ResourceKind::Route),
        all(ResourceKind::DomainMapping),
        all(ResourceKind::PodAutoscaler),
        all(ResourceKind::ServerlessService),
        all(ResourceKind::Service),
        all(ResourceKind::Node),
        // The metadata of these kinds holds everything that is compared: the applied hash and the generation.
        metadata(ResourceKind::Metric),
        metadata(ResourceKind::Image),
        all(ResourceKind::ClusterDomainClaim),
        metadata(ResourceKind::Namespace),
        all(ResourceKind::NetworkPolicy),
        // Users may have many Deployments and pods of their own, which the label excludes.
        labelled(ResourceKind::Deployment, key::REVISION_UID),
        labelled(ResourceKind::HorizontalPodAutoscaler, key::REVISION_UID),
        labelled(ResourceKind::EndpointSlice, "endpointslice.kubernetes.io/managed-by=rouse.dev"),
        WatchScope { excluded_namespace: except, ..labelled(ResourceKind::Pod, key::REVISION_UID) },
        system(ResourceKind::Pod),
        system(ResourceKind::ConfigMap),
    ]
}

/// Order of the first lists: kinds that others depend on come first.
const LIST_ORDER: [ResourceKind; 14] = [
    ResourceKind::ConfigMap,
    ResourceKind::Namespace,
    ResourceKind::NetworkPolicy,
    ResourceKind::Node,
    ResourceKind::Service,
    ResourceKind::Configuration,
    ResourceKind::Revision,
    ResourceKind::Deployment,
    // An activator must not be known before its slice, which states whether connections are routed to it.
    ResourceKind::EndpointSlice,
    ResourceKind::Pod,
    ResourceKind::Route,
    ResourceKind::KnativeService,
    ResourceKind::DomainMapping,
    ResourceKind::ClusterDomainClaim,
];

/// Returns the place of a kind in the order of the first lists. `None` for kinds that only the writer reads, and for
/// PodAutoscaler: the state machine reads only those of the class HPA.
pub fn list_position(resource: ResourceKind) -> Option<usize> {
    LIST_ORDER.iter().position(|it| *it == resource)
}

/// Removes the fields that the controller does not read.
pub fn trim_object(scope: &WatchScope, object: &mut Value) {
    if let (true, Some(all)) = (scope.metadata_only, object.as_object_mut()) {
        all.retain(|field, _| field == "metadata");
    }
    // `managedFields` and the last applied configuration repeat most of the object.
    if let Some(meta) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        meta.remove("managedFields");
        meta.remove("selfLink");
        if let Some(Value::Object(all)) = meta.get_mut("annotations") {
            all.remove("kubectl.kubernetes.io/last-applied-configuration");
        }
    }
    prune_fields(scope.resource, object);
}

/// Removes from the [trimmed_parts] of an object all fields that are not kept.
pub fn prune_fields(resource: ResourceKind, object: &mut Value) {
    for (part, fields) in trimmed_parts(resource) {
        retain_fields(object, part, fields);
    }
}

/// Parts of an object, each with the fields of it that are kept.
pub type TrimmedParts = &'static [(&'static str, &'static [&'static str])];

/// Returns the parts of a kind of which only some fields are kept, since the controller reads no others.
pub const fn trimmed_parts(resource: ResourceKind) -> TrimmedParts {
    match resource {
        ResourceKind::Pod => &[
            (
                "spec",
                &["nodeName", "terminationGracePeriodSeconds", "hostNetwork", "readinessGates"],
            ),
            (
                "status",
                &[
                    "phase",
                    "podIP",
                    "podIPs",
                    "conditions",
                    "containerStatuses",
                    "initContainerStatuses",
                    "reason",
                    "message",
                ],
            ),
        ],
        ResourceKind::Deployment => &[("spec", &["replicas", "progressDeadlineSeconds"])],
        ResourceKind::Node => &[
            ("spec", &["podCIDRs", "unschedulable", "taints"]),
            ("status", &["conditions", "addresses", "images", "allocatable"]),
        ],
        // A Service has no generation. So a change by another client shows only in fields that are kept, and each field
        // that the controller sets is one of them.
        ResourceKind::Service => &[
            (
                "spec",
                &[
                    "clusterIP",
                    "clusterIPs",
                    "internalTrafficPolicy",
                    "ipFamilyPolicy",
                    "ports",
                    "selector",
                    "sessionAffinity",
                    "type",
                ],
            ),
            ("status", &[]),
        ],
        ResourceKind::NetworkPolicy => &[("spec", &["podSelector", "policyTypes", "ingress"])],
        ResourceKind::KnativeService
        | ResourceKind::Configuration
        | ResourceKind::Revision
        | ResourceKind::Route
        | ResourceKind::DomainMapping
        | ResourceKind::EndpointSlice
        | ResourceKind::StatefulSet
        | ResourceKind::ConfigMap
        | ResourceKind::ClusterDomainClaim
        | ResourceKind::Namespace => &[],
        // Of these kinds only metadata and status are read: the applied hash suffices to find a difference.
        ResourceKind::PodAutoscaler
        | ResourceKind::ServerlessService
        | ResourceKind::HorizontalPodAutoscaler
        | ResourceKind::Metric
        | ResourceKind::Image => &[("spec", &[])],
    }
}

fn retain_fields(object: &mut Value, part: &str, fields: &[&str]) {
    let Some(Value::Object(all)) = object.get_mut(part) else { return };
    let kept: Map<String, Value> =
        fields.iter().filter_map(|name| all.remove_entry(*name)).collect();
    *all = kept;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        shell::api::object_cache::ObservedObject,
        write::children::services::{PlaceholderSpec, placeholder_service},
    };
    use serde_json::json;
    use std::collections::{BTreeMap, BTreeSet};

    #[test]
    fn every_kind_is_watched() {
        let scopes = watch_scopes("knative-serving");
        let watched: BTreeSet<ResourceKind> = scopes.iter().map(|it| it.resource).collect();
        assert_eq!(watched, ResourceKind::ALL.into());
    }

    #[test]
    fn a_pod_keeps_only_its_node_readiness_gates_and_status() {
        let mut pod = json!({
            "metadata": {
                "name": "a", "managedFields": [1],
                "annotations": {"a": "b", "kubectl.kubernetes.io/last-applied-configuration": "{}"},
            },
            "spec": {"nodeName": "n", "containers": [1], "volumes": [2], "readinessGates": [3]},
            "status": {"phase": "Running", "qosClass": "Burstable"},
        });
        trim_object(&WatchScope::all_of(ResourceKind::Pod), &mut pod);
        let expected = json!({
            "metadata": {"name": "a", "annotations": {"a": "b"}},
            "spec": {"nodeName": "n", "readinessGates": [3]},
            "status": {"phase": "Running"},
        });
        assert_eq!(pod, expected);
    }

    #[test]
    fn a_service_keeps_each_field_that_the_controller_sets() {
        let placeholder = PlaceholderSpec {
            namespace: "default",
            route: "hello",
            route_uid: "t-uid",
            tag: None,
            service: "hello",
            route_labels: BTreeMap::new(),
            route_annotations: BTreeMap::new(),
            activator_port: Some(20_007),
            serves_tcp: true,
        };
        let made = placeholder_service(&placeholder).body;
        let mut kept = made.clone();
        prune_fields(ResourceKind::Service, &mut kept);
        assert_eq!(kept["spec"], made["spec"]);
    }

    #[test]
    fn a_service_whose_affinity_another_client_has_set_is_seen_to_differ() {
        let observed = |affinity: &str| {
            let mut service = json!({
                "metadata": {"name": "a", "ownerReferences": [{"uid": "t-uid", "controller": true}]},
                "spec": {"type": "ClusterIP", "sessionAffinity": affinity},
            });
            trim_object(&WatchScope::all_of(ResourceKind::Service), &mut service);
            ObservedObject::from_object(&service)
        };
        assert_eq!(observed("None"), observed("None"));
        assert_ne!(observed("None"), observed("ClientIP"));
    }

    #[test]
    fn a_node_keeps_what_its_state_depends_on() {
        let kept = json!({
            "metadata": {"name": "n1", "labels": {"topology.kubernetes.io/zone": "a"}},
            "spec": {"unschedulable": true, "taints": [1], "podCIDRs": [2]},
            "status": {
                "conditions": [1], "addresses": [2], "images": [3], "allocatable": {"cpu": "4"},
            },
        });
        let mut node = kept.clone();
        node["status"]["capacity"] = json!({"cpu": "4"});
        node["spec"]["providerID"] = json!("x");
        trim_object(&WatchScope::all_of(ResourceKind::Node), &mut node);
        assert_eq!(node, kept);
    }

    #[test]
    fn each_pod_is_covered_by_one_watch() {
        let scopes = watch_scopes("knative-serving");
        let covering = |namespace: &str| {
            let name = NamespacedName::new(namespace, "a");
            let pods = scopes.iter().filter(|it| it.resource == ResourceKind::Pod);
            pods.filter(|it| it.covers(&name)).map(|it| it.label_selector).collect::<Vec<_>>()
        };
        assert_eq!(covering("knative-serving"), [None]);
        assert_eq!(covering("default"), [Some(key::REVISION_UID)]);
    }
}

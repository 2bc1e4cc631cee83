//! Pure: scopes of the watches, and the fields that are kept of each kind.

use common::wire::NamespacedName;
use serde_json::{Map, Value};

use crate::model::{
    knative::key,
    object::{ResourceKind, json},
};

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
    /// Presence of the label [`key::REVISION_UID`] on the selected objects; `None`: it does not matter.
    pub has_revision_label: Option<bool>,
    /// True if only the metadata is kept, without spec and status.
    pub metadata_only: bool,
}

/// Label selector of objects that users made, of kinds that Rouse also makes for Revisions.
const WITHOUT_REVISION: &str = "!serving.knative.dev/revisionUID";

impl WatchScope {
    fn all_of(resource: ResourceKind) -> Self {
        Self {
            resource,
            namespace: None,
            excluded_namespace: None,
            label_selector: None,
            has_revision_label: None,
            metadata_only: false,
        }
    }

    fn of_revisions(resource: ResourceKind) -> Self {
        let (label_selector, has_revision_label) = (Some(key::REVISION_UID), Some(true));
        Self { label_selector, has_revision_label, ..Self::all_of(resource) }
    }

    fn of_users(resource: ResourceKind) -> Self {
        let (label_selector, has_revision_label) = (Some(WITHOUT_REVISION), Some(false));
        Self { label_selector, has_revision_label, ..Self::all_of(resource) }
    }

    /// Returns a text that distinguishes this watch from all others.
    pub fn label(&self) -> String {
        match (&self.namespace, self.has_revision_label) {
            (Some(namespace), _) => format!("{} of {namespace}", self.resource),
            (None, Some(false)) => format!("{} of users", self.resource),
            (None, Some(true) | None) => self.resource.to_string(),
        }
    }

    /// Returns true if the scope contains an object of this name, which has the label of a Revision or not. Its absence
    /// from the watch's list then means that it was deleted.
    pub fn covers(&self, name: &NamespacedName, has_revision_label: bool) -> bool {
        self.namespace.as_ref().is_none_or(|it| *it == name.namespace)
            && self.excluded_namespace.as_ref().is_none_or(|it| *it != name.namespace)
            && self.has_revision_label.is_none_or(|it| it == has_revision_label)
    }
}

/// Returns true if an object has the label of a Revision, for which it was made.
pub fn has_revision_label(object: &Value) -> bool {
    json::label(object, key::REVISION_UID).is_some()
}

/// Returns the scopes of the watches that begin at the start. Later begin [`workload_scopes`], [`request_scopes`],
/// [`cert_manager_scopes`], [`gateway_scopes`], [`grpc_route_scopes`] and [`ingress_scopes`]. So does the watch of the
/// pods that NetworkPolicies may admit, with the first policy that selects pods.
///
/// All Kubernetes Services are watched, so that a conflicting one is known before a write. Pods have two watches:
/// Revision pods in every namespace, and all pods of the system namespace, where Rouse's own components run.
pub fn watch_scopes(system_namespace: &str) -> Vec<WatchScope> {
    let all = WatchScope::all_of;
    let labelled = |resource, labels| WatchScope { label_selector: Some(labels), ..all(resource) };
    let of_revisions = WatchScope::of_revisions;
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
        of_revisions(ResourceKind::Deployment),
        of_revisions(ResourceKind::HorizontalPodAutoscaler),
        labelled(ResourceKind::EndpointSlice, "endpointslice.kubernetes.io/managed-by=rouse.dev"),
        WatchScope { excluded_namespace: except, ..of_revisions(ResourceKind::Pod) },
        system(ResourceKind::Pod),
        system(ResourceKind::ConfigMap),
    ]
}

/// Returns the scopes of the watches that begin with the first scaled Service: workloads of users, with their
/// HorizontalPodAutoscalers and pods. The pods of the system namespace have a watch already.
pub fn workload_scopes(system_namespace: &str) -> Vec<WatchScope> {
    let except = Some(system_namespace.to_owned());
    vec![
        WatchScope::of_users(ResourceKind::HorizontalPodAutoscaler),
        WatchScope::of_users(ResourceKind::Deployment),
        WatchScope::of_users(ResourceKind::StatefulSet),
        WatchScope { excluded_namespace: except, ..WatchScope::of_users(ResourceKind::Pod) },
    ]
}

/// Returns the scopes of the watch that begins once certificates are requested.
pub fn request_scopes() -> Vec<WatchScope> {
    vec![WatchScope::all_of(ResourceKind::RequestedCertificate)]
}

/// Returns the scopes of the watches that begin once the API server has the kinds of cert-manager, too.
pub fn cert_manager_scopes() -> Vec<WatchScope> {
    [ResourceKind::IssuedCertificate, ResourceKind::AcmeChallenge].map(WatchScope::all_of).into()
}

/// Kinds of the Gateway API that are followed together.
pub const GATEWAY_KINDS: [ResourceKind; 4] = [
    ResourceKind::ReferenceGrant,
    ResourceKind::GatewayClass,
    ResourceKind::Gateway,
    ResourceKind::HttpRoute,
];

/// Returns the scopes of the watches that begin once the API server has the kinds of the Gateway API.
pub fn gateway_scopes() -> Vec<WatchScope> {
    GATEWAY_KINDS.map(WatchScope::all_of).into()
}

/// Returns the scope of the watch that begins once the API server has GRPCRoutes, too.
pub fn grpc_route_scopes() -> Vec<WatchScope> {
    vec![WatchScope::all_of(ResourceKind::GrpcRoute)]
}

/// Returns the scope of the watch that begins once the API server has the kind Ingress of Knative.
pub fn ingress_scopes() -> Vec<WatchScope> {
    vec![WatchScope::all_of(ResourceKind::Ingress)]
}

/// Order of the first lists: kinds that others depend on come first.
const LIST_ORDER: [ResourceKind; 24] = [
    ResourceKind::ConfigMap,
    ResourceKind::Namespace,
    ResourceKind::NetworkPolicy,
    ResourceKind::Node,
    ResourceKind::Service,
    ResourceKind::Configuration,
    ResourceKind::Revision,
    ResourceKind::Deployment,
    ResourceKind::StatefulSet,
    // An activator must not be known before its slice, which states whether connections are routed to it.
    ResourceKind::EndpointSlice,
    ResourceKind::Pod,
    ResourceKind::Route,
    ResourceKind::KnativeService,
    ResourceKind::DomainMapping,
    ResourceKind::ClusterDomainClaim,
    ResourceKind::RequestedCertificate,
    ResourceKind::IssuedCertificate,
    ResourceKind::AcmeChallenge,
    ResourceKind::ReferenceGrant,
    ResourceKind::GatewayClass,
    ResourceKind::Gateway,
    ResourceKind::HttpRoute,
    ResourceKind::GrpcRoute,
    ResourceKind::Ingress,
];

/// Returns the place of a kind in the order of the first lists. `None` for kinds that only the writer reads, and for
/// two kinds of which the state machine reads a part: PodAutoscalers of the class HPA or of scaled Services, and
/// HorizontalPodAutoscalers of users.
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

/// Removes from the [trimmed_parts] or [user_parts] of an object all fields that are not kept.
pub fn prune_fields(resource: ResourceKind, object: &mut Value) {
    let is_of_revision = has_revision_label(object);
    let parts = if is_of_revision { trimmed_parts(resource) } else { user_parts(resource) };
    for (part, fields) in parts {
        object.get_mut(*part).into_iter().for_each(|it| retain_fields(it, fields));
    }
    match resource {
        // A user's template may be large, and only labels and containers of it are read.
        ResourceKind::Deployment | ResourceKind::StatefulSet if !is_of_revision => {
            object.pointer_mut("/spec/template").into_iter().for_each(prune_pod_template);
        }
        ResourceKind::Pod if !is_of_revision => {
            object.get_mut("spec").into_iter().for_each(prune_containers);
        }
        _ => {}
    }
}

/// Fields of a container of a user's pod that the state machine reads.
const CONTAINER_FIELDS: [&str; 6] =
    ["name", "image", "ports", "readinessProbe", "restartPolicy", "startupProbe"];

/// Removes from the pod template of a user's workload all fields that are not kept.
fn prune_pod_template(template: &mut Value) {
    retain_fields(template, &["metadata", "spec"]);
    template.get_mut("metadata").into_iter().for_each(|it| retain_fields(it, &["labels"]));
    if let Some(spec) = template.get_mut("spec") {
        retain_fields(spec, &["hostNetwork", "containers", "initContainers"]);
        prune_containers(spec);
    }
}

/// Removes from the containers of a user's pod all fields that are not kept.
fn prune_containers(pod_spec: &mut Value) {
    for list in ["containers", "initContainers"] {
        let containers = pod_spec.get_mut(list).and_then(Value::as_array_mut);
        for container in containers.into_iter().flatten() {
            retain_fields(container, &CONTAINER_FIELDS);
        }
    }
}

/// Parts of an object, each with the fields of it that are kept.
pub type TrimmedParts = &'static [(&'static str, &'static [&'static str])];

/// Fields of a pod's status that are kept.
const POD_STATUS: &[&str] = &[
    "phase",
    "podIP",
    "podIPs",
    "conditions",
    "containerStatuses",
    "initContainerStatuses",
    "ephemeralContainerStatuses",
    "reason",
    "message",
];

/// Fields of a Service's specification that are kept. A Service has no generation. So a change by another client shows
/// only in fields that are kept, and each field that the controller sets is one of them.
const SERVICE_SPEC: &[&str] = &[
    "clusterIP",
    "clusterIPs",
    "externalName",
    "externalTrafficPolicy",
    "internalTrafficPolicy",
    "ipFamilyPolicy",
    "ports",
    "selector",
    "sessionAffinity",
    "sessionAffinityConfig",
    "trafficDistribution",
    "type",
];

/// Returns the parts of a kind of which only some fields are kept, since the controller reads no others. Objects that
/// users made have other parts ([user_parts]).
pub const fn trimmed_parts(resource: ResourceKind) -> TrimmedParts {
    match resource {
        ResourceKind::Pod => &[
            (
                "spec",
                &[
                    "nodeName",
                    "terminationGracePeriodSeconds",
                    "hostNetwork",
                    "readinessGates",
                    "ephemeralContainers",
                ],
            ),
            ("status", POD_STATUS),
        ],
        ResourceKind::Deployment => &[("spec", &["replicas", "progressDeadlineSeconds"])],
        ResourceKind::Node => &[
            ("spec", &["podCIDRs", "unschedulable", "taints"]),
            ("status", &["conditions", "addresses", "images", "allocatable"]),
        ],
        ResourceKind::Service => &[("spec", SERVICE_SPEC), ("status", &["loadBalancer"])],
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
        | ResourceKind::Namespace
        | ResourceKind::RequestedCertificate
        | ResourceKind::IssuedCertificate
        | ResourceKind::ReferenceGrant
        | ResourceKind::GatewayClass
        | ResourceKind::Gateway
        | ResourceKind::HttpRoute
        | ResourceKind::GrpcRoute => &[],
        ResourceKind::AcmeChallenge => {
            &[("spec", &["type", "dnsName", "token", "key"]), ("status", &[])]
        }
        // Of these kinds only metadata and status are read: the applied hash suffices to find a difference.
        ResourceKind::PodAutoscaler
        | ResourceKind::ServerlessService
        | ResourceKind::HorizontalPodAutoscaler
        | ResourceKind::Metric
        | ResourceKind::Image
        | ResourceKind::Ingress => &[("spec", &[])],
    }
}

/// Returns the parts of a kind of which only some fields are kept, for objects without the label of a Revision.
pub const fn user_parts(resource: ResourceKind) -> TrimmedParts {
    match resource {
        ResourceKind::Deployment | ResourceKind::StatefulSet => &[
            ("spec", &["replicas", "ordinals", "persistentVolumeClaimRetentionPolicy", "template"]),
            ("status", &["observedGeneration", "replicas", "readyReplicas", "conditions"]),
        ],
        ResourceKind::HorizontalPodAutoscaler => {
            &[("spec", &["scaleTargetRef", "minReplicas", "maxReplicas"]), ("status", &[])]
        }
        ResourceKind::Pod => &[
            (
                "spec",
                &[
                    "nodeName",
                    "terminationGracePeriodSeconds",
                    "hostNetwork",
                    "readinessGates",
                    "containers",
                    "initContainers",
                ],
            ),
            ("status", POD_STATUS),
        ],
        // All other kinds are read in the same way, whether a user or the controller made the object.
        other => trimmed_parts(other),
    }
}

fn retain_fields(value: &mut Value, fields: &[&str]) {
    let Value::Object(all) = value else { return };
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

    fn all_scopes() -> Vec<WatchScope> {
        let of_workloads = workload_scopes("knative-serving");
        let of_certificates = [request_scopes(), cert_manager_scopes()].concat();
        let of_gateways = [gateway_scopes(), grpc_route_scopes(), ingress_scopes()].concat();
        [watch_scopes("knative-serving"), of_workloads, of_certificates, of_gateways].concat()
    }

    #[test]
    fn every_kind_is_watched() {
        let watched: BTreeSet<ResourceKind> = all_scopes().iter().map(|it| it.resource).collect();
        assert_eq!(watched, ResourceKind::ALL.into());
    }

    #[test]
    fn no_two_watches_have_the_same_label() {
        let labels: BTreeSet<String> = all_scopes().iter().map(WatchScope::label).collect();
        assert_eq!(labels.len(), all_scopes().len());
        assert_eq!(WITHOUT_REVISION, format!("!{}", key::REVISION_UID));
    }

    #[test]
    fn a_pod_of_a_revision_keeps_its_debug_containers() {
        let mut pod = json!({
            "metadata": {"name": "a", "labels": {key::REVISION_UID: "u"}},
            "spec": {"ephemeralContainers": [{"name": "b"}]},
            "status": {"ephemeralContainerStatuses": [{"name": "b", "state": {"running": {}}}]},
        });
        let before = pod.clone();
        trim_object(&WatchScope::of_revisions(ResourceKind::Pod), &mut pod);
        assert_eq!(pod, before);
    }

    #[test]
    fn a_pod_of_a_revision_keeps_only_its_node_readiness_gates_and_status() {
        let mut pod = json!({
            "metadata": {
                "name": "a", "managedFields": [1], "labels": {key::REVISION_UID: "u"},
                "annotations": {"a": "b", "kubectl.kubernetes.io/last-applied-configuration": "{}"},
            },
            "spec": {"nodeName": "n", "containers": [1], "volumes": [2], "readinessGates": [3]},
            "status": {"phase": "Running", "qosClass": "Burstable"},
        });
        trim_object(&WatchScope::of_revisions(ResourceKind::Pod), &mut pod);
        let expected = json!({
            "metadata": {
                "name": "a", "labels": {key::REVISION_UID: "u"}, "annotations": {"a": "b"},
            },
            "spec": {"nodeName": "n", "readinessGates": [3]},
            "status": {"phase": "Running"},
        });
        assert_eq!(pod, expected);
    }

    /// Named ports of a Service are looked up in the containers of each pod.
    #[test]
    fn a_workload_of_a_user_and_its_pods_keep_what_a_scaled_service_depends_on() {
        let container = json!({
            "name": "a", "image": "b", "ports": [{"name": "http", "containerPort": 80}],
            "readinessProbe": {"httpGet": {"port": "http"}}, "startupProbe": {"exec": {}},
            "restartPolicy": "Always",
        });
        let mut long = container.clone();
        long["env"] = json!([{"name": "A", "value": "b"}]);
        long["volumeMounts"] = json!([1]);
        let pod_spec = |container: &Value| {
            json!({
                "hostNetwork": true, "containers": [container], "initContainers": [container],
            })
        };
        let metadata = json!({"name": "a", "labels": {"app": "a"}});
        for resource in [ResourceKind::Deployment, ResourceKind::StatefulSet] {
            let of = |container: &Value| {
                let template = json!({
                    "metadata": {"labels": {"app": "a"}}, "spec": pod_spec(container),
                });
                json!({
                    "metadata": metadata.clone(),
                    "spec": {
                        "replicas": 3, "template": template, "ordinals": {"start": 1},
                        "persistentVolumeClaimRetentionPolicy": {"whenScaled": "Delete"},
                    },
                    "status": {"readyReplicas": 2},
                })
            };
            let mut workload = of(&long);
            workload["spec"]["strategy"] = json!({"type": "Recreate"});
            workload["spec"]["template"]["metadata"]["annotations"] = json!({"a": "b"});
            workload["spec"]["template"]["spec"]["volumes"] = json!([2]);
            workload["status"]["collisionCount"] = json!(1);
            trim_object(&WatchScope::of_users(resource), &mut workload);
            assert_eq!(workload, of(&container), "{resource}");
        }
        let mut pod = json!({"metadata": metadata.clone(), "spec": pod_spec(&long)});
        pod["spec"]["volumes"] = json!([2]);
        trim_object(&WatchScope::of_users(ResourceKind::Pod), &mut pod);
        assert_eq!(pod, json!({"metadata": metadata, "spec": pod_spec(&container)}));
    }

    #[test]
    fn the_hpa_of_a_user_keeps_its_target_and_that_of_a_revision_nothing() {
        let spec = json!({"scaleTargetRef": {"name": "a"}, "minReplicas": 2});
        let trimmed = |labels: Value| {
            let metadata = json!({"name": "a", "labels": labels});
            let mut hpa = json!({"metadata": metadata, "spec": spec});
            hpa["spec"]["metrics"] = json!([1]);
            prune_fields(ResourceKind::HorizontalPodAutoscaler, &mut hpa);
            hpa["spec"].take()
        };
        assert_eq!(trimmed(json!({})), spec);
        assert_eq!(trimmed(json!({key::REVISION_UID: "u"})), json!({}));
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
            serves_local_tls: true,
            affinity: Some(std::time::Duration::from_secs(60)),
            gateway_port: None,
        };
        let made = placeholder_service(&placeholder).body;
        let mut kept = made.clone();
        prune_fields(ResourceKind::Service, &mut kept);
        assert_eq!(kept["spec"], made["spec"]);
    }

    #[test]
    fn a_service_of_a_user_keeps_what_a_scaled_service_depends_on() {
        let kept = json!({
            "clusterIP": "None", "clusterIPs": ["None"], "externalName": "a.example.com",
            "externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local",
            "ports": [{"port": 80, "targetPort": "http", "appProtocol": "tcp"}],
            "selector": {"app": "a"}, "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}},
            "trafficDistribution": "PreferClose", "type": "NodePort",
        });
        let mut service = json!({"metadata": {"name": "a"}, "spec": kept});
        service["spec"]["externalIPs"] = json!(["192.0.2.1"]);
        trim_object(&WatchScope::all_of(ResourceKind::Service), &mut service);
        assert_eq!(service["spec"], kept);
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
        let scopes = all_scopes();
        let covering = |namespace: &str, has_revision_label: bool| {
            let name = NamespacedName::new(namespace, "a");
            let pods = scopes.iter().filter(|it| it.resource == ResourceKind::Pod);
            let covering = pods.filter(|it| it.covers(&name, has_revision_label));
            covering.map(|it| it.label_selector).collect::<Vec<_>>()
        };
        for has_revision_label in [true, false] {
            assert_eq!(covering("knative-serving", has_revision_label), [None]);
        }
        assert_eq!(covering("default", true), [Some(key::REVISION_UID)]);
        assert_eq!(covering("default", false), [Some(WITHOUT_REVISION)]);
    }
}
